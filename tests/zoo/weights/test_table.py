"""Weights by name: the table is true and complete, and a name gives the function that was certified."""

import json

import pytest
import timm
import torch

import zoo
from benchmarks import weights_table
from benchmarks.record import RESULTS
from certizoo import UserError
from certizoo.documents import read_yaml
from certizoo.files import sha256
from certizoo.norms import NAMES
from zoo.__main__ import main
from zoo.weights import table

ENTRIES = list(zoo.weights.entries().values())
IN_PACKAGE = [entry for entry in ENTRIES if entry.source == table.PACKAGE]
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


def test_every_hand_over_of_the_package_is_in_the_table() -> None:
    folders = {path.parent.name for path in table.HERE.glob(f"*/{table.WEIGHTS}")}
    assert folders == {entry.name for entry in IN_PACKAGE}
    assert folders


def test_the_table_is_what_the_results_say() -> None:
    """`python -m benchmarks.leaderboard` reproduces it, byte for byte."""
    assert weights_table.text() == table.TABLE.read_text()


@each_entry
def test_its_figures_are_those_of_the_certificates_of_these_weights(entry: zoo.weights.Entry) -> None:
    found: dict[str, dict[float, float]] = {}
    for path in RESULTS.glob(f"{entry.name}_{entry.dataset}_best*.json"):
        claim = json.loads(path.read_text())
        asked = (claim["weights_sha256"], claim["images"], claim["dataset"], round(100 * claim["clean"], 2))
        assert asked == (entry.sha256, entry.images, entry.dataset, entry.clean)
        shares = {float(eps): round(100 * share["certified"], 2) for eps, share in claim["accuracy"].items()}
        found[claim.get("norm", "l2")] = shares
    assert found == entry.certified


@each_entry
def test_a_name_with_weights_is_a_model_of_the_zoo(entry: zoo.weights.Entry) -> None:
    assert entry.name in zoo.list_models()
    assert len(entry.sha256) == len(entry.config_sha256) == 64
    assert set(entry.certified) <= set(NAMES)


@pytest.mark.parametrize("entry", IN_PACKAGE, ids=lambda entry: entry.name)
def test_a_name_gives_the_function_that_was_certified(entry: zoo.weights.Entry) -> None:
    """Our name, timm's name and the hand-over give it, with the options that the name has today."""
    folder = zoo.weights.handover_of(entry.name)
    assert (folder / table.WEIGHTS).stat().st_size == entry.bytes
    certified, config = zoo.handover.load(folder)
    assert json.dumps(zoo.model_options(**config["model"])) == json.dumps(zoo.model_options(entry.name))
    options = config["model"]
    images = torch.rand(2, options["in_chans"], options["img_size"], options["img_size"])
    for create in (zoo.create_model, timm.create_model):
        model = create(entry.name, pretrained=True).eval()
        assert torch.equal(model(images), certified(images))


def test_another_number_of_classes_gets_a_new_head_and_another_option_is_refused() -> None:
    published, other = (zoo.create_model("cert_vit_c10", pretrained=True, num_classes=n) for n in (10, 3))
    weights, others = published.state_dict(), other.state_dict()
    assert others["head.weight"].shape[0] == 3
    assert all(torch.equal(weights[key], others[key]) for key in weights if not key.startswith("head."))
    with pytest.raises(UserError, match=r"has depth=2, not 3; remove depth"):
        zoo.create_model("cert_vit_c10", pretrained=True, depth=3)


@pytest.mark.parametrize("create", [zoo.create_model, timm.create_model])
def test_a_name_without_weights_is_told_which_have_some(create) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"dp_vit_ti has no published weights; models with weights: .*cert_vit_c10"):
        create("dp_vit_ti", pretrained=True)


def test_one_changed_byte_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    import shutil

    shutil.copytree(table.HERE / "cert_vit_c10", tmp_path / "cert_vit_c10")
    monkeypatch.setattr(table, "HERE", tmp_path)
    file = tmp_path / "cert_vit_c10" / table.WEIGHTS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="does not have the digest in the table"):
        zoo.create_model("cert_vit_c10", pretrained=True)


def test_the_overview_says_what_is_certified(capsys: pytest.CaptureFixture[str]) -> None:
    for entry in ENTRIES:
        main([entry.name])
        assert entry.headline in capsys.readouterr().out
        main(["show", entry.name])
        assert entry.words() in capsys.readouterr().out
    main(["show", "spec_vit_digits"])
    assert "weights: none published" in capsys.readouterr().out


def test_the_table_says_no_more_than_it_means() -> None:
    """An entry with a key too many or too few is refused."""
    fields = set(table.Entry.__dataclass_fields__) - {"name"}
    assert all(set(said) == fields for said in read_yaml(table.TABLE).values())
    assert all(sha256(table.HERE / entry.name / table.CONFIG) == entry.config_sha256 for entry in IN_PACKAGE)
