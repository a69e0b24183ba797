"""Attention of the form softmax(score) V: the fused kernels against the papers' formulas, and Lipschitz claims.

Letters: B images, N tokens, D width, H heads, O = D / H.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from certizoo import UserError
from tests.tools.ascent import largest_change
from tests.tools.cases import mostly_slow
from zoo.attention import variants
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.l2 import L2Attention, distance_bound
from zoo.attention.lipschitz_norm import LipschitzNormAttention
from zoo.attention.scsa import ScaledCosineAttention
from zoo.attention.softmax.module import SoftmaxAttention
from zoo.bounds.first_order import layer_of
from zoo.bounds.rule_table import NoRule

SOFTMAX = [name for name, kind in variants().items() if isinstance(kind, type) and issubclass(kind, SoftmaxAttention)]
Heads = Callable[[Any, Tensor, int], tuple[Tensor, Tensor]]  # (module, x, head) -> P (B, N, N), V (B, N, O)


# The papers' formulas, head by head -----------------------------------------------------------------------------------


def rows(module: Any, head: int) -> slice:
    size = module.proj.in_features // module.num_heads
    return slice(head * size, (head + 1) * size)


def qkv_of_head(module: Any, x: Tensor, head: int) -> list[Tensor]:
    biases = (0, 0, 0) if module.qkv.bias is None else module.qkv.bias.chunk(3)
    own = rows(module, head)
    return [
        x @ w[own].T + (b if isinstance(b, int) else b[own])
        for w, b in zip(module.qkv.weight.chunk(3), biases, strict=True)
    ]


def plain_dp(module: Any, x: Tensor, head: int) -> tuple[Tensor, Tensor]:
    q, k, v = qkv_of_head(module, x, head)
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1), v


def plain_l2(module: Any, x: Tensor, head: int) -> tuple[Tensor, Tensor]:
    own = rows(module, head)
    w_q, w_v = module.q.weight[own].T, module.v.weight[own].T
    w_k = w_q if module.k is None else module.k.weight[own].T
    root = math.sqrt(w_q.shape[1])
    distance2 = ((x @ w_q)[:, :, None] - (x @ w_k)[:, None]).square().sum(-1)
    return torch.softmax(-distance2 / root, -1), x @ (w_q @ w_q.T / root) @ w_v


def plain_scsa(module: Any, x: Tensor, head: int) -> tuple[Tensor, Tensor]:
    q, k, v = (u / (u.square().sum(-1, keepdim=True) + module.eps).sqrt() for u in qkv_of_head(module, x, head))
    return torch.softmax(module.scale * (q @ k.mT), -1), module.nu * v


def plain_ln(module: Any, x: Tensor, head: int) -> tuple[Tensor, Tensor]:
    q, k, v = qkv_of_head(module, x, head)
    p = []
    for q_NO, k_NO, v_NO in zip(q, k, v, strict=True):
        u, v_max, w = q_NO.norm(), k_NO.norm(dim=1).max(), v_NO.norm(dim=1).max()
        p.append(torch.softmax(q_NO @ k_NO.T / torch.stack([u * v_max, u * w, v_max * w]).max(), -1))
    return torch.stack(p), v


PLAIN: dict[str, Heads] = {"dp": plain_dp, "l2": plain_l2, "scsa": plain_scsa, "ln": plain_ln}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "dp": [{}, {"qkv_bias": False}],
    "l2": [{}, {"tied": False}],
    "scsa": [{}, {"tau": 3.0, "nu": 0.5, "eps": 1e-3, "qkv_bias": False}],
    "ln": [{}, {"qkv_bias": False}],
}
CASES = [(name, options) for name in PLAIN for options in OPTIONS[name]]


def plain(name: str, module: Any, x: Tensor) -> Tensor:
    """sum_h P_h V_h W_O^h + b_O."""
    y = module.proj.bias
    for head in range(module.num_heads):
        p, v = PLAIN[name](module, x, head)
        y = y + p @ v @ module.proj.weight[:, rows(module, head)].T
    return y


def randomised(name: str, dim: int, num_heads: int, **options: Any) -> Any:
    """Draw weights that keep the size of the tokens, and biases of size 0.1."""
    module = variants()[name](dim, num_heads, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1 if parameter.ndim == 1 else dim**-0.5)
    return module


def output_and_gradients(f: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return f(x), and the gradients of <g, f(x)> for the input and all parameters, ||g|| = 1."""
    x = x.requires_grad_()
    y = f(x)
    g = F.normalize(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y).flatten(), dim=0)
    return [y.detach(), *torch.autograd.grad(g @ y.flatten(), [x, *module.parameters()])]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize(("dim", "num_heads", "tokens"), [(12, 3, 5), (20, 2, 1), (64, 1, 17), (192, 3, 65)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_fused_equals_the_formula(
    name: str, options: dict[str, Any], dim: int, num_heads: int, tokens: int, dtype: torch.dtype
) -> None:
    """Compare output and every gradient, for tokens of norm sqrt(D) / 10, sqrt(D) and 3 sqrt(D)."""
    torch.manual_seed(0)
    module = randomised(name, dim, num_heads, **options).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    for size in (0.1, 1.0, 3.0):
        x = size * torch.randn(2, tokens, dim, dtype=dtype)
        fused = output_and_gradients(module, module, x)
        slow = output_and_gradients(lambda z: plain(name, module, z), module, x)
        for ours, theirs in zip(fused, slow, strict=True):
            error = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1)
            assert error <= tolerance, (size, tuple(theirs.shape))


def test_every_softmax_variant_has_its_formula() -> None:
    assert set(SOFTMAX) == set(PLAIN) == set(OPTIONS)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_no_variant_falls_off_the_fused_kernel(name: str, options: dict[str, Any]) -> None:
    x = torch.randn(2, 5, 24, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        randomised(name, 24, 3, **options)(x).sum().backward()


def test_l2_keeps_its_distances_far_from_the_origin() -> None:
    """A common offset of 100 times the differences cancels before it is squared, not after."""
    torch.manual_seed(0)
    module = randomised("l2", 64, 1)
    x = 0.1 * torch.randn(2, 17, 64) + 10 * torch.randn(64)
    fused = output_and_gradients(module, module, x)
    for ours, theirs in zip(fused, output_and_gradients(lambda z: plain("l2", module, z), module, x), strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp_min(1)


def test_l2_keeps_its_distances_in_bfloat16() -> None:
    """Two clusters are far apart, so the squares that cancel far exceed the distances within one.

    The reference is float64 on the same rounded projections. With ||k||^2 in one column, the error of P would be 0.15.
    """
    torch.manual_seed(0)
    cluster = 6 * torch.randn(2, 64)
    q = (cluster[torch.arange(16) % 2] + 0.3 * torch.randn(2, 16, 64)).bfloat16()
    module: Any = L2Attention(64, 1).bfloat16()
    module.q.forward = lambda x: q
    query, key, _ = (part[:, 0].double() for part in module.heads(q))
    exact = (-(q.double()[:, :, None] - q.double()[:, None]).square().sum(-1) / 8).softmax(-1)
    assert (torch.softmax(module.scale * query @ key.mT, -1) - exact).abs().max() < 0.01


# Lipschitz claims ----------------------------------------------------------------------------------------------------


def steepest(module: nn.Module, x: Tensor, steps: int = 60) -> Tensor:
    """Return the largest ||F(x + h d) - F(x)|| / h found over x and unit d, from each x of the batch: (B,)."""
    x, d = x.clone().requires_grad_(), torch.randn_like(x).requires_grad_()
    optimizer = torch.optim.Adam([x, d], lr=0.05)
    best_B = x.new_zeros(len(x))
    for _ in range(steps):
        ratio_B = slope(module, x, d)
        best_B = torch.maximum(best_B, ratio_B.detach())
        x.grad, d.grad = torch.autograd.grad(-ratio_B.log().sum(), [x, d])
        optimizer.step()
    return best_B


def slope(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
    h = 1e-5
    step = h * F.normalize(d.flatten(1), dim=1).view_as(x)
    return (module(x + step) - module(x)).flatten(1).norm(dim=1) / h


def stretch(module: nn.Module, x: Tensor, r: float) -> float:
    """Return the largest change per radius that ascent finds around one input x (N, D)."""
    module = module.double().eval().requires_grad_(False)
    return float(largest_change(module, x[None].double(), torch.tensor([r], dtype=torch.float64))) / r


def constant(module: nn.Module, x: Tensor) -> float:
    """Return the rule's Lipschitz constant for inputs like x (N, D)."""
    _, bound = layer_of(module)(x[None].double())
    return float(bound(torch.ones(1, dtype=torch.float64)))


def trained(module: nn.Module, tokens: int, dim: int) -> nn.Module:
    """Take a few steps of SGD towards 'every token becomes the largest one of its image'."""
    module.double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    x = torch.randn(16, tokens, dim, dtype=torch.float64)
    largest = x.gather(1, x.norm(dim=2).argmax(1)[:, None, None].expand(-1, 1, dim)).expand_as(x)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(module(x), largest)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    return module


def adversarial(module: nn.Module, x: Tensor) -> nn.Module:
    """Climb weights of unit spectral norm per projection and the input together to the steepest slope."""
    matrices = [p for p in module.parameters() if p.ndim == 2]
    x, d = x.clone().requires_grad_(), torch.randn_like(x).requires_grad_()
    optimizer = torch.optim.Adam([x, d, *module.double().parameters()], lr=0.03)
    for _ in range(120):
        optimizer.zero_grad()
        (-slope(module, x, d).log().sum()).backward()
        optimizer.step()
        with torch.no_grad():
            for w in matrices:
                for block in w.chunk(len(w) // w.shape[1]):
                    block /= torch.linalg.matrix_norm(block, 2)
            x.copy_(x.clamp(-30, 30))
    return module


LIPSCHITZ: dict[str, Callable[[], nn.Module]] = {
    "l2": lambda: L2Attention(8, 2),
    "scsa": lambda: ScaledCosineAttention(8, 2, tau=1.0, eps=1.0),
    "scsa-flat": lambda: ScaledCosineAttention(8, 2, tau=0.01, eps=1.0),
    "scsa-sharp": lambda: ScaledCosineAttention(8, 2),
    "ln": lambda: LipschitzNormAttention(8, 2),
}


@pytest.mark.parametrize("name", LIPSCHITZ)
@pytest.mark.parametrize("tokens", mostly_slow((1, 3), 3))
@pytest.mark.parametrize("weights", ["random", "trained", "adversarial"])
def test_claims_hold(name: str, tokens: int, weights: str) -> None:
    """Ascent finds no pair of inputs that is stretched by more than the rule's constant."""
    torch.manual_seed(0)
    module = LIPSCHITZ[name]().double()
    sizes = torch.logspace(-1.5, 1, 24, dtype=torch.float64)
    x = torch.randn(24, tokens, 8, dtype=torch.float64) * sizes.view(-1, 1, 1)
    if weights == "trained":
        module = trained(module, tokens, 8)
    if weights == "adversarial":
        module = adversarial(module, x[8:16])
    module.eval().requires_grad_(False)
    _, bound = layer_of(module)(x)
    ratio = float((steepest(module, x) / bound(torch.ones(24, dtype=torch.float64))).max())
    assert ratio <= 1 + 1e-6  # allow for the error of the finite difference
    assert ratio >= {"random": 0.1, "trained": 0.12, "adversarial": 0.2}[weights], "the search has no teeth"


def growth(ratio_at: Callable[[float], float]) -> float:
    """Return the growth of the ratio when the parameter grows by 10; it tends to 1 for a Lipschitz map."""
    return ratio_at(1000.0) / ratio_at(100.0)


@pytest.fixture(params=["random", "trained"])
def prepared(request: pytest.FixtureRequest) -> Callable[[nn.Module], Any]:
    torch.manual_seed(0)
    return lambda module: trained(module, 3, 4) if request.param == "trained" else module.double()


def test_dot_product_attention_is_not_lipschitz(prepared: Callable[[nn.Module], Any]) -> None:
    """A query at 0 weighs all keys alike and turns with their size (Kim et al. 2021, Theorem 3.1): slope like t^2."""
    module = prepared(DotProductAttention(4, 1, qkv_bias=False))
    tokens = torch.cat([torch.zeros(1, 4), torch.randn(2, 4)])
    assert growth(lambda t: stretch(module, t * tokens, r=1e-6)) > 50


def test_untied_l2_attention_is_not_lipschitz_and_has_no_rule(prepared: Callable[[nn.Module], Any]) -> None:
    """Keys 2 and 3 lie on either side of query 1, which is far from its own key: slope like t^2."""
    module = prepared(L2Attention(4, 1, tied=False))
    to_query, to_key = module.q.weight.detach().T, module.k.weight.detach().T
    first, side = torch.randn(2, 4, dtype=torch.float64)
    query, own_key = first @ to_query, first @ to_key
    side *= 0.3 * (query - own_key).norm() / side.norm()
    tokens = torch.stack([first, *torch.linalg.solve(to_key.T, torch.stack([query + side, query - side]).T).T])
    assert growth(lambda t: stretch(module, t * tokens, r=1e-6)) > 50
    with pytest.raises(NoRule, match="tied=false"):
        layer_of(module)


class WithoutA(L2Attention):
    """CertViT's code: F(X) = P X W_V W_O (docs/references.md#erratum-certvit-values)."""

    def forward(self, x: Tensor, bias: Tensor | None = None, first: int | None = None) -> Tensor:
        p = [plain_l2(self, x, head)[0] for head in range(self.num_heads)]
        v = self.v(x).unflatten(-1, (self.num_heads, -1)).unbind(-2)
        return self.proj(torch.cat([p_h @ v_h for p_h, v_h in zip(p, v, strict=True)], -1))


def test_l2_attention_without_a_is_not_lipschitz(prepared: Callable[[nn.Module], Any]) -> None:
    """With D / H < D tokens far apart in directions that a head cannot see have small distances: slope like t.

    The same weights and tokens with A_h stay below the rule.
    """
    module = prepared(WithoutA(4, 2))
    first_head = module.q.weight.detach()[:2]
    blind = torch.linalg.svd(first_head).Vh[-1]
    tokens = torch.randn(3, 4, dtype=torch.float64)
    tokens /= (tokens @ first_head.T).norm()  # distances of about 1 keep weights away from 0 and 1
    apart = torch.tensor([0.0, 1.0, -1.0]).double()[:, None] * blind
    assert growth(lambda t: stretch(module, tokens + t * apart, r=1e-3)) > 5
    lipschitz = L2Attention(4, 2).double().eval()
    lipschitz.load_state_dict(module.state_dict())
    for t in (10.0, 100.0, 1000.0):
        assert stretch(lipschitz, tokens + t * apart, r=1e-3) <= constant(lipschitz, tokens)


def test_scsa_loses_its_constant_with_eps(prepared: Callable[[nn.Module], Any]) -> None:
    """Near the origin the slope grows like eps^-1/2, so the code's 1e-12 gives a useless constant."""
    module = prepared(ScaledCosineAttention(4, 1, qkv_bias=False))

    def ratio_at(t: float) -> float:
        module.eps = t**-2
        return stretch(module, torch.zeros(3, 4), r=1e-6)

    assert growth(ratio_at) > 9


def norms(*weights: Tensor) -> list[float]:
    return [float(torch.linalg.matrix_norm(w.detach(), 2)) for w in weights]


@pytest.mark.parametrize("tokens", [1, 5])
def test_eq_40_as_printed_is_broken(tokens: int) -> None:
    """For one head sqrt(N) / sqrt(D/H) (4 Phi + 1) ||W_Q|| ||W_V|| ||W_O|| is too small.

    A_h brings a second ||W_Q|| (docs/references.md#erratum-l2-power).
    """
    torch.manual_seed(0)
    module = L2Attention(4, 1).double()
    with torch.no_grad():
        module.q.weight *= 30
    w_q, w_v, w_o = norms(module.q.weight, module.v.weight, module.proj.weight)
    eq_40 = math.sqrt(tokens / 4) * (4 * distance_bound(tokens) + 1) * w_q * w_v * w_o
    x = torch.randn(1, 4).expand(tokens, 4)
    assert eq_40 * 1.1 < stretch(module, x, r=1e-3) <= constant(module, x)


def test_eq_41_is_broken() -> None:
    """For one head 11 ||W_O|| ||W_Q|| ||W_K|| lacks W_V.

    For N = 1 the layer is X W_V W_O (docs/references.md#erratum-ln-values).
    """
    torch.manual_seed(0)
    module = LipschitzNormAttention(4, 1).double()
    with torch.no_grad():
        module.qkv.weight[:4] *= 0.01
    w_q, w_k, _ = norms(*module.qkv.weight.chunk(3))
    x = torch.randn(1, 4)
    eq_41 = 11 * norms(module.proj.weight)[0] * w_q * w_k
    assert eq_41 * 1.1 < stretch(module, x, r=1e-3) <= constant(module, x)


def test_the_distance_bound_is_the_root_rounded_upwards() -> None:
    assert distance_bound(1) == 0
    for n in (2, 3, 5, 197, 4097, 10**9):
        phi = distance_bound(n)
        assert n - 1 <= phi * math.exp(phi + 1) <= (n - 1) * (1 + 1e-10)


# Options --------------------------------------------------------------------------------------------------------------


def test_caps_of_l2_are_put_on_by_finish_init() -> None:
    torch.manual_seed(0)
    module: Any = L2Attention(12, 3, tied=False, q_cap=0.3, k_cap=0.4, v_cap=0.5, o_cap=0.6)
    module.finish_init()
    found = norms(module.q.weight, module.k.weight, module.v.weight, module.proj.weight)
    assert found == pytest.approx([0.3, 0.4, 0.5, 0.6], rel=1e-4)
    with pytest.raises(UserError, match="q_cap"):
        L2Attention(12, 3, k_cap=1.0)


@pytest.mark.parametrize("name", SOFTMAX)
def test_penalised_weights_are_those_of_the_heads(name: str) -> None:
    """The weights q, k, v are blocks (H, O, D) of output rows, o is the whole matrix.

    See docs/references.md#erratum-specformer-heads.
    """
    module = randomised(name, 12, 3)
    terms = {branch: (weight, power) for branch, weight, power in module.spectral_terms()}
    assert set(terms) == ({"q", "v", "o"} if name == "l2" else {"q", "k", "v", "o"})
    for branch, (weight, power) in terms.items():
        assert weight.shape == ((1, 12, 12) if branch == "o" else (3, 4, 12))
        assert power.shape == (weight.shape[0], 12)
    assert torch.equal(terms["o"][0][0], module.proj.weight)
    v_weight = module.v.weight if name == "l2" else module.qkv.weight[24:]
    assert torch.equal(terms["v"][0][1], v_weight[4:8])


def test_l2_has_three_square_matrices() -> None:
    """CertViT's published parameter counts follow from them."""
    assert sum(p.numel() for p in L2Attention(12, 3, proj_bias=False).parameters()) == 3 * 12**2
    assert sum(p.numel() for p in L2Attention(12, 3, proj_bias=False, tied=False).parameters()) == 4 * 12**2
