"""CertViT's stage 2 on models: the target of each layer, and a file that depends only on the arguments."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import parametrize

import zoo
from certizoo import UserError
from tests.tools.objective_oracles import conv_net
from trainers.certvit.layers import constrainable, norm, observe
from trainers.certvit.run import constrain_layer, read_layer
from trainers.settings import ConstrainConfig

SETTINGS = ConstrainConfig(0, 0, eta=0.02, iterations=30, passes=10, rows=64)


def vit(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4, "img_size": 8, "in_chans": 1}
    return zoo.create_model("l2_vit_ti", num_classes=5, **(sizes | options)).eval()


def images(batches: int = 3) -> list[Tensor]:
    return list(torch.rand(batches, 8, 1, 8, 8, generator=torch.Generator().manual_seed(1)))


def test_all_free_linear_layers_are_constrained_and_capped_ones_left_alone() -> None:
    names = constrainable(vit())
    block = [f"attn.{leaf}" for leaf in ("q", "v", "proj")] + ["mlp.fc1", "mlp.fc2"]
    assert names == ["patch_embed.proj", *(f"blocks.{i}.{leaf}" for i in (0, 1) for leaf in block), "head"]
    capped = zoo.create_model("lofast_vit_c10")
    free = constrainable(capped)
    assert "head" in free
    assert not any(parametrize.is_parametrized(capped.get_submodule(name)) for name in free)


@pytest.mark.parametrize("kind", ["vit", "conv"])
def test_rows_are_what_goes_in_and_out(kind: str) -> None:
    """The layer's output without its bias is x W^T over all rows, up to the order."""
    model = vit() if kind == "vit" else conv_net().float().eval()
    for name in constrainable(model):
        module = model.get_submodule(name)
        seen: list[Tensor] = []
        data = observe(model, name, images(1), 10**6, seed=0)
        with module.register_forward_hook(lambda m, x, y, seen=seen: seen.append(y)):
            model(images(1)[0])
        weight = module.weight.detach().flatten(1).double()
        assert torch.allclose(data.rows[0].x @ weight.mT, data.rows[0].y)
        assert data.rows[0].share(weight) < 1e-20
        if not seen:
            assert name.endswith("attn.v"), "all others are called"
            continue
        bias = 0 if module.bias is None else module.bias.detach()
        out = seen[0].detach().flatten(2).mT.flatten(0, 1) if seen[0].ndim == 4 else seen[0].detach().flatten(0, -2)
        assert torch.allclose(out.sum(0), (data.rows[0].y + bias).sum(0).float(), atol=1e-3)
        assert len(out) == len(data.rows[0].x)


def test_a_layer_with_a_bias_is_clamped_with_it() -> None:
    """The unchanged layer misses nothing, and the activation's output is W x + b, clamped."""
    model = conv_net().float().eval()
    model.convs[0].bias = torch.nn.Parameter(torch.linspace(-1, 1, model.convs[0].out_channels))
    rows = observe(model, "convs.0", images(1), 10**6, seed=0).rows[0]
    weight, bias = model.convs[0].weight.detach().flatten(1).double(), model.convs[0].bias.detach().double()
    assert rows.share(weight) < 1e-20
    assert rows.theta is not None
    assert torch.equal(torch.as_tensor(rows.b), bias)
    moved = weight + 0.1
    change = (rows.x @ moved.mT + bias).clamp_min(0).minimum(rows.theta)
    change = change - (rows.y + bias).clamp_min(0).minimum(rows.theta)
    assert change.norm() <= rows.miss(moved).norm() + 1e-9, "no less is missed than the activations differ"


def test_thresholds_are_those_of_the_activation_behind() -> None:
    """The layer's output, clamped to its thresholds, is the activation's output."""
    model = conv_net().float().eval()
    for name, activation in (("convs.0", model.convs[1]), ("convs.2", model.convs[3]), ("fcs.1", model.fcs[2])):
        seen: list[Tensor] = []
        with activation.register_forward_hook(lambda m, x, y, seen=seen: seen.append(y.detach())):
            data = observe(model, name, images(1), 10**6, seed=0)
        rows = data.rows[0]
        assert rows.theta is not None
        cut = (rows.y + rows.b).clamp_min(0).minimum(rows.theta)
        out = seen[0].flatten(2).mT.flatten(0, 1) if seen[0].ndim == 4 else seen[0]
        assert torch.allclose(cut.sum(0).float(), out.sum(0), atol=1e-4)
        assert (cut == rows.theta).any() or (cut == 0).any()
    assert observe(model, "head", images(1), 10, seed=0).rows[0].theta is None


@pytest.mark.parametrize("name", ["patch_embed.proj", "blocks.0.attn.v", "blocks.1.mlp.fc1"])
def test_a_layer_gets_smaller_within_its_tolerance(name: str, tmp_path: Path) -> None:
    model = vit()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    files = [tmp_path / f"{turn}.safetensors" for turn in "ab"]
    for file in files:
        constrain_layer(model, name, images(), SETTINGS, 3, file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "the model is as it was"
    old = before[f"{name}.weight"]
    weight, fact = read_layer(files[0], old)
    assert weight.shape == old.shape
    assert fact["layer"] == name
    assert fact["zeros"] == pytest.approx(float((weight == 0).double().mean()))
    assert fact["zeros"] > 0.05
    assert weight.abs().sum() < 0.95 * old.abs().sum()
    assert fact["missed"] <= 1.5 * SETTINGS.eta
    assert fact["norm_after"] <= fact["norm_before"]
    true = [float(torch.linalg.matrix_norm(value.flatten(1).double(), 2)) for value in (old, weight)]
    assert [fact["norm_before"], fact["norm_after"]] == pytest.approx(true, rel=1e-3)


def test_norms_of_convolutions_are_those_of_the_map() -> None:
    model = conv_net().eval()
    data = observe(model, "convs.2", [part.double() for part in images(1)], 10, seed=0)
    eye = torch.eye(3 * 64, dtype=torch.float64).view(-1, 3, 8, 8)
    dense = F.conv2d(eye, model.convs[2].weight, stride=2, padding=1).flatten(1).detach()
    true = float(torch.linalg.matrix_norm(dense, 2))
    assert true <= norm(model.convs[2], data.out_size) <= 1.3 * true


def test_a_file_says_what_became_of_the_layer(tmp_path: Path) -> None:
    constrain_layer(vit(), "head", images(), SETTINGS, 0, tmp_path / "layers" / "head.safetensors")
    with safe_open(tmp_path / "layers" / "head.safetensors", "pt") as file:
        assert set(json.loads(file.metadata()["fact"])) == {"layer", "norm_before", "norm_after", "zeros", "missed"}
    assert [path.name for path in (tmp_path / "layers").iterdir()] == ["head.safetensors"]


@pytest.mark.parametrize(
    ("key", "value"), [("rate", 2.0), ("eta", 0.0), ("level", 1.0), ("rows", 0), ("adapt_epochs", -1)]
)
def test_wrong_settings_are_named(key: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{key}="):
        ConstrainConfig(**({"adapt_epochs": 0, "finetune_epochs": 0} | {key: value}))  # type: ignore[arg-type]
