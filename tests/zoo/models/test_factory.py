"""Models by name: refusals, and oracles for the parts. test_models.py enumerates the registry."""

import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from torch import Tensor

import zoo
from certizoo import UserError
from zoo.attention import variants
from zoo.attention.dot_product import DotProductAttention
from zoo.layers.mlp import SLL
from zoo.layers.norms import LayerProject, SmoothProject
from zoo.layers.patches import by_products_
from zoo.models.overview import tiny_options


def small(name: str) -> Any:
    """Return the model with its own parts, shrunk."""
    torch.manual_seed(0)
    return zoo.create_model(name, **tiny_options(name))


def images(model: Any, batch: int = 3) -> Tensor:
    embed = model.patch_embed
    return torch.rand(batch, embed.proj.in_channels, *embed.img_size, generator=torch.Generator().manual_seed(1))


def test_standard_vit_equals_timms_with_the_same_weights() -> None:
    """dp_vit is timm's vit_*_patch16_224: same keys, same logits in float32."""
    torch.manual_seed(0)
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=10).eval()
    ours: Any = zoo.create_model("dp_vit_ti", num_classes=10).eval()
    extra = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not extra.unexpected_keys
    assert all(k.startswith("normalize") or ".power_" in k for k in extra.missing_keys), extra.missing_keys
    x = torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(ours.normalize(x)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("chans", "dim", "patch", "size"), [(3, 5, 4, (8, 12)), (1, 8, 2, (6, 6)), (2, 3, 1, (1, 4))])
def test_the_product_with_patches_is_the_convolution(chans: int, dim: int, patch: int, size: tuple[int, int]) -> None:
    """Compare values, memory order behind PatchEmbed, and gradients; the parameters stay timm's."""
    torch.manual_seed(0)
    embed: Any = PatchEmbed(size, patch, chans, dim).double()
    conv, x = embed.proj, torch.rand(2, chans, *size, dtype=torch.float64, requires_grad=True)
    expected, weights = embed(x), dict(embed.named_parameters())
    by_products_(embed)
    found = embed(x)
    assert found.is_contiguous()
    assert all(weight is weights[name] for name, weight in embed.named_parameters())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    inputs, side = (x, conv.weight, conv.bias), torch.rand_like(expected)
    for mine, theirs in zip(*(torch.autograd.grad(y, inputs, side) for y in (found, expected)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_unknown_names_and_options_say_what_exists() -> None:
    with pytest.raises(UserError, match="spec_vit_b"):
        zoo.create_model("spec_vit_bb")
    with pytest.raises(UserError, match="depth"):
        zoo.create_model("dp_vit_ti", dept=3)
    with pytest.raises(UserError, match="multiple"):
        zoo.create_model("dp_vit_ti", img_size=100)
    with pytest.raises(UserError, match="no attention 'dpp'"):
        zoo.create_model("dp_vit_ti", attention="dpp")
    with pytest.raises(UserError, match="v_cap"):
        zoo.create_model("dp_vit_ti", attention={"name": "dp", "vcap": 1})
    with pytest.raises(UserError, match="registry"):
        timm.create_model("dp_vit_ti", pretrained=True)


@pytest.mark.parametrize("variant", variants())
def test_attention_keeps_shape_and_mode(variant: str) -> None:
    attention = variants()[variant](12, 3)
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    assert attention.train()(x).shape == x.shape
    torch.testing.assert_close(attention.train()(x), attention.eval()(x))


def test_attention_equals_the_equation_written_out() -> None:
    """sum_l softmax(Q_l K_l^T / sqrt(D/H)) V_l W_O^l, head by head, in float64."""
    torch.manual_seed(0)
    attention = DotProductAttention(12, 3).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    w_q, w_k, w_v = attention.head_weights_3HOD()
    b_q, b_k, b_v = attention.qkv.bias.unflatten(0, (3, 3, 4))
    out = attention.proj.bias.expand(2, 5, 12).clone()
    for head in range(3):
        q, k, v = x @ w_q[head].T + b_q[head], x @ w_k[head].T + b_k[head], x @ w_v[head].T + b_v[head]
        p = torch.softmax(q @ k.mT / math.sqrt(4), dim=-1)
        out += p @ v @ attention.proj.weight[:, head * 4 : (head + 1) * 4].T
    torch.testing.assert_close(attention(x), out)


def test_heads_are_output_rows() -> None:
    """Changing the rows of one head of W_V changes only that head's block."""
    attention = DotProductAttention(8, 2)
    with torch.no_grad():
        attention.qkv.weight[2 * 8 : 2 * 8 + 4] = 7.0  # W_V, head 0
    heads = attention.head_weights_3HOD()
    assert bool((heads[2, 0] == 7).all())
    assert not bool((heads[2, 1] == 7).any())


def test_norms_by_their_equations() -> None:
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0)) * 3
    projected = LayerProject(6, 2.0)(x)
    norm = x.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(projected, torch.where(norm > 2, x / norm * 2, x))
    torch.testing.assert_close(SmoothProject(6, 2.0)(x), x / (1 + norm**2 / 4).sqrt())


def test_sll_by_its_equation() -> None:
    torch.manual_seed(0)
    layer = SLL(5, 7).double()
    with torch.no_grad():
        layer.log_q.normal_()
        layer.bias.normal_()
    x = torch.randn(3, 5, dtype=torch.float64)
    w, q = layer.weight, layer.log_q.exp()
    t = [
        sum(abs(float((w[:, i] @ w[:, j]).detach())) * float((q[j] / q[i]).detach()) for j in range(7))
        for i in range(7)
    ]
    expected = x - 2 * F.relu(x @ w + layer.bias) @ torch.diag(1 / torch.tensor(t, dtype=torch.float64)) @ w.T
    torch.testing.assert_close(layer(x), expected)


def test_caps_hold_after_training_steps() -> None:
    """W_V, W_O and the patch embedding stay at their caps up to the power iteration's error."""
    model = small("lofast_vit_c10").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = images(model, 16), torch.arange(16) % 5
    for _ in range(30):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    attention = model.blocks[0].attn
    value = attention.qkv.weight.detach().chunk(3)[2]
    for weight, cap in ((value, 0.35), (attention.proj.weight, 0.35), (model.patch_embed.proj.weight.flatten(1), 1.0)):
        assert np.linalg.norm(weight.detach().numpy(), 2) <= cap * 1.05


def test_free_blocks_beside_capped_ones_have_finite_gradients() -> None:
    model = small("spec_vit_digits").train()
    model(images(model)).square().sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())


def test_caps_do_not_change_in_eval_mode() -> None:
    model = small("lofast_vit_c10").eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model(images(model)).sum().backward()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
