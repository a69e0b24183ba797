"""`certify.explain` lists every layer with its norm and share, or all that is missing; the command prints the same."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import certify
from certify import explain_command
from certify.methods import METHODS
from tests.tools.captured_models import Tokens, plain, settled
from tests.tools.small_models import small_model


def test_every_layer_has_a_norm_and_a_share() -> None:
    model, x, _ = settled(plain)
    found = certify.explain(model, x, nonce="a")
    assert found.method == "adjoint"
    assert "accepted by adjoint" in str(found)
    assert found.seconds > 0
    assert found.memory > 0
    assert set(found.methods) <= set(METHODS)
    layers = [row for row in found.rows if row.norm is not None]
    assert [row.kind for row in layers][:2] == ["Conv2d, BatchNorm2d", "ReLU"]
    assert [row.name for row in layers][:2] == ["0, 1", "2"]
    assert abs(sum(row.share or 0.0 for row in found.rows) - 1) < 0.1  # medians of images
    assert (found.radius_B > 0).all()


def test_names_are_those_of_the_model() -> None:
    model, x, _ = settled(Tokens)
    names = [row.name for row in certify.explain(model, x, nonce="a").rows]
    assert "embed" in names
    assert any("attention" in name and "norms.0" in name for name in names)


def test_a_model_of_the_zoo_is_explained_too() -> None:
    model = small_model("standard", 0)
    found = certify.explain(model, torch.rand(2, 1, 8, 8), nonce="a")
    assert found.accepted
    assert any("blocks.0" in row.name for row in found.rows)


def test_a_layer_of_first_order_only_is_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(192, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x.flatten(1)).sin().cos())

    model, x, _ = settled(Net)
    found = certify.explain(model, x)
    assert not found.accepted
    assert [row.name for row in found.rows] == ["sin", "cos"]
    assert "2 operations have no rule" in str(found)


def test_the_command_prints_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    explain_command.main(["mine:net", "--img-size", "8"])
    assert "accepted by adjoint" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        explain_command.main(["resnet81"])
    assert left.value.code == 2
    assert "resnet18" in capsys.readouterr().err


def test_the_mode_of_every_part_is_left_as_it_was() -> None:
    model, x, _ = settled(plain)
    model.train()
    model.get_submodule("1").eval()  # a frozen normalisation, as people have it
    before = [part.training for part in model.modules()]
    certify.explain(model, x, nonce="a")
    assert [part.training for part in model.modules()] == before
