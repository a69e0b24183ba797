"""Commands on a model that a function of the user's own makes: `model=MODULE:FUNCTION`."""

import html
import json
import re
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import zoo
from certify import certified_radius
from certify.__main__ import main
from certizoo import UserError
from certizoo.shards import eval_loader, find
from tests.tools import stage_runs
from zoo import user_models
from zoo.user_models import from_function

SOURCE = """
from pathlib import Path
import torch
from torch import nn

Path("imported").touch()

def net():  # draws its weights, so that every call gives another model
    return nn.Sequential(nn.Conv2d(1, 4, 2, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))

def tied():
    model = net()
    model.append(nn.Linear(10, 10, bias=False)).append(nn.Linear(10, 10, bias=False))
    model[-1].weight = model[-2].weight
    return model

def fixed():
    torch.manual_seed(0)
    return net()

def with_argument(size):
    return net()

class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(x.flatten(1).cumsum(1))

waves = Waves

def five():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))

def wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))

def features():
    return nn.Conv2d(1, 10, 2)

def number():
    return 3
"""


@pytest.fixture
def module(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module in the current folder."""
    name = f"of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(user_models, "_trusted", set())
    return name


def on(digits: Path, *words: str) -> list[str]:
    return [*words, "data=digits", f"data.root={digits}", "served_dtype=null", "nonce=n"]


def stopped(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Return the line with which a command ends."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    *_, line = capfd.readouterr().err.splitlines()
    return line


def test_rows_are_those_of_the_python_interface(module: str, digits: Path) -> None:
    main(["evaluate", *on(digits, f"model={module}:fixed", "images=8", "block=4", "workers=2", "out=out")])
    rows, said = pd.read_parquet("out/evaluation.parquet"), json.loads(Path("out/evaluation.json").read_text())
    assert said["attention"] == "unknown", "nothing is claimed of another's model"
    data = stage_runs.data(digits)
    keys, images, labels = next(iter(eval_loader(find(data, "test"), data, batch_size=8, limit=8)))
    model = from_function(f"{module}:fixed").eval()
    radii = certified_radius(model, images, labels, method="adjoint", nonce="n")
    assert list(rows["key"]) == keys
    assert rows["radius.adjoint"].tolist() == pytest.approx(radii.tolist(), rel=1e-9)
    assert (radii > 0).any()


def test_a_certificate_says_how_to_make_it_again(module: str, digits: Path) -> None:
    words = on(digits, f"model={module}:fixed", "images=4", "out=out", "eps=[0.01,0.02]", "headline_eps=0.01")
    main(words)
    first = pd.read_parquet("out/certificates.parquet").drop(columns="seconds")
    said = html.unescape(Path("out/report.html").read_text())
    again = re.search(r"python -m certify (model=.*?)<", said)
    assert again is not None
    main([word.replace("out=OUT", "out=again") for word in shlex.split(again[1])])
    assert pd.read_parquet("again/certificates.parquet").drop(columns="seconds").equals(first)


def test_a_function_that_draws_its_weights_is_drawn_once(module: str, tmp_path: Path) -> None:
    """Workers load the hand-over; shared weights stay shared."""
    zoo.handover.save_function(tmp_path / "kept", f"{module}:tied", (1, 8, 8), {})
    one, two = (zoo.handover.load(tmp_path / "kept")[0] for _ in range(2))
    x_BCHW = torch.rand(3, 1, 8, 8)
    assert torch.equal(one(x_BCHW), two(x_BCHW))
    assert len(list(one.parameters())) == 7, "the last two layers share one weight"
    assert not torch.equal(from_function(f"{module}:tied").eval()(x_BCHW), one(x_BCHW)), "the function draws"


@pytest.mark.hostile
def test_a_hand_over_from_elsewhere_runs_no_code(
    module: str, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    zoo.handover.save_function(tmp_path / "kept", f"{module}:net", (1, 8, 8), {})
    Path("imported").unlink()
    del sys.modules[module]
    for trusted in (set(), {f"{module}:five", "other:net"}):
        monkeypatch.setattr(user_models, "_trusted", trusted)
        with pytest.raises(UserError, match="is code that a hand-over names"):
            zoo.handover.load(tmp_path / "kept")
    assert "is code" in stopped(on(digits, "handover=kept", "out=out"), capfd)
    assert not Path("imported").exists()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("five", "has 5 classes"),
        ("wide", "does not take images of 1x8x8"),
        ("features", "must map images (B, 1, 8, 8) to logits"),
        ("number", "makes a int"),
        ("missing", "cannot be called"),
        ("with_argument", "cannot be called"),
        ("fixed publish=mine", "publish= takes models of the zoo"),
        ("fixed served_dtype=float32", "add served_dtype=null"),
        ("waves", "cumsum"),
    ],
)
def test_what_cannot_be_certified_is_refused_in_a_line(
    module: str, digits: Path, function: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    line = stopped([*on(digits, "images=4", "out=out"), *f"model={module}:{function}".split()], capfd)
    assert line.startswith("error: ")
    assert said in line
    assert not list(Path().glob("out/*.json*")), "no results are written"


def test_the_images_must_be_named(module: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert "add data=NAME data.root=FOLDER" in stopped([f"model={module}:fixed", "out=out"], capfd)
    assert "add data=NAME" in stopped(["image", "ship", f"model={module}:fixed"], capfd)


def test_a_photograph_has_the_class_names_of_the_data(
    module: str, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["image", "ship", *on(digits, f"model={module}:fixed")])
    said = capsys.readouterr().out
    assert re.match(r"ship.png: (\d) \(\1\), margin", said)
    assert "Proved (adjoint, exact arithmetic)" in said
