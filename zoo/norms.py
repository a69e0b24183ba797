"""Normalisation layers and their sensitivity rules.

Letters: u one token (d,), rho = ||u||, R the radius of the ball, r the radius of the input, N tokens.
All norms act per token. A joint bound over tokens is the maximum of the per-token bounds psi_i(r) because
psi_i(r) / r is nondecreasing (MATH-PROOFS.md section 1, tokenwise lemma).
"""

import math

import torch
from torch import Tensor, nn

from certizoo import UserError
from zoo.rules import Bound, Layer, rule, scaled
from zoo.spectral import sigma_upper


class LayerProject(nn.Module):
    """LayerProject(x, R) = x R / max(||x||_2, R) per token: projection on the ball of radius R, 1-Lipschitz.

    Source: eq. 29 of "Fine-grained Local Sensitivity Analysis" (LoFAST), R = sqrt(d) there for the MLP, 1 in front of
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
    """N_R(x) = x / sqrt(1 + ||x||_2^2 / R^2) per token: the smooth sister of `LayerProject`, 1-Lipschitz.

    Source: MATH.md section 2 ("bounded normalisation"). x (..., d) -> (..., d), ||N_R(x)|| < R.
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
            raise UserError(f"CenterNorm needs 2 channels or more, got {dim}; take another norm")
        self.gain = dim / (dim - 1)
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (self.gain * (x - x.mean(-1, keepdim=True))) + self.bias

    def extra_repr(self) -> str:
        return f"{len(self.weight)}"


def _chord(t: Tensor) -> Tensor:
    """2 sin(theta / 2) for theta = arcsin t, t in [0, 1]: t sqrt(2 / (1 + sqrt(1 - t^2)))."""
    return t * (2 / (1 + (1 - t.square()).clamp_min(0).sqrt())).sqrt()


def _max_over_tokens(bound_BN: Tensor, r: Tensor) -> Tensor:
    return torch.minimum(bound_BN.amax(-1), r)


@rule(LayerProject)
def layer_project(module: LayerProject) -> Layer:
    """Projection on a convex set never expands: r. Where the whole ball of x stays outside the sphere
    (rho - r >= R) both images lie on it, at an angle of at most arcsin(r / rho): R chord(r / rho)."""

    def layer(x_BND: Tensor) -> tuple[Tensor, Bound]:
        rho_BN = torch.linalg.vector_norm(x_BND, dim=-1).flatten(1)

        def bound(r: Tensor) -> Tensor:
            r_B1 = r.unsqueeze(-1)
            on_sphere = rho_BN - r_B1 >= module.radius * (1 + 1e-12)
            t = (r_B1 / rho_BN).clamp(0, 1)
            return _max_over_tokens(torch.where(on_sphere, module.radius * _chord(t), r_B1), r)

        return module(x_BND), bound

    return layer


def _bounded_normalisation(u_BND: Tensor, radius: float) -> Bound:
    """N_R(u) = R (first d coordinates of (u, R) / ||(u, R)||). With rt^2 = ||u||^2 + R^2 and x = r / rt the two unit
    vectors lie at an angle of at most arcsin x: min(r, R chord(x)) for x < 1, and 2 R x beyond."""
    rt_BN = (u_BND.square().sum(-1) + radius**2).sqrt().flatten(1)

    def bound(r: Tensor) -> Tensor:
        r_B1 = r.unsqueeze(-1)
        x = r_B1 / rt_BN
        far = torch.where(torch.isfinite(x), 2 * radius * x, torch.full_like(x, math.inf))
        return _max_over_tokens(torch.where(x < 1, radius * _chord(x.clamp(max=1)), far), r)

    return bound


@rule(SmoothProject)
def smooth_project(module: SmoothProject) -> Layer:
    """MATH.md section 2, lip of the bounded normalisation."""
    return lambda x: (module(x), _bounded_normalisation(x, module.radius))


@rule(nn.LayerNorm)
def layer_norm(module: nn.LayerNorm) -> Layer:
    """LayerNorm is local-Lipschitz: with u = x - mean(x) (a projection) and R^2 = d eps_ln it is
    gamma / sqrt(eps_ln) N_R(u) + b, so the bound is max|gamma| / sqrt(eps_ln) times that of N_R."""
    (dim,) = module.normalized_shape
    gamma = 1.0 if module.weight is None else float(module.weight.abs().max())
    gain = gamma / math.sqrt(module.eps)

    def layer(x_BND: Tensor) -> tuple[Tensor, Bound]:
        centred = x_BND - x_BND.mean(-1, keepdim=True)
        inner = _bounded_normalisation(centred, math.sqrt(dim * module.eps))
        return module(x_BND), lambda r: gain * inner(r)

    return layer


@rule(CenterNorm)
def center_norm(module: CenterNorm) -> Layer:
    """Affine: the norm of diag(gamma) d / (d - 1) (I - 1 1^T / d), exact."""
    gamma = module.weight.detach().double()
    eye = torch.eye(len(gamma), dtype=gamma.dtype, device=gamma.device)
    return scaled(module, sigma_upper(gamma[:, None] * module.gain * (eye - 1 / len(gamma))))
