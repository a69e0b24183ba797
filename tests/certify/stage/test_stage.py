"""The certify stage on real files: nested accuracies, resume, refusals, publication and back."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch

import zoo
from certify.__main__ import main
from certify.stage import register
from certify.stage import run as stage
from certizoo import UserError, shards
from certizoo.registry import browse
from certizoo.shards import eval_loader
from tests.tools.rounding import assert_same_to_rounding
from tests.tools.stage_runs import CONFIG, SETTINGS, data
from zoo.models import catalog


@dataclass(frozen=True)
class Whole:
    """A finished result of SETTINGS and its summary."""

    folder: Path
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def whole(handover: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    return Whole(folder, stage.run(handover, data(digits), SETTINGS, folder))


def test_accuracies_are_nested_image_by_image(whole: Whole) -> None:
    folder, summary = whole.folder, whole.summary
    rows = pd.read_parquet(folder / "certificates.parquet")
    assert len(rows) == 60 == rows["key"].nunique()
    for eps in ("0.01", "0.1", "5"):
        certified = rows[f"certified.{eps}"] == "certified"
        assert (certified <= rows[f"pgd.{eps}"]).all()
        assert (rows[f"pgd.{eps}"] <= rows["correct"]).all()
        assert (certified == (rows["radius.lofast"] >= float(eps))).all()
        assert summary["accuracy"][eps]["certified"] == certified.mean()
    assert summary["clean"] > 0.5
    assert summary["accuracy"]["0.01"]["certified"] > 0
    assert summary["accuracy"]["5"]["certified"] == 0
    for name in ("certificate.json", "curve.png", "card.md"):
        assert (folder / name).stat().st_size > 0
    assert "NaN" not in (folder / "certificate.json").read_text()


def test_without_a_search_a_radius_is_the_largest_certified_eps(
    whole: Whole, handover: Path, digits: Path, tmp_path: Path
) -> None:
    summary = stage.run(handover, data(digits), replace(SETTINGS, search_radii=False), tmp_path)
    searched, tested = (pd.read_parquet(folder / "certificates.parquet") for folder in (whole.folder, tmp_path))
    assert (whole.summary["search_radii"], summary["search_radii"]) == (True, False)
    steps = np.array([0.0, *sorted(SETTINGS.grid)])
    below = [steps[steps <= radius].max() for radius in searched["radius.lofast"]]
    assert tested["radius.lofast"].tolist() == below
    assert 0 < tested["radius.lofast"].max() < searched["radius.lofast"].max()
    answers = [f"{word}.{eps:g}" for word in ("certified", "pgd") for eps in SETTINGS.grid]
    pd.testing.assert_frame_equal(searched[answers], tested[answers])


def test_the_share_of_content_attention_is_told(whole: Whole, handover: Path, digits: Path) -> None:
    alone = zoo.without_content(zoo.handover.load(handover)[0])
    assert alone is not None
    keys, images, labels = next(iter(eval_loader(shards.find(data(digits), "test"), data(digits), batch_size=60)))
    correct = (alone.eval()(images).argmax(-1) == labels).tolist()
    rows = pd.read_parquet(whole.folder / "certificates.parquet")
    assert list(zip(rows["key"], rows["correct_without_content"], strict=True)) == list(zip(keys, correct, strict=True))
    assert whole.summary["clean_without_content"] == sum(correct) / 60


def test_a_start_that_was_cut_off_goes_on(whole: Whole, handover: Path, digits: Path, tmp_path: Path) -> None:
    again = shutil.copytree(whole.folder, tmp_path / "again")
    lines = (again / stage.ROWS).read_text().splitlines(keepends=True)
    (again / stage.ROWS).write_text("".join(lines[:25]) + lines[25][:40])  # killed in the middle of a line
    (again / "certificate.json").unlink()
    done: list[int] = []
    result = stage.run(handover, data(digits), SETTINGS, again, progress=lambda now, total: done.append(now))
    assert done == [25, 40, 60], "the first 25 rows are not computed twice"
    one, two = (
        pd.read_parquet(f / "certificates.parquet").drop(columns=["seconds", "served_difference"])
        for f in (whole.folder, again)
    )
    assert_same_to_rounding(one, two, rtol=1e-9)  # in float64; rows 26 to 40 come in a batch of another size
    for key in ("accuracy", "clean", "image_list_sha256", "weights_sha256"):
        assert result[key] == whole.summary[key]


def test_rows_of_another_model_or_question_are_not_continued(handover: Path, digits: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, images=20)
    stage.run(handover, data(digits), settings, tmp_path)
    with pytest.raises(UserError, match="another eps"):
        stage.run(handover, data(digits), replace(settings, eps=(0.1,)), tmp_path)
    other = tmp_path / "other"
    zoo.handover.save(other, zoo.create_model(**CONFIG), CONFIG, {})
    with pytest.raises(UserError, match="another weights_sha256"):
        stage.run(other, data(digits), settings, tmp_path)


def test_bad_handovers_are_refused(handover: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        zoo.handover.load(tmp_path)
    zoo.handover.save(tmp_path, zoo.create_model(**CONFIG), CONFIG | {"depth": 1}, {})
    with pytest.raises(UserError, match="not a checkpoint of spec_vit_digits"):
        zoo.handover.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 truncated")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        zoo.handover.load(tmp_path)


def test_a_handover_outlives_the_defaults_of_its_name(
    handover: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A later version may change a name's defaults; a hand-over stays the same function."""
    before, _ = zoo.handover.load(handover)
    caps = {"name": "dp", "q_cap": 0.01, "k_cap": 0.01, "v_cap": 0.01, "o_cap": 0.01}
    monkeypatch.setitem(catalog.SPEC_DIGITS, "attention", caps)
    monkeypatch.setitem(catalog.SPEC_DIGITS, "depth", 5)
    after, _ = zoo.handover.load(handover)
    x = torch.rand(4, 1, 8, 8)
    assert torch.equal(before(x), after(x))


@pytest.mark.parametrize("changes", [{"eps": ()}, {"eps": (0.0,)}, {"headline_eps": 0.3}, {"images": 0}])
def test_senseless_settings_are_refused(changes: dict[str, Any]) -> None:
    (key,) = changes
    with pytest.raises(UserError, match=rf"\b{key}\b"):
        replace(SETTINGS, **changes)


def test_published_version_comes_back_bit_equal(
    handover: Path, digits: Path, tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(empty_database, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CERTIZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    stage.run(handover, data(digits), replace(SETTINGS, images=20), tmp_path / "out")
    line = register.publish(handover, tmp_path / "out", registered_name="digits", experiment="test", champion_images=20)
    assert line == "digits version 1 (champion)"
    (version,) = browse.versions("digits")
    for tag in ("certified_acc.0.1", "clean_acc", "pgd_acc.0.1", "method", "dataset", "attention", "git_commit"):
        assert tag in version.tags, tag
    assert (version.tags["penalty"], version.tags["attention"], version.tags["dataset"]) == ("msvp", "dp", "digits")
    served, config = zoo.handover.load(browse.download("digits@champion"))
    original, _ = zoo.handover.load(handover)
    x = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(served(x), original(x))
    assert config["model"] == {"name": "spec_vit_digits"} | zoo.model_options(**CONFIG)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")  # a new process would read the variable
    mlflow.set_registry_uri(f"sqlite:///{tmp_path}/mlflow.db")
    by_mlflow = mlflow.pyfunc.load_model("models:/digits@champion").predict(x.numpy())
    assert np.array_equal(by_mlflow, original(x).numpy())


@pytest.mark.slow
def test_the_experiment_of_a_published_version_can_be_chosen(
    handover: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(register, "publish", lambda *folders, **said: chosen.append(said["experiment"]))
    words = [f"handover={handover}", f"out={tmp_path}", "images=2", "eps=[0.1]", "attack.steps=1", "publish=digits"]
    main(words)
    main([*words, "registry.experiment=mine"])
    assert chosen == ["certify", "mine"]


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+attack.foo=1", "no config key 'attack.foo'"),
        ("attack.steps=abc", "attack.steps='abc'"),
        ("attack.eps=[1]", "attack.eps=[1]"),
        ("attack.norm=l7", "attack.norm='l7'"),
        ("+attack.kind=cw_l2", "attack.kind"),
        ("method=WRONG", "no certification method 'WRONG'"),
        ("method=3", "method=3"),
        ("images=abc", "images='abc'"),
        ("batch_size=1.5", "batch_size=1.5"),
        ("workers=two", "workers='two'"),
        ("eps=0.1", "eps=0.1"),
        ("eps=[abc]", "eps="),
        ("eps=[nan]", "eps=[nan]"),
        ("eps=[inf]", "eps=[inf]"),
        ("headline_eps=x", "headline_eps='x'"),
        ("served_dtype=int8", "served_dtype='int8'"),
        ("data=digits +data.foo=1", "no config key"),
        ("publish=a/b", "publish='a/b' is invalid; give a name of up to 100"),
        (f"registry.experiment={'x' * 300}", "give a name of up to 200 characters"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_before_any_work(
    override: str, words: str, handover: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([f"handover={handover}", f"out={tmp_path / 'out'}", *override.split()])
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command(
    handover: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    main([f"handover={handover}", f"out={out}", "images=20", "eps=[0.1]", "attack.steps=3"])
    assert "certified (best)" in capsys.readouterr().out
    assert json.loads((out / "certificate.json").read_text())["images"] == 20
    for argv, words in [
        ([], "handover=DIR"),
        ([f"handover={tmp_path}"], "not a hand-over"),
        ([f"handover={handover}", "methd=x"], "method"),
        ([f"handover={handover}", f"out={out}", "method=hope"], "no certification method 'hope'"),
        ([f"handover={handover}", f"out={out}", "data=digits", f"data.root={tmp_path}"], "no shards"),
    ]:
        with pytest.raises(SystemExit) as exit_:
            main(argv)
        error = capsys.readouterr().err
        assert exit_.value.code == 2
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert words in error
