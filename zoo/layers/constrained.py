"""Linear layers with ||W||_2 <= 1 by construction, as torch parametrisations of `weight`.

    aol         W diag(t)^{-1/2},  t_i = sum_j |W^T W|_ij       (almost orthogonal: Prach and Lampert 2022, Theorem 1)
    orthogonal  the Cayley transform of a skew matrix           (torch.nn.utils.parametrizations.orthogonal)
    cap         W min(1, 1 / sigma(W))                          (zoo/layers/cap.py)

A convolution with stride = kernel size is the matrix (out, rest) on its patches. The equations hold in exact
arithmetic; folded float32 weights exceed 1 by rounding (about 4e-7 for Cayley), and the cap's sigma is an estimate. No
certificate therefore trusts a constraint: rules measure the folded weight with `sigma_upper`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from certizoo.nearest import unknown
from zoo.bounds.rule_table import ModuleRules, register
from zoo.layers.cap import cap_


class AOL(nn.Module):
    """W (out, ...) -> W diag(t)^{-1/2}, or the same of W^T where W is wide. Orthogonal rows stay orthogonal.

    Proof: diag(t) - W^T W is symmetric and diagonally dominant, hence W^T W <= diag(t).

    Proof: docs/proofs.md#constrained-layers.
    """

    def forward(self, weight: Tensor) -> Tensor:
        w = weight.flatten(1)
        wide = w.shape[0] < w.shape[1]
        tall = w.mT if wide else w
        t = (tall.mT @ tall).abs().sum(0)
        # An all-zero column has t = 0 and stays zero; a larger t only shrinks it.
        tall = tall * t.clamp_min(1e-12).rsqrt()
        return (tall.mT if wide else tall).reshape(weight.shape)


class _Reshape(nn.Module):
    """A matrix in the shape of a convolution's weight."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(self.shape)


for _kind in (AOL, _Reshape):  # certified models are folded
    register(_kind, ModuleRules())


def _aol_(module: nn.Module) -> None:
    nn.init.orthogonal_(module.get_parameter("weight"))
    parametrize.register_parametrization(module, "weight", AOL())


def _orthogonal_(module: nn.Module) -> None:
    """Constrain by the Cayley transform, the fastest of torch's maps.

    It runs without trivialisation, which cannot be set up on the meta device. It starts from the transform of a random
    skew matrix with eigenvalues up to 2i in modulus.
    """
    weight = module.get_parameter("weight")
    shape, matrix = weight.shape, weight.detach().flatten(1)
    nn.init.normal_(matrix, std=max(matrix.shape) ** -0.5)
    module.register_parameter("weight", nn.Parameter(matrix))
    parametrizations.orthogonal(module, "weight", orthogonal_map="cayley", use_trivialization=False)
    if matrix.shape != shape:
        parametrize.register_parametrization(module, "weight", _Reshape(shape), unsafe=True)  # it changes the shape


CONSTRAINTS: dict[str, Callable[[nn.Module], None]] = {
    "aol": _aol_,
    "orthogonal": _orthogonal_,
    "cap": lambda module: cap_(module, [1.0]),
}


def constrain_(module: nn.Module, kind: str) -> None:
    """Keep ||module.weight|| <= 1 from now on, starting orthogonal or nearly so: 'aol', 'orthogonal' or 'cap'."""
    if kind not in CONSTRAINTS:
        raise unknown("constraint", kind, CONSTRAINTS)
    CONSTRAINTS[kind](module)
