"""Features under attack: properties of the A-distance, the head's input, norms of the weights, and the command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from PIL import Image

import zoo
from certify.__main__ import main
from certify.papers import feature_distance, feature_report, features, layer_norms
from certify.rows import images
from certify.shared.bake import bake
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.config.compose import compose_config
from certizoo.locks import HOLDER, LOCK
from certizoo.shards import DataConfig
from zoo.models.overview import tiny_options

FAMILIES = (
    "dp_vit_ti", "l2_deit_ti", "dp_convit_ti", "dp_swin_t", "lips_vit_ti", "covit_t1", "conv_4c3f", "dp_vit_s1",
    "lofast_vit_c10",
)  # fmt: skip
MODEL: dict[str, Any] = {"name": "dp_vit_ti", "num_classes": 10, "img_size": 8, "in_chans": 1}
MODEL |= {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
CONV: dict[str, Any] = {"name": "conv_4c3f", "num_classes": 10, "img_size": 8, "in_chans": 1}
CONV |= {"layers": ((4, 3, 1, 1), (4, 4, 2, 1)), "hidden": (8,)}
ATTACK = AttackConfig(norm="linf", eps=0.2, steps=2)


def tiny(name: str) -> Any:
    torch.manual_seed(0)
    return zoo.create_model(name, **tiny_options(name)).eval()


def images_of(name: str, count: int = 3) -> torch.Tensor:
    options = zoo.model_options(name) | tiny_options(name)
    shape = (count, options["in_chans"], options["img_size"], options["img_size"])
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


# A-distance -----------------------------------------------------------------------------------------------------------


def sample(count: int, width: int, seed: int) -> feature_distance.Array:
    return np.random.default_rng(seed).standard_normal((count, width))


def test_one_distribution_is_no_distance_from_itself() -> None:
    found = [feature_distance.a_distance(sample(200, 8, seed), sample(200, 8, 1000 + seed)) for seed in range(5)]
    assert max(one.value for one in found) < 0.2
    assert [one.interval[0] for one in found] == [0] * 5


def test_the_same_features_are_no_distance_apart() -> None:
    """Both versions of an image are held out together, so that recognising the image does not help."""
    z = sample(60, 100, 0)  # a classifier can memorise any labels of 96 points in 100 dimensions
    assert feature_distance.a_distance(z, z).value == 0


def test_separable_features_are_two_apart() -> None:
    z = sample(60, 8, 0)
    found = feature_distance.a_distance(z, z + 10)
    assert (found.error, found.value) == (0, 2)
    assert found.interval[1] == 2


def test_a_known_distance_is_found() -> None:
    """For Gaussians 2 apart along one axis the best classifier errs with probability Phi(-1) = 0.1587."""
    z, other = sample(1500, 4, 0), sample(1500, 4, 1)
    other[:, 0] += 2
    found = feature_distance.a_distance(z, other)
    assert found.error == pytest.approx(0.1587, abs=0.02)
    assert found.interval[0] < feature_distance.from_error(0.1587) < found.interval[1]


def test_neither_order_nor_scale_nor_shift_matter() -> None:
    clean, attacked = sample(100, 6, 0), sample(100, 6, 1) + 0.5
    found = feature_distance.a_distance(clean, attacked)
    assert 0 < found.value < 2
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(100)
        assert feature_distance.a_distance(clean[order], attacked[order]) == found
    scale = np.array([1e-3, 0.1, 1.0, 3.0, 50.0, 1e4])
    moved = feature_distance.a_distance(scale * clean + 7 * scale, scale * attacked + 7 * scale)
    assert moved.error == pytest.approx(found.error, abs=0.005)


@pytest.mark.parametrize(("error", "value"), [(0, 2), (0.25, 1), (0.5, 0), (0.6, 0), (1, 0)])
def test_it_lies_between_0_and_2(error: float, value: float) -> None:
    assert feature_distance.from_error(error) == value


def test_the_plane_is_that_of_its_seed() -> None:
    z = sample(20, 5, 0)
    first, again = (feature_distance.plane(z, z + 8, perplexity=5, seed=1) for _ in range(2))
    assert first.shape == (40, 2)
    assert np.array_equal(first, again)


# features and weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_of_the_features_is_the_logits(name: str) -> None:
    model, x = tiny(name), images_of(name)
    z_BD, logits_BK = features.read_by_head(model, x)
    head = getattr(model.head, "fc", model.head)
    assert z_BD.shape == (len(x), head.in_features)
    with torch.no_grad():
        torch.testing.assert_close(head(z_BD), model(x))
        torch.testing.assert_close(logits_BK, model(x))


def test_features_are_those_of_the_attacked_images_of_the_seed() -> None:
    model, x, labels = tiny("dp_vit_ti"), images_of("dp_vit_ti", 4), torch.tensor([0, 1, 2, 3])
    batches = [(["a", "b"], x[:2], labels[:2]), (["c", "d"], x[2:], labels[2:])]
    first, again, other = (
        features.clean_and_attacked(model, batches, ATTACK, seed, lambda: None) for seed in (1, 1, 2)
    )
    assert torch.equal(first.attacked_ND, again.attacked_ND)
    assert not torch.equal(first.attacked_ND, other.attacked_ND)
    generator = torch.Generator().manual_seed(1)
    read = [  # in the command's batches: other batch sizes round differently
        (features.read_by_head(model, x)[0], *features.read_by_head(model, ATTACK.run(model, x, y, generator)))
        for _, x, y in batches
    ]
    clean_ND, attacked_ND, logits_NK = (torch.cat(parts) for parts in zip(*read, strict=True))
    assert torch.equal(first.clean_ND, clean_ND)
    assert torch.equal(first.attacked_ND, attacked_ND)
    assert torch.equal(first.attacked_correct_N, logits_NK.argmax(-1) == labels)


def test_features_that_are_no_numbers_are_refused() -> None:
    model, x = tiny("dp_vit_ti"), images_of("dp_vit_ti")
    with torch.no_grad():
        model.norm.weight.fill_(float("inf"))
    with pytest.raises(UserError, match="NaN or infinite"):
        features.clean_and_attacked(model, [(["a"] * 3, x, torch.zeros(3).long())], ATTACK, 0, lambda: None)


@pytest.mark.parametrize("name", ["dp_vit_ti", "dp_convit_ti", "dp_swin_t", "lofast_vit_c10"])
def test_norms_are_those_of_the_heads_of_the_served_weights(name: str) -> None:
    """Compare with an SVD of every head's rows, with the caps folded in."""
    model = tiny(name)
    table = layer_norms.sigma_max(bake(model))
    layers = [(n, m) for n, m in model.named_modules() if hasattr(m, "head_weights_3HOD")]
    assert len(table) == 3 * len(layers)
    for layer, (module_name, module) in enumerate(layers, 1):
        own = table[table["layer"] == layer].set_index("weight")
        assert set(own["module"]) == {module_name}
        for weight, whole in zip(("W_Q", "W_K", "W_V"), module.qkv.weight.detach().double().chunk(3), strict=True):
            heads = [float(torch.linalg.svdvals(head)[0]) for head in whole.chunk(module.num_heads)]
            assert own["sigma_max"][weight] == pytest.approx(max(heads), rel=1e-7)
            assert own["sigma_max"][weight] >= max(heads) * (1 - 1e-14)


def test_missing_weights_have_a_note() -> None:
    tied, conv, dp = (layer_norms.sigma_max(bake(tiny(name))) for name in ("l2_vit_ti", "covit_t1", "dp_vit_ti"))
    assert [layer_norms.note(table) for table in (tied, conv, dp)] == ["is W_Q", "none", ""]
    assert [set(layer_norms.largest(table)) for table in (tied, conv)] == [{"W_Q", "W_V"}, set()]


# the command ----------------------------------------------------------------------------------------------------------


def handover(folder: Path, digits: Path, config: dict[str, Any], seed: int = 0) -> Path:
    torch.manual_seed(seed)
    data = DataConfig("digits", str(digits), "digits-train-*.tar", "digits-test-*.tar", 10, 8, 1)
    zoo.handover.save(folder, zoo.create_model(**config), config, {"data": vars(data)})
    return folder


QUICK = ["images=20", "batch_size=8", "perplexity=5", "attack.steps=2"]
PICTURES = ("tsne", "sigma_max_weights")


def test_the_command(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models on the same images give one table column each, one panel, and one line in the figure of norms."""
    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    own = handover(tmp_path / "run" / "handover", digits, MODEL)
    other = handover(tmp_path / "vanilla", digits, MODEL | {"attention": "l2"}, seed=1)
    main(["features", f"handover={own}", f"against={other}", *QUICK])
    printed = capsys.readouterr().out
    for words in ("20 images of digits", "A-distance", "dp_vit_ti (against)", "is W_Q", "an estimate"):
        assert words in printed, words
    out = tmp_path / "run" / "features"
    summary = json.loads((out / "features.json").read_text())
    assert summary["settings"]["attack"]["eps"] == pytest.approx(8 / 255)
    first, second = summary["models"]
    assert (first["name"], second["name"]) == ("dp_vit_ti", "dp_vit_ti (against)")
    assert first["weights_sha256"] != second["weights_sha256"]
    for row in (first, second):
        assert 0 <= row["a_distance_interval"][0] <= row["a_distance"] <= row["a_distance_interval"][1] <= 2
        assert row["attacked"] <= row["clean"]
    points = pd.read_csv(out / "tsne.csv")
    assert points.groupby(["model", "of"])["key"].nunique().tolist() == [20] * 4
    assert np.isfinite(points[["x", "y"]]).all(axis=None)
    correct = points[points["of"] == "attacked"].groupby("model")["correct"].mean()
    assert correct["dp_vit_ti"] == first["attacked"]
    norms = pd.read_csv(out / "sigma_max_weights.csv").set_index(["model", "weight"])["sigma_max"]
    assert norms["dp_vit_ti", "W_K"].max() == first["sigma_max"]["W_K"]
    assert len(drawn) == len(PICTURES)
    for name in PICTURES:
        with Image.open(out / f"{name}.png") as image:
            assert min(image.size) > 300
    assert [len(figure.axes) for figure in drawn] == [2, 3]
    assert [len(axes.lines) for axes in drawn[1].axes] == [2, 1, 2], "tied L2 attention has no line for W_K"
    for axes in (axes for figure in drawn for axes in figure.axes):
        assert np.isfinite(axes.dataLim.get_points()).all(), "nothing is drawn"
        assert axes.get_xlabel()
        assert "(" in axes.get_ylabel(), "no unit"


def test_a_conv_net_alone_has_no_figure_of_norms(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = handover(tmp_path / "handover", digits, CONV), tmp_path / "out"
    main(["features", f"handover={folder}", f"out={out}", *QUICK, "attack.eps=0"])
    assert "none" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"features.json", "tsne.csv", "tsne.png", LOCK, HOLDER}
    (row,) = json.loads((out / "features.json").read_text())["models"]
    assert (row["a_distance"], row["sigma_max"], row["sigma_max_note"]) == (0, {}, "none"), "eps is 0"
    assert row["clean"] == row["attacked"]


def test_the_defaults_are_one_and_those_of_the_paper() -> None:
    config = compose_config("features", [])
    attack = AttackConfig(**config["attack"])
    assert attack == feature_report.DEFAULT_ATTACK
    settings = {key: config[key] for key in ("images", "seed", "perplexity", "batch_size")}
    assert feature_report.Settings(**settings, attack=attack) == feature_report.Settings()


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("images=9", "at least 10"),
        ("images=all", "whole number"),
        ("batch_size=0", "at least 1"),
        ("seed=-1", "at least 0"),
        ("perplexity=0.5", "at least 1"),
        ("perplexity=high", "give a number of at least 1"),
        ("perplexity=40", "below twice"),
        ("attack.eps=8/255", "attack.eps='8/255' is invalid"),
        ("attack.steps=few", "at least 1"),
        ("atack.steps=2", "nearest: attack.steps"),
        ("against=nowhere", "not a hand-over"),
        ("handover=nowhere", "not a hand-over"),
        ("version=a@b", "exactly one of"),
    ],
)
def test_faults_are_one_line(
    argument: str, words: str, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = handover(tmp_path / "handover", digits, MODEL)
    with pytest.raises(SystemExit) as exit_:
        main(["features", f"handover={folder}", *QUICK, argument])
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error
    assert not list((tmp_path / "features").glob("[!.]*"))


def test_models_of_other_images_are_refused_before_anything_runs(digits: Path, tmp_path: Path) -> None:
    data = DataConfig("digits", str(digits), "digits-train-*.tar", "digits-test-*.tar", 10, 8, 1)
    own = handover(tmp_path / "own", digits, MODEL)
    for key, value in {"img_size": 12, "in_chans": 3, "num_classes": 5}.items():
        other = handover(tmp_path / key, digits, MODEL | {key: value})
        with pytest.raises(UserError, match=f"but dp_vit_ti (takes|has) {value}"):
            feature_report.run(own, other, data, feature_report.Settings(), tmp_path / "out")


def test_keys_of_the_list_are_those_of_the_stage(digits: Path, tmp_path: Path) -> None:
    """The digest of the images is the one in certificate.json."""
    data = DataConfig("digits", str(digits), "digits-train-*.tar", "digits-test-*.tar", 10, 8, 1)
    settings = feature_report.Settings(images=12, perplexity=3, attack=ATTACK, batch_size=5)
    seen: list[tuple[int, int]] = []
    folder = handover(tmp_path / "handover", digits, MODEL)
    summary = feature_report.run(
        folder, None, data, settings, tmp_path / "out", lambda done, total: seen.append((done, total))
    )
    listed = images.image_list(data, 12, 12)
    assert summary["image_list_sha256"] == images.digest(key for keys, _, _ in listed.batches() for key in keys)
    assert seen == [(i, 4) for i in range(1, 5)]
