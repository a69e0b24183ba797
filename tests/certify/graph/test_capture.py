"""Models of any class: what runs is captured, no attack beats its certificate, and what has no rule is listed."""

from collections.abc import Callable
from itertools import product
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certify import certified_radius, certify
from certify.api import certifier
from certify.graph.export import BATCH
from certify.graph.model import NotCaptured, capture, prepared
from certify.graph.operations import moved
from certify.graph.values import Node, Value, materialised
from certizoo import UserError
from tests.tools.ascent import ascend, margin_loss
from tests.tools.captured_models import MODELS, OWN, SIZE, Tokens, plain, settled
from tests.tools.cases import mostly_slow
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.masked import MaskedAttention
from zoo.layers.mlp import Mlp
from zoo.layers.norms import SmoothProject
from zoo.models.vit import ViT
from zoo.primitives.branches import Branches

METHODS = ("lofast", "lofast_local", "adjoint", "image", "taylor")
QUICK = ("torchvision resnet18", "torchvision vit", "timm vit_tiny", "timm deit", "timm mixer")


@pytest.mark.parametrize("name", mostly_slow([*OWN, *MODELS], *OWN, *QUICK))
def test_the_captured_function_has_the_logits_of_the_model(name: str) -> None:
    model, x, _ = settled({**OWN, **MODELS}[name], SIZE if name in OWN else 32)
    exact = capture(prepared(model), tuple(x.shape[1:])).exact
    assert exact is not None
    with torch.no_grad():
        found, expected = exact(x.double()), model.double()(x.double())
        if name == "tokens":  # log_softmax subtracts one number from all logits
            found, expected = (logits - logits[:, :1] for logits in (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_known_parts_are_recognised() -> None:
    """Attention, however written, an MLP and residual sums get their own rules."""
    model, x, _ = settled(Tokens)
    exact = capture(prepared(model), tuple(x.shape[1:])).exact
    assert exact is not None
    kinds = [type(module) for module in exact.modules()]
    assert kinds.count(DotProductAttention) == 2
    assert kinds.count(Mlp) == 1
    assert kinds.count(Branches) == 3


@pytest.mark.parametrize(
    ("name", "method"),
    mostly_slow(product(OWN, METHODS), *product(OWN, ("lofast_local", "adjoint")), ("net", "image"), ("net", "lofast")),
)
def test_no_attack_beats_a_certified_radius(name: str, method: str) -> None:
    if method == "image" and name not in ("plain", "sorted"):
        pytest.skip("slow; the rules are those of adjoint")
    model, x, y = settled(OWN[name])
    radius_B = certified_radius(model, x, y, method, nonce="a")
    assert (radius_B > 0).all()
    assert (ascend(margin_loss(model.double(), y), x.double(), radius_B, 40, 3) <= 0).all()


class Masked(nn.Module):
    """One block of attention with a constant mask, in one of the ways in which people write it."""

    mask: Tensor

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.qkv = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8, eps=0.1), nn.Linear(8, 24)
        self.out, self.head, self.attend = nn.Linear(8, 8), nn.Linear(8, 4), attend
        self.register_buffer("mask", torch.randn(2, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).mT
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        y = self.attend(q, k, v, self.mask)
        return self.head((x + self.out(y.transpose(1, 2).flatten(2))).mean(1))


MASKS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "numbers": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
    "booleans": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m > 0.1 * m.max() - 9),
    "causal": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "added": lambda q, k, v, m: (m + q @ k.mT * 0.5).softmax(-1) @ v,
    "filled": lambda q, k, v, m: (q @ k.mT * 0.5).masked_fill(m[0] == -torch.inf, -torch.inf).softmax(-1) @ v,
    "chosen": lambda q, k, v, m: torch.where(m[1] > -9, q @ k.mT * 0.5, -torch.inf).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", mostly_slow(MASKS, "causal", "added"))
def test_attention_with_a_constant_mask_is_one_module(name: str) -> None:
    assert_one_masked_module(lambda: Masked(MASKS[name]))


def assert_one_masked_module(make: Callable[[], nn.Module]) -> None:
    """Assert that the model's attention becomes `MaskedAttention`, and that no attack beats its certified radius."""
    model, x, y = settled(make)
    exact = capture(prepared(model), tuple(x.shape[1:])).exact
    assert exact is not None
    assert MaskedAttention in {type(module) for module in exact.modules()}
    radius_B = certified_radius(model, x, y, "adjoint", nonce="a")  # compares the logits
    assert (radius_B > 0).all()
    assert (ascend(margin_loss(model.double(), y), x.double(), radius_B, 20, 3) <= 0).all()


class Windowed(nn.Module):
    """One block of attention in shifted windows of 2 x 2 of 4 x 4 tokens, in one of the ways in which people write it.

    `attend` maps q, k, v (B * 4 windows, 2 heads, 4 tokens, 4), a bias (2, 4, 4), and a mask (4 windows, 4, 4).
    """

    bias: Tensor
    mask: Tensor

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.attend = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8, eps=0.1), attend
        self.q, self.kv, self.out, self.head = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("bias", torch.randn(2, 4, 4))
        self.register_buffer("mask", -9.0 * torch.randint(0, 2, (4, 4, 4)) * (1 - torch.eye(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).movedim(1, -1)
        windows = self.norm(x).roll((1, 1), (1, 2)).unflatten(2, (2, 2)).unflatten(1, (2, 2))
        windows = windows.transpose(2, 3).reshape(-1, 4, 8)
        q = self.q(windows).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = self.kv(windows).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        y = self.out(self.attend(q, k, v, self.bias, self.mask).transpose(1, 2).flatten(2))
        y = y.view(-1, 2, 2, 2, 2, 8).transpose(2, 3).reshape(x.shape).roll((-1, -1), (1, 2))
        return self.head((x + y).mean((1, 2)))


def by_torch(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    whole = bias + mask[None, :, None].expand(len(q) // 4, -1, -1, -1, -1).reshape(-1, 1, 4, 4)
    return F.scaled_dot_product_attention(q, k, v, whole)


def by_torch_with_five_axes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (part.unflatten(0, (-1, 4)) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, bias + mask[:, None]).flatten(0, 1)


def by_hand(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    scores = (q * 0.5) @ k.mT + bias
    scores = scores.view(-1, 4, 2, 4, 4) + mask[:, None]
    return scores.view(-1, 2, 4, 4).softmax(-1) @ v


def without_a_mask(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


WINDOWS = (by_torch, by_torch_with_five_axes, by_hand, without_a_mask)


@pytest.mark.parametrize("attend", mostly_slow(WINDOWS, by_hand, by_torch_with_five_axes))
def test_attention_in_windows_is_one_module(attend: Callable[..., Tensor]) -> None:
    assert_one_masked_module(lambda: Windowed(attend))


def other_keys(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.unflatten(0, (-1, 4)).flip(1).flatten(0, 1), v)


def fewer_queries(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[:, :, :2], k, v).repeat(1, 1, 2, 1)


def test_keys_of_other_windows_and_fewer_queries_are_refused() -> None:
    refused = {"projections of different tokens": other_keys, "do not divide the tokens": fewer_queries}
    for words, attend in refused.items():
        model, x, y = settled(lambda attend=attend: Windowed(attend))  # type: ignore[misc]
        with pytest.raises(UserError, match=words):
            certify(model, x, y, 0.1)


def test_a_mask_that_is_none_of_these_is_refused() -> None:
    refused = {
        "scores set to -9": lambda q, k, v, m: (q @ k.mT).masked_fill(m[0] == -torch.inf, -9.0).softmax(-1) @ v,
        "depends on the image": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, q @ k.mT),
        "leaves a query no key": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m - torch.inf),
    }
    for words, attend in refused.items():
        model, x, y = settled(lambda attend=attend: Masked(attend))  # type: ignore[misc]
        with pytest.raises(UserError, match=words):
            certify(model, x, y, 0.1)


@pytest.mark.slow
def test_the_second_order_is_tighter() -> None:
    for make in OWN.values():
        model, x, y = settled(make)
        assert (certified_radius(model, x, y, "adjoint", nonce="a") >= certified_radius(model, x, y, "lofast")).all()


# what is captured is what runs ----------------------------------------------------------------------------------------


def doubled(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, inputs, logits: 2 * logits)


def patched(model: nn.Module) -> None:
    def twice(self: nn.Module, x: Tensor) -> Tensor:
        return 2 * type(self).forward(self, x)

    model.forward = MethodType(twice, model)


@pytest.mark.parametrize("change", [doubled, patched])
def test_hooks_and_patched_methods_are_in_the_graph(change: Callable[[nn.Module], None]) -> None:
    model, x, y = settled(plain)
    before = certify(model, x, y, 0.01, "lofast")
    change(model)
    after = certify(model, x, y, 0.01, "lofast")
    torch.testing.assert_close(after.margin_B, 2 * before.margin_B)
    assert (after.loss_B >= 1.999 * before.loss_B).all()


def test_a_patched_function_is_in_the_graph_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention calls the patched softmax in the model and in the capture alike; no rule knows its result."""
    model, x, y = settled(Tokens)
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda scores, dim: softmax(2 * scores, dim))
    patched = capture(prepared(model), tuple(x.shape[1:])).exact
    assert patched is not None
    with torch.no_grad():
        found, expected = patched(x.double()), model.double()(x.double())
    torch.testing.assert_close(found - found[:, :1], expected - expected[:, :1], rtol=1e-11, atol=1e-11)
    monkeypatch.setattr(torch, "softmax", lambda scores, dim: softmax(scores, dim).square())
    with pytest.raises(UserError, match=r"pow|square|softmax"):
        certify(model.float(), x, y, 0.1)


class Liar(nn.Module):
    """An object that isinstance takes for a ViT."""

    __class__ = property(lambda self: ViT)

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return -self.model(x)


def test_a_class_that_poses_as_another_is_certified_as_what_it_computes() -> None:
    model, x, _ = settled(plain)
    found = certify(Liar(model).eval(), x, (-model(x)).argmax(-1), 0.01, "lofast")
    expected = certify(nn.Sequential(model, nn.Flatten()), x, model(x).argmax(-1), 0.01, "lofast")
    assert found.correct_B.all()
    assert not torch.allclose(found.margin_B, expected.margin_B)


def test_weights_that_change_later_are_noticed() -> None:
    model, x, y = settled(plain)
    made = certifier(model, "lofast", batch=(x, y))
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(2)
    with pytest.raises(UserError, match="changed since"):
        made.analyse(x, y)


def test_an_attribute_that_changes_later_is_noticed() -> None:
    model, x = Of(lambda x: x.relu()).eval(), torch.rand(2, 3, SIZE, SIZE)
    model.__dict__["scale"] = 1.0
    certificates = certifier(model, "adjoint", batch=(x, torch.zeros(2).long()))
    model.__dict__["scale"] = -1.0
    with pytest.raises(UserError, match="the attribute scale changed"):
        certificates.analyse(x, torch.zeros(2).long())


@pytest.mark.slow
def test_a_module_with_rules_of_its_own_stays_whole() -> None:
    model, x, y = settled(lambda: Tokens(SmoothProject(8)))
    exact = capture(prepared(model), tuple(x.shape[1:])).exact
    assert exact is not None
    assert SmoothProject in {type(module) for module in exact.modules()}
    assert (certified_radius(model, x, y, "adjoint") > 0).all()
    model.get_submodule("inner").register_forward_hook(lambda module, inputs, y: 3 * y)
    with pytest.raises(UserError, match=r"rsqrt|pow|inner"):
        certified_radius(model, x, y, "adjoint")


def test_moves_are_those_of_torch() -> None:
    torch.manual_seed(0)
    node = Node((4, 6, 2))
    value: Any = Value.of(node)
    for f, *args in (
        (torch.permute, (0, 2, 1, 3)),
        (torch.flip, [1]),
        (torch.reshape, (BATCH, 3, 2, 8)),
        (torch.transpose, 1, 3),
        (torch.narrow, 2, 0, 1),
        (torch.Tensor.expand, (BATCH, 8, 2, 3)),
    ):
        value = moved(f, value, *args)
    module = materialised(value).module
    assert module is not None
    start = torch.arange(BATCH * 48.0).view(BATCH, 4, 6, 2)
    expected = start.permute(0, 2, 1, 3).flip(1).reshape(BATCH, 3, 2, 8).transpose(1, 3).narrow(2, 0, 1)
    assert torch.equal(module(start.double()), expected.expand(BATCH, 8, 2, 3).double())


class Spelled(nn.Module):
    """An operation between two linear layers, or images in front of it."""

    def __init__(self, f: Callable[[Tensor], Tensor], *, images: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.f = (nn.Conv2d(3, 4, 3, 2, 1) if images else nn.Linear(3 * SIZE**2, 8)), f
        self.b = nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) if isinstance(self.a, nn.Conv2d) else self.a(x.flatten(1))
        return self.b(self.f(y).flatten(1))


KERNEL = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
AROUND = KERNEL[:, :1].expand(4, 4, 3, 3)
SPELLED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "rms norm": (lambda x: F.rms_norm(x, (8,), torch.linspace(0.5, 2, 8, dtype=x.dtype), 0.1), False),
    "modulus": (torch.abs, False),
    "log sigmoid": (F.logsigmoid, False),
    "gated linear unit": (F.glu, False),
    "square": (lambda x: 0.1 * x**2 + x.square(), False),
    "excitation": (lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(), True),
    "pairs in order": (lambda x: torch.cat([x.view(-1, 4, 2).min(2).values, x.view(-1, 4, 2).max(2).values], 1), False),
    "larger by choice": (lambda x: torch.cat([torch.where(x[:, :4] > x[:, 4:], x[:, :4], x[:, 4:]), x], 1), False),
    "smaller by choice": (lambda x: torch.where(x[:, :4] >= x[:, 4:], x[:, 4:], x[:, :4]), False),
    "at least a number": (lambda x: torch.where(x < 0.1, 0.1, x) + torch.where(x > 0, x, torch.zeros_like(x)), False),
    "smallest of axes": (lambda x: x.amin((2, 3)), True),
    "transposed convolution": (lambda x: F.conv_transpose2d(x, KERNEL.to(x), padding=1), True),
    "around the image": (lambda x: F.conv2d(F.pad(x, (2, 2, 1, 1), "circular"), AROUND.to(x), dilation=(1, 2)), True),
    "spread convolution": (
        lambda x: F.conv_transpose2d(x, KERNEL[:, :1].to(x), torch.arange(2.0).to(x), 2, 1, 1, 2, dilation=2),
        True,
    ),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), True),
    "bilinear": (lambda x: F.interpolate(x, size=(7, 6), mode="bilinear"), True),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic", align_corners=True), True),
    "uneven average": (lambda x: F.adaptive_avg_pool2d(x, 3), True),
    "average of tokens": (lambda x: F.adaptive_avg_pool1d(x.flatten(2), 1), True),
    "average of rows": (lambda x: F.adaptive_avg_pool1d(x.flatten(1, 2), 2), True),
    "new zeros": (lambda x: torch.cat([x, x.new_zeros(len(x), 1, *x.shape[2:])], 1), True),
    "a factor of a part": (
        lambda x: torch.cat([0.5 * x[:, :1], x[:, 1:].transpose(0, 1).mul(2).transpose(0, 1)], 1),
        True,
    ),
    "adaptive maximum": (lambda x: F.adaptive_max_pool2d(x, 2), True),
    "circular": (lambda x: F.pad(x, (1, 1, 1, 1), "circular"), True),
    "softplus": (F.softplus, False),
    "softplus with a jump": (lambda x: F.softplus(x, 2.0, 0.5), False),
    "softmax": (lambda x: x.softmax(1), True),
    "normalised": (lambda x: F.normalize(x, dim=1), True),
    "normalised vector": (F.normalize, False),
    "sorted groups": (lambda x: x.view(-1, 2, 4).sort(-1, descending=True).values.flatten(1), False),
    "sorted channels": (lambda x: x.sort(1).values, True),
    "group norm": (lambda x: F.group_norm(x, 2, eps=0.1), True),
    "instance norm": (lambda x: F.instance_norm(x, eps=0.1), True),
}


@pytest.mark.parametrize("name", SPELLED)
def test_an_operation_has_its_logits_and_a_radius_that_holds(name: str) -> None:
    f, images = SPELLED[name]
    x = torch.rand(2, 3, SIZE, SIZE)
    model = Spelled(f, images=images)
    model(x)  # the last layer takes its size
    y = model.eval()(x).argmax(-1)
    radius_B = certified_radius(model, x, y, "adjoint", nonce="a")  # compares the logits
    assert (radius_B > 0).all()
    assert (ascend(margin_loss(model.double(), y), x.double(), radius_B, 20, 3) <= 0).all()


def apart(x: Tensor) -> Tensor:
    """Return MaxMin of both halves of the channels by comparisons."""
    a, b = x.chunk(2, 1)
    return torch.cat([torch.where(a > b, a, b), torch.where(a > b, b, a)], 1)


def beside(x: Tensor) -> Tensor:
    """Return MaxMin of neighbours, along an axis of two."""
    pairs = x.view(len(x), x.shape[1] // 2, 2, *x.shape[2:])
    return torch.cat([pairs.max(2, True).values, pairs.min(2, True).values], 2).view(x.shape)


def of_two(x: Tensor) -> Tensor:
    """Return MaxMin of every other channel by torch's own functions, the smaller ones first."""
    return torch.cat([torch.minimum(x[:, 1::2], x[:, ::2]), torch.maximum(x[:, ::2], x[:, 1::2])], 1)


class Orthogonal(nn.Module):
    """A network of norm 1 by construction: convolutions around the image by circular shifts and rotations, MaxMin."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kernels = nn.ParameterList([self._rotation(12) for _ in range(6)])
        self.last = nn.Parameter(self._rotation(12 * (SIZE // 2) ** 2)[:4])
        self.activation = activation

    @staticmethod
    def _rotation(width: int) -> Tensor:
        return torch.linalg.qr(torch.randn(width, width)).Q

    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_unshuffle(x, 2)
        for k, rotation in enumerate(self.kernels):
            kernel = torch.zeros(12, 12, 3, 3, dtype=x.dtype)
            kernel[:, :, k % 3, (k + 1) % 3] = rotation
            x = self.activation(F.conv2d(F.pad(x, (1, 1, 1, 1), "circular"), kernel))
        return x.flatten(1) @ self.last.T


@pytest.mark.parametrize("activation", [apart, beside, of_two])
def test_a_network_of_norm_1_is_certified_as_far_as_its_own_margins_say(activation: Callable[[Tensor], Tensor]) -> None:
    """However MaxMin is written, it permutes entries: no bound may grow from layer to layer."""
    model = Orthogonal(activation).eval()
    x = torch.rand(8, 3, SIZE, SIZE)
    with torch.no_grad():
        best = model(x).topk(2)
    radii = certified_radius(model, x, best.indices[:, 0], method="lofast")
    margin_B = best.values[:, 0] - best.values[:, 1]
    assert (radii >= margin_B / 2**0.5 * (1 - 4e-3)).all(), "2^-9 is the precision of the search"


def test_the_last_softmax_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.Softmax(-1))
    with pytest.raises(UserError, match="leave out the last softmax"):
        certify(model, torch.rand(2, 3, 2, 2), torch.zeros(2).long(), 0.1)


# what is refused ------------------------------------------------------------------------------------------------------


class Of(nn.Module):
    """A linear layer after an operation."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * SIZE**2, 4)
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.f(x).flatten(1))


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a branch": (branch, r"test_capture.py, line \d+: if x.sum\(\) > 0"),
    "dropout": (lambda x: F.dropout(x, 0.5, training=True), "dropout .*: random numbers, or dropout that is active"),
    "noise": (lambda x: x + torch.rand_like(x), "rand.*random numbers"),
    "drawn constants": (lambda x: x + torch.rand(3, 1, 1).double(), "random numbers"),
    "a choice between others": (lambda x: torch.where(x > 0.5, x, -x), "between the two that it compares"),
    "a comparison as a number": (lambda x: x * (x > 0.5), "between the two that it compares"),
    "a quotient": (lambda x: x / (1 + x.sigmoid()), "quotient by a result"),
    "other images": (lambda x: x - x.mean(0), "over the images"),
    "images by index": (lambda x: x[[0, 0]], "mixes the images"),
    "float32": (lambda x: x.float().double(), "float32"),
    "a lookup": (lambda x: torch.topk(x, SIZE).values, r"topk \("),
    "batch statistics": (lambda x: F.batch_norm(x, None, None, training=True), "batch_norm"),
    "another's lengths": (lambda x: x.relu() / x.norm(dim=1, keepdim=True).clamp_min(0.1), "lengths of another"),
    "lengths without eps": (lambda x: x / x.norm(dim=1, keepdim=True), "may be 0"),
    "lengths of others": (lambda x: x / x.norm(dim=2).clamp_min(0.1).unsqueeze(3), "or of other rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_with_its_line(name: str) -> None:
    f, words = REFUSED[name]
    x = torch.rand(2, 3, SIZE, SIZE)
    with pytest.raises(UserError, match=words) as refused:
        certify(Of(f).eval(), x, torch.zeros(2).long(), 0.1)
    assert "\n" not in str(refused.value)
    assert "test_capture.py" in str(refused.value)


def test_all_missing_operations_are_listed_at_once() -> None:
    x = torch.rand(2, 3, SIZE, SIZE)

    def f(x: Tensor) -> Tensor:
        return torch.cumsum(x.sin(), 1).relu() + x.cos()

    with pytest.raises(NotCaptured) as refused:
        certify(Of(f).eval(), x, torch.zeros(2).long(), 0.1)
    assert [fault.operation for fault in refused.value.faults] == ["sin", "cumsum", "cos"]
    assert "certify.explain" in str(refused.value)


class Counter(nn.Module):
    """A model whose answers change from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(3 * SIZE**2, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x.flatten(1)) * self.calls


class Wrapped(nn.Module):
    """A model that returns its logits in something else."""

    def __init__(self, wrap: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.fc, self.wrap = nn.Linear(3 * SIZE**2, 4), wrap

    def forward(self, x: Tensor) -> object:
        return self.wrap(self.fc(x.flatten(1)))


WRAPS: dict[str, Callable[[Tensor], object]] = {
    "dict": lambda y: {"logits": y},
    "tuple": lambda y: (y, y.relu()),
    "list": lambda y: [y],
}


@pytest.mark.parametrize("name", WRAPS)
def test_anything_but_a_tensor_of_logits_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"returns a {name}, .*model\(x\)\.logits"):
        certify(Wrapped(WRAPS[name]).eval(), torch.rand(2, 3, SIZE, SIZE), torch.zeros(2).long(), 0.1)


class Tally(nn.Module):
    """A model that counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * SIZE**2, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.fc(x.flatten(1))


def test_a_model_that_writes_to_a_buffer_is_refused() -> None:
    with pytest.raises(UserError, match="writes to calls"):
        certify(Tally().eval(), torch.rand(2, 3, SIZE, SIZE), torch.zeros(2).long(), 0.1)


def test_a_refusal_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="decides by the values"):
        certify(Of(branch).eval(), torch.rand(2, 3, SIZE, SIZE), torch.zeros(2).long(), 0.1)
    assert capfd.readouterr() == ("", "")


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(UserError, match="no parameters"):
        certify(nn.Flatten(), torch.rand(2, 3, SIZE, SIZE), torch.zeros(2).long(), 0.1)


def test_state_that_changes_is_refused() -> None:
    with pytest.raises(UserError, match="other logits"):
        certify(Counter().eval(), torch.rand(2, 3, SIZE, SIZE), torch.zeros(2).long(), 0.1)
