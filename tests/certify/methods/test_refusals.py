"""Models that cannot be certified are refused in one line: no numbers, not one function, another normalisation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zoo
from certify import certify
from certify.__main__ import main
from certify.methods import METHODS
from certify.shared.bake import bake
from certizoo import UserError
from tests.tools.cases import mostly_slow
from tests.tools.small_models import AVG, SMALL, labelled, small_model
from zoo.models.overview import tiny_options

MODEL: dict[str, Any] = {"name": "dp_vit_ti"} | SMALL | AVG


class AlwaysOn(nn.Module):
    """A dropout that eval() does not switch off."""

    def train(self, mode: bool = True) -> "AlwaysOn":
        return super().train(True)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


def _set(path: str, value: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        with torch.no_grad():
            model.state_dict()[path].view(-1)[0] = value

    return change


def _put(path: str, module: nn.Module) -> Callable[[Any], None]:
    return lambda model: model.set_submodule(path, module)


FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "NaN weight": (_set("blocks.1.attn.qkv.weight", torch.nan), r"blocks\.1\.attn\.qkv\.weight .*NaN"),
    "infinite bias": (_set("head.bias", torch.inf), r"head\.bias .*infinite"),
    "NaN position": (_set("pos_embed", torch.nan), "pos_embed .*NaN"),
    "NaN mean": (_set("normalize.mean", torch.nan), r"normalize\.mean .*NaN"),
    "NaN in a buffer": (_set("blocks.0.attn.power_3HD", torch.nan), "power_3HD .*NaN"),
    "std of zero": (_set("normalize.std", 0.0), "std that is not above 0"),
    "negative std": (_set("normalize.std", -0.5), "std that is not above 0"),
    "no normalisation": (_put("normalize", nn.Identity()), "Normalize was expected"),
    "dropout that stays": (_put("blocks.0.mlp.drop1", AlwaysOn()), r"drop1 .*training mode"),
    "unknown module": (_put("blocks.0.mlp", nn.Softsign()), "Softsign"),
}


QUICK = list(FAULTS)[::4]
CAPTURED = ("no normalisation", "unknown module")  # `linear` certifies the graph of such a model
CASES = [(fault, method) for fault in FAULTS for method in METHODS if not (method == "linear" and fault in CAPTURED)]


@pytest.mark.parametrize(("fault", "method"), mostly_slow(CASES, *(case for case in CASES if case[0] in QUICK)))
def test_the_model_is_refused_in_one_line(fault: str, method: str) -> None:
    spoil, words = FAULTS[fault]
    model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    spoil(model)
    with pytest.raises(UserError, match=words) as refused:
        certify(model, x, y, eps=1e-3, method=method)
    assert "\n" not in str(refused.value)


def test_every_model_of_the_registry_can_be_baked() -> None:
    """No sound model is refused."""
    for name in zoo.list_models():
        bake(zoo.create_model(name, **tiny_options(name)).train())


@pytest.fixture
def handover(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    zoo.handover.save(tmp_path, zoo.create_model(**MODEL), MODEL, {})
    return tmp_path


def test_weights_of_another_normalisation_are_refused(handover: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the config or the weights of another data set, eps would be in other pixel units."""
    path = handover / zoo.handover.CONFIG
    config = yaml.safe_load(path.read_text())
    zoo.handover.load(handover)
    path.write_text(yaml.safe_dump(config | {"model": config["model"] | {"std": [0.25], "mean": [0.5]}}))
    with pytest.raises(UserError, match="normalise images differently"):
        zoo.handover.load(handover)
    with pytest.raises(SystemExit):
        main([f"handover={handover}", "data=digits"])
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    path.write_text(yaml.safe_dump(config))
    weights = load_file(handover / zoo.handover.WEIGHTS)
    save_file(weights | {"normalize.mean": weights["normalize.mean"] + 0.1}, handover / zoo.handover.WEIGHTS)
    with pytest.raises(UserError, match="normalise images differently"):
        zoo.handover.load(handover)


def test_a_model_keeps_the_statistics_that_its_weights_brought(tmp_path: Path) -> None:
    """Statistics of pretrained weights are in the model, not in its options; the hand-over records them."""
    model = zoo.create_model(**MODEL)
    with torch.no_grad():
        model.get_buffer("normalize.std").fill_(0.3)
    zoo.handover.save(tmp_path, model, MODEL, {})
    loaded, config = zoo.handover.load(tmp_path)
    assert torch.equal(loaded.get_buffer("normalize.std"), model.get_buffer("normalize.std"))
    assert config["model"]["mean"] is None
