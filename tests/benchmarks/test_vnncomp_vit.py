"""The whole command runs on networks exported here: its proofs hold and its output matches its findings."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import benchmarks.record
from benchmarks import vnncomp_vit
from benchmarks.vnncomp import vit, vnnlib
from certify.api import certifier, radius_of
from certizoo import UserError
from tests.tools.cases import mostly_slow
from tests.tools.exported_vit import benchmark, exported, published_vit, written

SMALL, LARGE = 1e-5, 0.2  # radii that can and that cannot be proved for random weights
NET = published_vit(5)
IMAGES = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(7))
SHAPE = (3, 8, 8)


@torch.no_grad()
def classes(images_BCHW: Tensor) -> list[int]:
    found: list[int] = vit.read(exported(NET))(images_BCHW.double()).argmax(-1).tolist()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make one network with a proved, an unproved and a misclassified property, and another with a proved one."""
    labels = classes(IMAGES)
    properties = [
        written(IMAGES[0], SMALL, labels[0], 4),
        written(IMAGES[1], LARGE, labels[1], 4),
        written(IMAGES[2], SMALL, (labels[2] + 1) % 4, 4),
    ]
    return benchmark(tmp_path / "vit", {"one": NET, "two": NET}, {"one": properties, "two": properties[:1]})


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["vnncomp_vit", *map(str, words)])
    vnncomp_vit.main()


@pytest.mark.parametrize("method", mostly_slow(("best", "lofast", "image"), "lofast"))
def test_the_command_counts_what_is_proved(
    method: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path / "results")
    run(monkeypatch, folder, "--method", method, "--nonce", "n", "--radii", 1, "--record", "found")
    found: dict[str, Any] = json.loads((tmp_path / "results/found.json").read_text())
    assert [row["verdict"] for row in found["rows"]] == ["verified", "unknown", "misclassified", "verified"]
    one, two = found["nets"]
    assert (one["tried"], one["verified"], one["unknown"], one["misclassified"]) == (3, 1, 1, 1)
    assert (two["tried"], two["verified"], two["stages"]) == (1, 1, None)
    assert one["stages"]["images"] <= 1
    assert 0 < one["radius_over_eps"] < 1
    shown = capsys.readouterr().out
    assert "one" in shown
    assert "verified" in shown


def test_the_first_of_each_net_until_the_time_is_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, folder, "--method", "lofast", "--instances", 2)
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["one", "2"] in rows
    assert ["two", "1"] in rows
    run(monkeypatch, folder, "--method", "lofast", "--seconds", -1)
    assert ["one", "0"] in [line.split()[:2] for line in capsys.readouterr().out.splitlines()]


def test_properties_are_decided(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path / "results")
    rows = tmp_path / "rows"
    run(monkeypatch, folder, "--decide", 3, "--record", "found", "--rows", rows)
    found: dict[str, Any] = json.loads((tmp_path / "results/found.json").read_text())
    first, second, third, fourth = (row["verdict"] for row in found["rows"])
    assert (first, third, fourth) == ("verified", "refuted", "verified")
    assert second in ("unknown", "refuted")
    assert found["method"] == "linear"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:3]))
    monkeypatch.setattr(
        vnncomp_vit, "decided", lambda *_: {"verdict": "unknown", "margin": 1.0, "loss": None, "seconds": 0}
    )
    run(monkeypatch, folder, "--decide", 3, "--record", "resumed", "--rows", rows)
    resumed = json.loads((tmp_path / "results/resumed.json").read_text())["rows"]
    assert resumed[:3] == found["rows"][:3]
    assert resumed[3]["verdict"] == "unknown"
    with pytest.raises(SystemExit):
        run(monkeypatch, folder, "--decide", 4, "--rows", rows)


def test_what_is_proved_is_a_cube(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between the two radii of an image only L2 has a proof, which does not count."""
    model, image = vit.read(exported(NET)), IMAGES[:1].double()
    label = torch.tensor(classes(IMAGES[:1]))
    linf, l2 = (
        float(radius_of(certifier(model, "lofast", "n", norm).analyse(image, label))) for norm in ("linf", "l2")
    )
    assert linf < l2
    texts = [written(IMAGES[0], eps, int(label), 4) for eps in (0.9 * linf, (linf * l2) ** 0.5)]
    run(monkeypatch, benchmark(tmp_path / "vit", {"one": NET}, {"one": texts}), "--method", "lofast")
    assert ["one", "2", "1", "1", "0"] in [line.split()[:5] for line in capsys.readouterr().out.splitlines()]


# boxes and balls ------------------------------------------------------------------------------------------------------


def around(pixels_CHW: Tensor, eps: float) -> tuple[vnncomp_vit.Ball, vnnlib.Property]:
    said = vnnlib.parse(written(pixels_CHW, eps, 0, 4).encode(), "p")
    return vnncomp_vit.ball(said, vit.read(exported(NET)), SHAPE, "p"), said


@pytest.mark.parametrize("eps", [1 / 255, 1e-4, 0.3])
def test_the_ball_holds_the_box_and_hardly_more(eps: float) -> None:
    pixels = IMAGES[0].clone()
    pixels[0, 0, :4] = torch.tensor([0.0, 1.0, eps / 2, 1 - eps / 2])  # clipped
    ball, said = around(pixels, eps)
    model = vit.read(exported(NET))
    lower, upper = (torch.from_numpy(side).view(SHAPE) for side in (said.lower_I, said.upper_I))
    image = ball.image_1CHW[0]
    assert bool(((image >= 0) & (image <= 1)).all())
    assert bool((model.normalize(image - ball.eps) <= lower).all())
    assert bool((model.normalize(image + ball.eps) >= upper).all())
    assert ball.eps <= eps + 1e-6
    unclipped = (pixels > eps) & (pixels < 1 - eps)
    assert float(abs(image - pixels.double())[unclipped].max()) < 1e-6


@pytest.mark.hostile
def test_boxes_beyond_pixels_are_refused() -> None:
    text = written(IMAGES[0], 1 / 255, 0, 4)
    line = next(line for line in text.splitlines() if line.startswith("(assert (<= X_0 "))
    said = vnnlib.parse(text.replace(line, "(assert (<= X_0 9.0))").encode(), "p")
    with pytest.raises(UserError, match="not within"):
        vnncomp_vit.ball(said, vit.read(exported(NET)), SHAPE, "p")


@pytest.mark.hostile
@pytest.mark.parametrize(("pixels", "label", "classes"), [(IMAGES[0, :, :4], 0, 4), (IMAGES[0], 6, 7)])
def test_a_property_of_another_net_is_refused(pixels: Tensor, label: int, classes: int) -> None:
    said = vnnlib.parse(written(pixels, 0.01, label, classes).encode(), "p")
    with pytest.raises(UserError, match="own property"):
        vnncomp_vit.ball(said, vit.read(exported(NET)), SHAPE, "p")


@pytest.mark.parametrize("seed", mostly_slow(range(3), 0))
def test_no_ascent_leaves_the_class_within_a_proved_radius(seed: int) -> None:
    """The model has a class token, the mean of all tokens and folded norms; the attack is in Linf."""
    net = exported(published_vit(seed))
    model = vit.read(net)
    images = torch.rand(4, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        labels = model(images).argmax(-1)
    proved_B = radius_of(certifier(model, "adjoint", "n", "linf").analyse(images, labels))
    assert bool((proved_B > 0).all())
    assert bool((_fallen(model, images, labels, proved_B) > 0).all())


def _fallen(model: torch.nn.Module, images: Tensor, labels: Tensor, eps_B: Tensor) -> Tensor:
    """Return the least margin that ascent finds within eps: (B,)."""
    least_B = torch.full_like(eps_B, torch.inf)
    box_B111 = eps_B.view(-1, 1, 1, 1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        step = box_B111 * torch.empty_like(images).uniform_(-1, 1, generator=generator)
        for _ in range(40):
            step.requires_grad_(True)
            logits = model(images + step)
            own = logits.gather(1, labels[:, None])
            margin_B = (own - logits).scatter(1, labels[:, None], torch.inf).amin(-1)
            least_B = torch.minimum(least_B, margin_B.detach())
            (gradient,) = torch.autograd.grad(margin_B.sum(), step)
            step = (step.detach() - box_B111 / 8 * gradient.sign()).clamp(-box_B111, box_B111)
    return least_B


# files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.hostile
@pytest.mark.parametrize(
    "listed",
    ["", "onnx/one.onnx\n", "a,b,c,d\n", "onnx/one.onnx,../../etc/passwd,1\n", "/etc/passwd,vnnlib/one_0.vnnlib,1\n",
     "absent,vnnlib/one_0.vnnlib,1\n", "onnx/one.onnx,onnx/one.onnx,1\n", "vnnlib/one_0.vnnlib,vnnlib/one_0.vnnlib,1\n",
     "onnx/one.onnx,vnnlib/one_0.vnnlib,1\n" * 1001, '"' + "x" * 200_000, "\x00\n"],
    ids=range(11),
)  # fmt: skip
def test_another_list_is_one_line(
    listed: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "instances.csv").write_text(listed)
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, folder, "--method", "lofast")
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert len(said) < 1000


@pytest.mark.hostile
def test_a_net_read_as_another_function_is_not_certified(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted reader is off by a bias of 1e-3."""
    read = vit.read

    def wrong(content: bytes) -> Any:
        model = read(content)
        with torch.no_grad():
            model.head.bias[0] += 1e-3
        return model

    monkeypatch.setattr(vnncomp_vit.vit, "read", wrong)
    monkeypatch.setattr(vnncomp_vit, "certifier", lambda *_: pytest.fail("it was certified"))
    with pytest.raises(SystemExit):
        run(monkeypatch, folder)
