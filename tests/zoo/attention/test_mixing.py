"""Token mixing around and beside softmax attention: CoViT's convolutions, gated positions, windows, Swin."""

import copy
import math
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.convit import GPSA as TimmGPSA
from timm.models.swin_transformer import WindowAttention as TimmWindowAttention
from timm.models.swin_transformer import window_partition
from torch import Tensor, nn

import zoo
from certizoo import UserError
from tests.tools.ascent import largest_change
from zoo.attention import variants
from zoo.attention.conv_mixing import ConvMixing, _norm
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.gpsa import FEW, GPSA
from zoo.attention.softmax.module import SoftmaxAttention, without_content
from zoo.attention.window import WindowAttention
from zoo.bounds.curvature import expansion_of
from zoo.bounds.first_order import layer_of, residual_layer_of
from zoo.bounds.rule_table import NoRule
from zoo.models.swin import InWindows

D, H = 12, 3
SOFTMAX = [name for name, kind in variants().items() if isinstance(kind, type) and issubclass(kind, SoftmaxAttention)]
SWIN: dict[str, Any] = {
    "img_size": 32,
    "window_size": 4,
    "embed_dim": 12,
    "depths": (2, 2),
    "num_heads": (2, 3),
    "num_classes": 5,
}


def randomised(module: Any, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Any:
    """Draw every parameter anew, so that no zero or one hides an error."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale * parameter.shape[-1] ** -0.5)
    return module.to(dtype).eval()


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def assert_same_function(f: Any, g: Any, x: Tensor, tolerance: float) -> None:
    """Check that outputs and gradients of two modules or functions agree."""
    x = x.clone().requires_grad_(True)
    y, expected = f(x), g(x)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    torch.testing.assert_close(y, expected, rtol=0, atol=tolerance)
    (gradient,) = torch.autograd.grad((y * weight).sum(), x)
    (expected_gradient,) = torch.autograd.grad((expected * weight).sum(), x)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=tolerance)


# convolutions --------------------------------------------------------------------------------------------------------


def test_conv_mixing_equals_the_paper_in_a_slow_loop() -> None:
    module = randomised(ConvMixing(D, H, kernels=(1, 3, 5)))
    x = tokens(2, 7, D)
    mixed = torch.zeros_like(x)
    for group, (conv, k) in enumerate(zip(module.convs, (1, 3, 5), strict=True)):
        channels = slice(4 * group, 4 * group + 4)
        for n in range(7):
            mixed[:, n, channels] += conv.bias
            for t in range(k):
                if 0 <= n + t - (k - 1) // 2 < 7:
                    mixed[:, n, channels] += x[:, n + t - (k - 1) // 2, channels] @ conv.weight[:, :, t].T
    torch.testing.assert_close(module(x), mixed @ module.proj.weight.T + module.proj.bias)


def test_conv_mixing_takes_one_kernel_for_all_heads_or_one_per_group() -> None:
    assert [conv.kernel_size for conv in ConvMixing(D, H, kernels=5).convs] == [(5,)] * H
    assert [conv.kernel_size for conv in ConvMixing(D, H, kernels=[3, 7]).convs] == [(3,), (7,)]
    with pytest.raises(UserError, match="even"):
        ConvMixing(D, H, kernels=(3, 4))
    with pytest.raises(UserError, match="multiple"):
        ConvMixing(D, H, kernels=(3,) * 5)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("length", [1, 4, 11])
def test_norm_of_conv_mixing_is_just_above_the_norm_of_its_dense_matrix(length: int, residual: bool) -> None:
    module = randomised(ConvMixing(D, H, kernels=(1, 3, 5)))
    zero = torch.zeros(1, length, D, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(module, zero).reshape(length * D, length * D)
    exact = torch.linalg.matrix_norm(jacobian + residual * torch.eye(length * D), 2)
    one = torch.ones(1, dtype=torch.float64)
    bound = float((residual_layer_of if residual else layer_of)(module)(zero)[1](one))
    assert exact <= bound
    if length == 11:
        assert bound <= 1.1 * exact


def test_a_residual_that_cancels_has_norm_zero() -> None:
    """For x - x, with kernels of 1 in the middle, the identity and groups of all sizes share one origin."""
    module = ConvMixing(D, H, kernels=(1, 3, 5)).double().requires_grad_(False)
    for conv in module.convs:
        nn.init.dirac_(conv.get_parameter("weight"))
    module.proj.weight.copy_(-torch.eye(D))
    x = tokens(1, 7, D)
    one = torch.ones(1, dtype=torch.float64)
    assert float(residual_layer_of(module)(x)[1](one)) < 1e-6
    assert float(layer_of(module)(x)[1](one)) == pytest.approx(1, rel=1e-6)


def test_conv_mixing_with_another_convolution_is_refused() -> None:
    module = ConvMixing(D, H)
    module.convs[1] = nn.Conv1d(4, 4, 3, padding=2, dilation=2)
    with pytest.raises(NoRule, match="dilation"):
        layer_of(module)


def test_norm_of_conv_mixing_holds_for_many_frequencies_at_a_time_and_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    module = randomised(ConvMixing(D, H, kernels=(1, 3, 5)))
    weights = [conv.weight.detach() for conv in module.convs], module.proj.weight.detach()
    together = _norm(*weights, tokens=9, residual=False)
    monkeypatch.setattr("zoo.attention.conv_mixing.SYMBOL_BYTES", 1)
    assert _norm(*weights, tokens=9, residual=False) == pytest.approx(together, rel=1e-12)


# gated positions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["bias", "weight"])
def test_positions_that_float64_loses_are_refused(change: str) -> None:
    """A large bias moves all scores of a row, so exact weights stay; in float64 they become uniform."""
    module = GPSA(DotProductAttention(12, 2)).double().requires_grad_(False)
    x_BND = torch.randn(1, 16, 12, dtype=torch.float64)
    layer_of(module)(x_BND)
    if change == "bias":
        module.pos_proj.bias.fill_(2.0**60)
    else:
        module.pos_proj.weight[:, 0], module.pos_proj.weight[:, 2] = 2.0**60, -(2.0**60)
    with pytest.raises(NoRule, match="float64 cannot hold the weights of its positions"):
        layer_of(module)(x_BND)
    with pytest.raises(NoRule, match="float64 cannot hold the weights of its positions"):
        expansion_of(module)(x_BND)


def plain_gpsa(module: Any, x: Tensor) -> Tensor:
    """Compute the equation with the offsets of all pairs and an explicit P."""
    n = x.shape[1]
    side = math.isqrt(n)
    at = torch.tensor([[i % side, i // side] for i in range(n)]).to(x)
    offset = at[None, :] - at[:, None]
    r = torch.cat([offset, offset.square().sum(-1, keepdim=True)], dim=-1)
    positional = module.pos_proj(r).permute(2, 0, 1).softmax(-1)
    q, k, v = module.content.heads(x)
    p = (q @ k.mT * module.content.scale).softmax(-1)
    g = module.gating_param.sigmoid()[:, None, None]
    return module.content.merge(((1 - g) * p + g * positional) @ v)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("n", [1, 9, 64, 81])  # explicit up to FEW weights, beyond that on the fused kernel
@pytest.mark.parametrize("variant", SOFTMAX)
def test_gpsa_equals_the_equation_written_out(variant: str, n: int, dtype: torch.dtype, tolerance: float) -> None:
    assert 64 <= FEW < 81
    module = randomised(GPSA(variants()[variant](D, H)), dtype=dtype)
    assert_same_function(module, lambda x: plain_gpsa(module, x), tokens(2, n, D, dtype=dtype), tolerance)


def test_mixed_attention_of_all_pairs_is_what_the_rule_and_forward_have() -> None:
    module = randomised(GPSA(DotProductAttention(D, H)))
    x = tokens(2, 9, D)
    q, k, v = module.content.heads(x)
    p = module.mixed((q @ k.mT * module.content.scale).softmax(-1))
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p.sum(-1)))
    torch.testing.assert_close(module.content.merge(p @ v), module(x))


def test_gpsa_equals_timms_with_the_same_weights() -> None:
    ours = randomised(GPSA(DotProductAttention(D, H)), dtype=torch.float32)
    theirs: Any = TimmGPSA(D, H, qkv_bias=True).eval()
    state = {name.removeprefix("content."): value for name, value in ours.state_dict().items() if "power" not in name}
    for kind in ("weight", "bias"):
        qkv = state.pop(f"qkv.{kind}")
        state |= {f"qk.{kind}": qkv[: 2 * D], f"v.{kind}": qkv[2 * D :]}
    theirs.load_state_dict(state)
    assert_same_function(ours, theirs, tokens(2, 16, D, dtype=torch.float32), 1e-5)


@pytest.mark.parametrize("heads", [1, 4, 6, 9])
def test_local_initialisation_is_timms(heads: int) -> None:
    content, theirs = DotProductAttention(36, heads), TimmGPSA(36, heads)
    ours = GPSA(content, locality_strength=0.7)
    theirs.locality_strength = 0.7
    with torch.no_grad():
        theirs.pos_proj.weight.copy_(ours.pos_proj.weight)
    theirs.local_init()
    ours.finish_init()
    torch.testing.assert_close(ours.pos_proj.weight, theirs.pos_proj.weight)
    torch.testing.assert_close(content.qkv.weight[72:], theirs.v.weight)


def test_gpsa_is_for_square_grids_and_softmax_attention() -> None:
    with pytest.raises(UserError, match="square"):
        GPSA(DotProductAttention(D, H))(tokens(1, 5, D).float())
    with pytest.raises(UserError, match="ConvMixing"):
        GPSA(ConvMixing(D, H))


def test_gpsa_around_other_contents_has_no_rule() -> None:
    class Doubled(DotProductAttention):
        def merge(self, y_BHNO: Tensor) -> Tensor:
            return 2 * super().merge(y_BHNO)

    with pytest.raises(NoRule, match="Doubled"):
        layer_of(GPSA(Doubled(D, H)))


def test_a_closed_gate_narrows_the_bound_of_gpsa() -> None:
    """Positions do not depend on the image: with g = 1 the map is linear, and its bound is zeta r."""
    module = randomised(GPSA(DotProductAttention(D, H))).requires_grad_(False)
    x, r = tokens(1, 9, D), torch.ones(1, dtype=torch.float64)
    module.gating_param.fill_(100.0)
    bound = layer_of(module)(x)[1]
    torch.testing.assert_close(bound(10 * r), 10 * bound(r))
    module.gating_param.fill_(-100.0)
    torch.testing.assert_close(layer_of(module)(x)[1](r), layer_of(module.content)(x)[1](r))


# windows -------------------------------------------------------------------------------------------------------------


def plain_windows(module: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    """Compute window by window and pair by pair, with dot-product scores."""
    height, width = 2, 3
    out = []
    for index, window in enumerate(x):
        bias = torch.empty(H, 6, 6, dtype=x.dtype)
        for i in range(6):
            for j in range(6):
                dy, dx = i // width - j // width, i % width - j % width
                row = (dy + height - 1) * (2 * width - 1) + dx + width - 1
                bias[:, i, j] = module.relative_position_bias_table[row]
        if mask is not None:
            bias = bias + mask[index % len(mask)]
        q, k, v = module.content.qkv(window).reshape(6, 3, H, D // H).permute(1, 2, 0, 3)
        y = (q @ k.mT / math.sqrt(D // H) + bias).softmax(-1) @ v
        out.append(module.content.proj(y.transpose(0, 1).reshape(6, D)))
    return torch.stack(out)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("masked", [False, True])
def test_windows_equal_the_equation_and_timm(masked: bool, dtype: torch.dtype, tolerance: float) -> None:
    apart = torch.rand(4, 6, 6, generator=torch.Generator().manual_seed(2)) < 0.3
    mask = -100 * apart.to(dtype) if masked else None
    ours = randomised(WindowAttention(DotProductAttention(D, H), (2, 3)), dtype=dtype)
    x = tokens(8, 6, D, dtype=dtype)
    assert_same_function(lambda z: ours(z, mask=mask), lambda z: plain_windows(ours, z, mask), x, tolerance)
    theirs = TimmWindowAttention(D, H, window_size=(2, 3)).to(dtype).eval()
    keys = {name.removeprefix("content."): value for name, value in ours.state_dict().items()}
    theirs.load_state_dict({name: value for name, value in keys.items() if "power" not in name})
    assert_same_function(lambda z: ours(z, mask=mask), lambda z: theirs(z, mask=mask), x, tolerance)


def test_distances_get_the_bias_as_they_are() -> None:
    """For L2 in windows: softmax( -||q_i - q_j||^2 / sqrt(D / H) + T_ij )."""
    ours = randomised(WindowAttention(variants()["l2"](D, H), (2, 3)))
    x = tokens(2, 6, D)
    _, _, v = ours.content.heads(x)
    rows = ours.content.q(x).unflatten(-1, (H, -1)).transpose(1, 2)
    bias = ours.relative_position_bias_table[ours.relative_position_index].permute(2, 0, 1)
    p = (-torch.cdist(rows, rows).square() / math.sqrt(D // H) + bias).softmax(-1)
    torch.testing.assert_close(ours(x), ours.content.merge(p @ v))


def swin(**options: Any) -> Any:
    torch.manual_seed(0)
    return zoo.create_model("dp_swin_t", **(SWIN | options))


@pytest.mark.parametrize("shifted", [False, True])
def test_a_token_reaches_exactly_the_tokens_of_its_window(shifted: bool) -> None:
    """Windows of 4 x 4 lie on 8 x 8 tokens.

    Shifted by 2, they start at row and column 2, and the rest at the border has its own windows.
    """
    block = randomised(swin().layers[0].blocks[int(shifted)], scale=2)
    with torch.no_grad():
        for norm in (block.norm1, block.norm2):
            norm.weight.fill_(1)
    window = [(i + 2) // 4 if shifted else i // 4 for i in range(8)]
    x = tokens(1, 8, 8, D)
    for row, column in ((0, 0), (1, 5), (3, 3), (6, 2), (7, 7)):
        moved = x.clone()
        moved[0, row, column] += tokens(D)
        changed = (block(moved) != block(x)).any(-1)[0]
        rows, columns = (torch.tensor([own == window[at] for own in window]) for at in (row, column))
        assert torch.equal(changed, rows[:, None] & columns)


def test_windows_need_softmax_attention() -> None:
    with pytest.raises(UserError, match="ConvMixing"):
        WindowAttention(ConvMixing(D, H), (2, 2))


# Swin ----------------------------------------------------------------------------------------------------------------


def timms_swin() -> Any:
    theirs = timm.create_model("swin_tiny_patch4_window7_224", **SWIN)
    return randomised(theirs, dtype=torch.float32)


def test_swin_equals_timms_with_the_same_weights() -> None:
    theirs, ours = timms_swin(), swin().eval()
    state = {
        name.replace("attn.qkv", "attn.content.qkv").replace("attn.proj", "attn.content.proj"): value
        for name, value in theirs.state_dict().items()
    }
    extra = ours.load_state_dict(state, strict=False)
    assert not extra.unexpected_keys
    assert all(name.startswith("normalize") or "power_" in name for name in extra.missing_keys), extra.missing_keys
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    normalised = ours.normalize(x)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(normalised), rtol=0, atol=1e-5)
        torch.testing.assert_close(ours.forward_features(x), theirs.forward_features(normalised), rtol=0, atol=1e-5)
        for a, b in zip(
            ours.forward_intermediates(x, intermediates_only=True),
            theirs.forward_intermediates(normalised, intermediates_only=True),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_swin_has_the_published_sizes() -> None:
    """Liu et al. 2021, Table 1, in millions."""
    for size, millions in {"t": 28, "s": 50, "b": 88, "l": 197}.items():
        with torch.device("meta"):
            model = zoo.create_model(f"dp_swin_{size}")
            assert model(torch.empty(1, 3, 224, 224)).shape == (1, 1000)
        assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions


@pytest.mark.parametrize("variant", SOFTMAX)
def test_swin_trains_survives_copies_and_gets_a_new_head(variant: str) -> None:
    model = swin(attention=variant, norm="smoothproject", drop_path_rate=0.1).train()
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    F.cross_entropy(model(x), torch.arange(2)).backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    y = model.eval()(x)
    torch.testing.assert_close(copy.deepcopy(model)(x), y, rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(model).double()(x.double()).float(), y, rtol=0, atol=1e-5)
    again = swin(attention=variant, norm="smoothproject").eval()
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x), y, rtol=0, atol=0)
    features = model.forward_features(x)
    torch.testing.assert_close(model.forward_head(features), y, rtol=0, atol=0)
    assert model.forward_head(features, pre_logits=True).shape == (2, 24)
    model.reset_classifier(7)
    assert model(x).shape == (2, 7)


def test_swin_says_what_is_wrong_with_its_sizes() -> None:
    with pytest.raises(UserError, match="multiple"):
        swin(img_size=30)
    with pytest.raises(UserError, match="stages"):
        swin(depths=(2, 2, 2))


def test_no_ascent_beats_the_bound_of_a_whole_swin() -> None:
    """9 x 9 tokens in windows of 4 x 4 (shifted, padded), merged to 5 x 5; from pixels to the pooled token."""
    model = swin(img_size=36, norm="smoothproject", std=(0.02, 0.02, 0.02))
    model = randomised(model, scale=0.2).requires_grad_(False)
    x = torch.rand(4, 3, 36, 36, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    trunk, head = zoo.rules.classifier_of(model)
    pooled, bound = trunk(x)
    torch.testing.assert_close(head(pooled), model(x))
    radii = torch.tensor([1e-5, 1e-4, 1e-3, 1e-2], dtype=torch.float64)
    change = largest_change(lambda z: model.forward_head(model.forward_features(z), pre_logits=True), x, radii)
    ratio = change / bound(radii)
    assert bool((ratio <= 1).all())
    assert ratio.max() > 0.1


def test_bound_of_all_windows_is_that_of_the_most_sensitive_one() -> None:
    block = randomised(swin().layers[0].blocks[0], scale=2).requires_grad_(False)
    size = 10 ** torch.linspace(-2, 1, 8, dtype=torch.float64)  # of the 2 x 4 windows the deciding one is known
    x = tokens(2, 8, 8, D) * size.reshape(2, 2, 2).repeat_interleave(4, 1).repeat_interleave(4, 2)[..., None]
    r = torch.tensor([[0.1, 2.0], [0.2, 0.3]], dtype=torch.float64)
    bound = InWindows(block).layer(local=False)(x)[1](r)
    windows = window_partition(x, (4, 4)).flatten(1, 2)
    alone = [layer_of(block.attn)(window[None])[1](r) for window in windows]
    assert alone[3][0, 0] > 1.5 * alone[2][0, 0]
    torch.testing.assert_close(bound[:, 0], torch.stack([one[:, 0] for one in alone[:4]]).amax(0))
    torch.testing.assert_close(bound[:, 1], torch.stack([one[:, 1] for one in alone[4:]]).amax(0))


def test_swin_without_a_proof_is_refused() -> None:
    unknown, largest = swin().requires_grad_(False), swin().requires_grad_(False)
    unknown.layers[0].blocks[0].attn.content.__class__ = type("Unknown", (DotProductAttention,), {})
    with pytest.raises(NoRule, match="Unknown"):
        zoo.rules.classifier_of(unknown)
    largest.reset_classifier(5, global_pool="max")
    with pytest.raises(NoRule, match="mean"):
        zoo.rules.classifier_of(largest)


def test_swin_takes_caps_and_small_initial_weights() -> None:
    model = swin(attention={"name": "dp", "v_cap": 0.5})
    content = model.layers[1].blocks[1].attn.content
    torch.testing.assert_close(torch.linalg.matrix_norm(content.qkv.weight.chunk(3)[2], 2), torch.tensor(0.5))
    assert 0.01 < float(model.layers[0].blocks[0].mlp.fc1.weight.detach().std()) < 0.03


def test_convit_trains_and_its_gates_have_gradients() -> None:
    torch.manual_seed(0)
    model: Any = zoo.create_model("dp_convit_ti", img_size=32, embed_dim=24, depth=3, gpsa_layers=2, num_classes=5)
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    F.cross_entropy(model(x), torch.arange(2)).backward()
    for block in model.blocks[:2]:
        assert bool((block.attn.gating_param.grad != 0).all())
        assert bool((block.attn.pos_proj.weight.grad != 0).all())
        assert block.attn.pos_proj.bias.grad is not None


# --- without content ---


def alone(module: nn.Module) -> nn.Module:
    found = without_content(module)
    assert found is not None
    return found


@pytest.mark.parametrize("name", SOFTMAX)
def test_without_content_every_token_sees_the_mean_of_the_values(name: str) -> None:
    module = randomised(variants()[name](D, H))
    x = tokens(2, 5, D)
    v = module.heads(x)[2]
    before = module(x)
    torch.testing.assert_close(alone(module)(x), module.merge(v.mean(-2, keepdim=True).expand_as(v)))
    torch.testing.assert_close(module(x), before, msg="the model itself was changed")


def test_without_content_gates_and_biases_stay() -> None:
    """Gated positions and windows behave as with W_Q = W_K = 0, where values do not depend on them."""
    for module in (GPSA(DotProductAttention(D, H)), WindowAttention(DotProductAttention(D, H), (2, 2))):
        module = randomised(module)
        zeroed = copy.deepcopy(module)
        with torch.no_grad():
            zeroed.content.qkv.weight[: 2 * D] = 0
        x = tokens(2, 4, D)
        torch.testing.assert_close(alone(module)(x), zeroed(x))
        assert (module(x) - zeroed(x)).abs().max() > 1e-3


def test_what_has_no_scores_has_no_content() -> None:
    assert without_content(nn.Sequential(nn.Linear(2, 2), nn.GELU())) is None
