"""Normalisation layers and their sensitivity rules.

Letters: u one token (d,), rho = ||u||, R the radius of the ball, r the radius of the input, N tokens.
All norms act per token. A joint bound over tokens is the maximum of the per-token bounds psi_i(r) because psi_i(r) / r
is nondecreasing (docs/proofs.md#tokenwise-lemma); at second order psi_i(r) / r^2 must be.

Second order: projections are gradients of convex functions with Hessians between 0 and I. So R(G) = (A - J) G with 0 <=
A, J <= I for the mean A of the Hessians on the way, and ||R(G)|| <= ||G|| holds in addition to the other bounds.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from certizoo import UserError
from zoo.arithmetic import FAR, OUT, length, product
from zoo.arithmetic import gamma as gamma_k
from zoo.bounds.activations import hinges
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer, Precision, Rounded, Rounding
from zoo.bounds.curvature import affine
from zoo.bounds.first_order import layer_of
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.primitives import centred, factors, plus
from zoo.bounds.rounding import ROOT, TINY, composed, in_range, size
from zoo.bounds.rule_table import ModuleRules, NoRule, register
from zoo.layers.norm_forms import BoundedForms, ProjectForms
from zoo.spectral import sigma_upper


class LayerProject(nn.Module):
    """LayerProject(x, R) = x R / max(||x||_2, R) per token: projection on the ball of radius R, 1-Lipschitz.

    Source: eq. 29 of "Fine-grained Local Sensitivity Analysis" (LoFAST), where R = sqrt(d) before the MLP, and 1 before
    the attention. x (..., d) -> (..., d).
    """

    def __init__(self, dim: int, radius: float | None = None) -> None:
        super().__init__()
        self.radius = math.sqrt(dim) if radius is None else radius

    def forward(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * (self.radius / norm.clamp_min(self.radius))

    def extra_repr(self) -> str:
        return f"radius={self.radius:g}"


class SmoothProject(nn.Module):
    """N_R(x) = x / sqrt(1 + ||x||_2^2 / R^2) per token: the smooth form of `LayerProject`, 1-Lipschitz.

    Proofs: docs/proofs.md#bounded-normalisation. x (..., d) -> (..., d), ||N_R(x)|| < R.
    """

    def __init__(self, dim: int, radius: float | None = None) -> None:
        super().__init__()
        self.radius = math.sqrt(dim) if radius is None else radius

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(1 + x.square().sum(-1, keepdim=True) / self.radius**2)

    def extra_repr(self) -> str:
        return f"radius={self.radius:g}"


class CenterNorm(nn.Module):
    """gamma * d / (d - 1) (x - mean(x)) + beta per token: LayerNorm without the division by the deviation.

    Source: LipsFormer (Qi et al. 2023). With gamma = 1 its norm is d / (d - 1), not 1. x (..., d) -> (..., d).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim < 2:
            raise UserError(f"CenterNorm needs at least 2 channels, got {dim}; take another norm")
        self.dim, self.gain = dim, dim / (dim - 1)
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (self.gain * (x - x.mean(-1, keepdim=True))) + self.bias

    def gamma(self) -> Tensor:
        """Return gamma (d,) for `zoo.hinge`."""
        return self.weight

    def extra_repr(self) -> str:
        return f"{self.dim}"


def _chord(t: Tensor) -> Tensor:
    """Return 2 sin(theta / 2) for theta = arcsin t, t in [0, 1]: t sqrt(2 / (1 + sqrt(1 - t^2)))."""
    return t * (2 / (1 + (1 - t.square()).clamp_min(0).sqrt())).sqrt()


def _max_over_tokens(bound_BN: Tensor, r: Tensor) -> Tensor:
    return torch.minimum(bound_BN.amax(-1), r)


def layer_project(module: LayerProject) -> Layer:
    """Bound the output by r, since projection on a convex set never expands, or by the chord of a rotation.

    Where the whole ball of x stays outside the sphere (rho - r >= R), both images lie on it, at an angle of at most
    arcsin(r / rho): R chord(r / rho). Proof: docs/proofs.md#layer-project.
    """
    _refuse_radius(module)

    def layer(x_BND: Tensor) -> tuple[Tensor, Bound]:
        rho_BN = torch.linalg.vector_norm(x_BND, dim=-1).flatten(1)

        def bound(r: Tensor) -> Tensor:
            r_B1 = r.unsqueeze(-1)
            on_sphere = rho_BN - r_B1 >= module.radius * (1 + 1e-12)
            t = (r_B1 / rho_BN).clamp(0, 1)
            return _max_over_tokens(torch.where(on_sphere, module.radius * _chord(t), r_B1), r)

        return module(x_BND), bound

    return layer


def bounded_normalisation(u_BND: Tensor, radius: float) -> Bound:
    """Bound N_R(u) = R (first d coordinates of (u, R) / ||(u, R)||).

    With rt^2 = ||u||^2 + R^2 and x = r / rt the two unit vectors lie at an angle of at most arcsin x: min(r, R
    chord(x)) for x < 1, and 2 R x beyond. Proof: docs/proofs.md#bounded-normalisation.
    """
    rt_BN = (u_BND.square().sum(-1) + radius**2).sqrt().flatten(1)

    def bound(r: Tensor) -> Tensor:
        r_B1 = r.unsqueeze(-1)
        x = r_B1 / rt_BN
        far = torch.where(torch.isfinite(x), 2 * radius * x, torch.full_like(x, math.inf))
        return _max_over_tokens(torch.where(x < 1, radius * _chord(x.clamp(max=1)), far), r)

    return bound


def _refuse_radius(module: LayerProject | SmoothProject) -> None:
    if not 0 < module.radius < math.inf:
        raise NoRule(module, f"its radius is {module.radius}; set a finite radius above 0")


def smooth_project(module: SmoothProject) -> Layer:
    """Return the first-order rule of docs/proofs.md#bounded-normalisation."""
    _refuse_radius(module)
    return lambda x: (module(x), bounded_normalisation(x, module.radius))


def layer_norm(module: nn.LayerNorm) -> Layer:
    """Return the rule of LayerNorm, which is locally Lipschitz.

    With u = x - mean(x) (a projection) and R^2 = d eps_ln it is gamma / sqrt(eps_ln) N_R(u) + b, so the bound is
    max|gamma| / sqrt(eps_ln) times that of N_R. Proof: docs/proofs.md#layer-norm.
    """
    if not module.eps > 0 or len(module.normalized_shape) != 1:
        raise NoRule(module, "its rule covers one axis and an eps above 0; set eps, such as 1e-6")
    (dim,) = module.normalized_shape
    gamma = 1.0 if module.weight is None else float(module.weight.detach().abs().max())
    gain = gamma / math.sqrt(module.eps)

    def layer(x_BND: Tensor) -> tuple[Tensor, Bound]:
        centred = x_BND - x_BND.mean(-1, keepdim=True)
        inner = bounded_normalisation(centred, math.sqrt(dim * module.eps))
        return module(x_BND), lambda r: gain * inner(r)

    return layer


def center_norm(module: CenterNorm) -> Layer:
    """Return the exact norm of the affine map diag(gamma) d / (d - 1) (I - 1 1^T / d).

    Proof: docs/proofs.md#center-norm.
    """
    gamma = module.weight.detach().double()
    eye = torch.eye(len(gamma), dtype=gamma.dtype, device=gamma.device)
    norm = sigma_upper(gamma[:, None] * module.gain * (eye - 1 / len(gamma)))

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        if x.shape[-1] != module.dim:
            raise NoRule(module, f"its {module.dim} weights would be broadcast over {x.shape[-1]} channels")
        return module(x), lambda r: norm * r

    return layer


def layer_norm_shapes(module: nn.LayerNorm) -> Shapes:
    """Return the shapes of gamma and b."""
    return dict.fromkeys(("weight", "bias"), tuple(module.normalized_shape))


def center_norm_shapes(module: CenterNorm) -> Shapes:
    """Return the shapes of gamma and beta."""
    return dict.fromkeys(("weight", "bias"), (module.dim,))


# second order ---------------------------------------------------------------------------------------------------------


def normalisation_remainder(rt_BN: Tensor, radius: float) -> Bound:
    """Return c(r) of each token, (..., B) -> (..., B, N); see `smooth_expansion`."""

    def of_token(r: Tensor) -> Tensor:
        r_B1 = r.unsqueeze(-1)
        x = (r_B1 / rt_BN).clamp(max=1)
        near = radius / math.sqrt(3) * x.square() / (1 - x)
        return torch.minimum(near, 0.42932510 / radius * r_B1.square())

    return of_token


def smooth_expansion(u_BND: Tensor, radius: float) -> Expansion:
    """Expand N_R around u. One token leaves its linearisation by at most c(r).

        c(r) = min( R / sqrt3  x^2 / (1 - x),  0.42932510 r^2 / R ),      x = r / rt,  rt^2 = ||u||^2 + R^2.

    N_R(u) is R times v -> v / ||v|| at v = (u, R), without its last coordinate. The second derivative of the latter has
    norm 2 / (sqrt3 ||v||^2), and ||v + t G|| >= rt (1 - t x) on the way, int_0^1 (1 - t) x^2 / (1 - t x)^2 dt = -x -
    log(1 - x) <= x^2 / (2 (1 - x)). The second bound is half the largest second derivative of N_R anywhere, at ||u|| =
    R / 2. c(r) / r^2 is nondecreasing, so tokens join by the maximum. J = R / rt (I - u u^T / rt^2).
    docs/proofs.md#bounded-normalisation.
    """
    rt_BN1 = (u_BND.square().sum(-1, keepdim=True) + radius**2).sqrt()
    rt_BN = rt_BN1.flatten(1)

    of_token = normalisation_remainder(rt_BN, radius)

    def remainder(g: Tensor) -> Bound:
        g_CBN = length(g).flatten(2)
        whole_CB = length(g_CBN)
        return lambda r: torch.minimum(product(g_CBN, of_token(r)).amax(-1), product(whole_CB, r))

    def times_j(g: Tensor) -> Tensor:
        """Return J g; J is symmetric."""
        return radius / rt_BN1 * (g - u_BND * ((u_BND * g).sum(-1, keepdim=True) / rt_BN1.square()))

    return Expansion(
        y=u_BND * (radius / rt_BN1),
        gain_B=radius / rt_BN.amin(1),
        beta=lambda r: torch.minimum(of_token(r).amax(-1), r),
        remainder=remainder,
        pull=times_j,
        own_push=times_j,
        rounding_B=4 * gamma_k(u_BND.shape[-1] + 16) * radius / rt_BN.amin(1),
        forms=BoundedForms(u_BND, radius),
    )


def smooth_project_expansion(module: SmoothProject) -> Expand:
    """Expand the bounded normalisation itself."""
    return lambda x: replace(smooth_expansion(x, module.radius), y=module(x))


def layer_norm_expansion(module: nn.LayerNorm) -> Expand:
    """Expand gamma / sqrt(eps_ln) N_R(u) + b with u = x - mean(x), R^2 = d eps_ln: N_R between two linear maps.

    Its R(G) has mean 0 like u, so only g minus its mean matters: g_core = (gamma g - mean(gamma g)) / sqrt(eps_ln).
    """
    (dim,) = module.normalized_shape
    gamma = torch.ones(dim) if module.weight is None else module.weight.detach()
    scale = 1 / math.sqrt(module.eps)
    outer, terms = scale * float(gamma.abs().max()), gamma_k(dim + 16)

    def expand(x: Tensor) -> Expansion:
        u, radius = _centred(x), math.sqrt(dim * module.eps)
        core = smooth_expansion(u, radius)

        def outwards(v: Tensor) -> Tensor:
            return scale * gamma.to(v) * v

        def inwards(g: Tensor) -> Tensor:
            return _centred(outwards(g))

        return Expansion(
            y=module(x),
            gain_B=outer * core.gain_B,
            beta=lambda r: outer * core.beta(r),
            remainder=lambda g: core.remainder(inwards(g)),
            pull=lambda g: core.pull(inwards(g)),
            own_push=lambda v: outwards(core.push(_centred(v))),
            rounding_B=16 * terms * outer * core.gain_B,
            forms=BoundedForms(u, radius, _centred, lambda r: outwards(_centred(r)), inwards, 4 * terms * outer),
        )

    return expand


def _centred(v: Tensor) -> Tensor:
    return v - v.mean(-1, keepdim=True)


def layer_project_expansion(module: LayerProject) -> Expand:
    """Expand the projection. One token leaves its linearisation by at most q(r) + (r - k)_+.

    Here k = |rho - R| is the distance to the sphere (x = r / rho):

        rho <= R                q = 0
        rho > R, r <= k         q = R x^2 / (sqrt3 (1 - x)),  and no second term
        rho > R, r > k          q = r^2 / (sqrt3 R)

    On the way x + t G the Jacobian is I inside the ball; outside it turns with second derivative 2 R / (sqrt3 ||y||^2)
    at y, and it jumps by the normal's n n^T at the sphere. Entering at t_1 and leaving at t_2, the jumps sum to at most
    (1 - t_1) ||G|| <= r - k. q(r) / r^2 is nondecreasing: tokens join by the maximum. The second term grows linearly,
    and there the maximum over tokens would be false: `hinges` shares r among them. docs/proofs.md#layer-project.
    """
    radius = module.radius

    def expand(x: Tensor) -> Expansion:
        rho_BN = torch.linalg.vector_norm(x, dim=-1).flatten(1)
        k_BN = (rho_BN - radius).abs()
        outside_BN = rho_BN > radius

        def smooth(r: Tensor) -> Tensor:
            r_B1 = r.unsqueeze(-1)
            clear = radius * (r_B1 / rho_BN).square() / (math.sqrt(3) * (1 - r_B1 / rho_BN))
            q = torch.where(r_B1 <= k_BN, clear, r_B1.square() / (math.sqrt(3) * radius))
            return torch.where(outside_BN, q, torch.zeros_like(q))

        def remainder(g: Tensor) -> Bound:
            g_CBN = length(g).flatten(2)
            whole_CB = length(g_CBN)

            def bound(r: Tensor) -> Tensor:
                finite = r.clamp(max=FAR).expand(torch.broadcast_shapes(r.shape, whole_CB.shape))
                square = finite.square()[..., None]
                q_CBN = g_CBN * smooth(finite)
                reach, v, k = torch.broadcast_tensors(finite[..., None], g_CBN, k_BN)
                v, k, reach = v.unsqueeze(-2), k.unsqueeze(-2), reach.unsqueeze(-2)
                shared = hinges(v, k, reach, finite, lambda c: (q_CBN + square * c.squeeze(-2)).amax(-1))
                return torch.minimum(torch.where(r > FAR, torch.inf, shared), product(whole_CB, r))

            return bound

        def beta(r: Tensor) -> Tensor:
            """Bound ||R||. Here (q(r) + (r - k)_+) / r is nondecreasing, so the maximum over tokens is sound."""
            token = smooth(r) + (r.unsqueeze(-1) - k_BN).clamp_min(0)
            return torch.minimum(token.amax(-1), r)

        def times_j(g: Tensor) -> Tensor:
            """Return J g; J is symmetric."""
            rho = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            n = x / rho.clamp_min(radius)
            return torch.where(rho > radius, radius / rho * (g - n * (n * g).sum(-1, keepdim=True)), g)

        gain_B = (radius / rho_BN).clamp(max=1).amax(1)
        rounding_B = 4 * gamma_k(x.shape[-1] + 16) * gain_B
        forms = ProjectForms(x, radius)
        return Expansion(
            y=module(x),
            gain_B=gain_B,
            beta=beta,
            remainder=remainder,
            pull=times_j,
            own_push=times_j,
            rounding_B=rounding_B,
            forms=forms,
        )

    return expand


# rounding of the served types -----------------------------------------------------------------------------------------


def projection_rounding(module: LayerProject | SmoothProject, precision: Precision) -> Rounding:
    """Bound a 1-Lipschitz map: x times a factor from sums of squares, without cancellation. Relative errors add up."""
    layer = layer_of(module, local=True)

    def around(x: Tensor) -> Rounded:
        y, radius = layer(x)
        x_B, most = size(x), module.radius * math.sqrt(x[0].numel() / x.shape[-1])
        share = precision.gamma(x.shape[-1] + 8) + 8 * precision.u

        def error(r: Tensor, e: Tensor) -> Tensor:
            all_B = x_B + r + e
            return in_range(all_B, (e + share * all_B.clamp(max=1.01 * most)) * OUT + TINY, ROOT)

        return Rounded(y, radius, error)

    return around


def layer_norm_rounding(module: nn.LayerNorm, precision: Precision) -> Rounding:
    """Bound gamma sqrt(d) c / t + beta, c = x - mean, t^2 = |c|^2 + d eps >= low^2 on the ball.

    ||D|| <= gamma sqrt(d) / low. The variance is off by gamma_{2d+10} |x|^2 / d at most (even as a difference of
    moments), so t is off by a share rho; mean and difference are off by gamma_{d+6} 2 |x|.
    """
    layer, (dim,) = layer_of(module, local=True), module.normalized_shape
    gain = math.sqrt(dim) * (1.0 if module.weight is None else float(module.weight.detach().abs().max()))
    beta = 0.0 if module.bias is None else float(torch.linalg.vector_norm(module.bias.detach()))
    u = precision.u

    def around(x_BND: Tensor) -> Rounded:
        y, radius = layer(x_BND)
        length_BN = torch.linalg.vector_norm(x_BND, dim=-1).flatten(1)
        t_BN = ((x_BND - x_BND.mean(-1, keepdim=True)).square().sum(-1).flatten(1) + dim * module.eps).sqrt()
        floor = math.sqrt(dim * module.eps)

        def error(r: Tensor, e: Tensor) -> Tensor:
            """Return the error; every token may have all of r and e."""
            reach = (r + e).unsqueeze(-1)
            low_BN = (t_BN - reach).clamp_min(floor)
            share_BN = (length_BN + reach) / low_BN  # |x| / t
            rho_BN = precision.gamma(2 * dim + 10) * share_BN.square() + TINY / low_BN.square()
            rho_BN = torch.where(rho_BN <= 0.3, rho_BN + 4 * precision.sums, math.inf)
            own_BN = rho_BN + 2 * (1 + rho_BN) * precision.gamma(dim + 6) * share_BN + 4 * u
            own_B = torch.linalg.vector_norm(gain * own_BN + 4 * u * beta, dim=-1)
            error_B = (gain * e / low_BN.amin(-1) + own_B) * OUT + TINY
            return in_range(length_BN.amax(-1) + r + e, error_B, ROOT)

        return Rounded(y, radius, error)

    return around


def center_norm_rounding(module: CenterNorm, precision: Precision) -> Rounding:
    """Bound the centred token, two factors of which one is a rounded number, and a sum."""
    scale, bias = module.weight.detach().double() * module.gain, module.bias.detach().double()
    return composed([centred(precision), factors(scale, 3, precision), plus(lambda x: x + bias, precision)])


register(
    nn.LayerNorm,
    ModuleRules(
        rule=layer_norm, expansion=layer_norm_expansion, rounding=layer_norm_rounding, shapes=layer_norm_shapes
    ),
)
register(
    SmoothProject, ModuleRules(rule=smooth_project, expansion=smooth_project_expansion, rounding=projection_rounding)
)
register(LayerProject, ModuleRules(rule=layer_project, expansion=layer_project_expansion, rounding=projection_rounding))
register(
    CenterNorm,
    ModuleRules(rule=center_norm, expansion=affine, rounding=center_norm_rounding, shapes=center_norm_shapes),
)
