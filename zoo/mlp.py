"""Token-wise networks: timm's MLP, and two 1-Lipschitz residual layers (SLL, constrained MLP), with their rules."""

from collections.abc import Iterator
from typing import Any

import timm.layers
import torch
from torch import Tensor, nn

from zoo.lipschitz import constrain_
from zoo.rules import Bound, Layer, NoRule, chain, layer_of, rule
from zoo.spectral import start_vectors


class Mlp(timm.layers.Mlp):
    """timm's fc2(act(fc1 x)), with the vectors of the MSVP penalty's power iteration kept beside the weights."""

    power_fc1_1D: Tensor
    power_fc2_1D: Tensor

    def __init__(self, dim: int, hidden: int, **options: Any) -> None:
        super().__init__(dim, hidden, **options)
        self.register_buffer("power_fc1_1D", start_vectors(1, dim))
        self.register_buffer("power_fc2_1D", start_vectors(1, hidden))

    def spectral_terms(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """For `zoo.penalty`."""
        yield "mlp", self.fc1.weight[None], self.power_fc1_1D
        yield "mlp", self.fc2.weight[None], self.power_fc2_1D


class SLL(nn.Module):
    """SDP-based Lipschitz Layer, 1-Lipschitz, residual included:

        y = x - 2 W T^{-1} sigma(W^T x + b),    T_ii = sum_j |W^T W|_ij q_j / q_i.

    W (d, H), b (H,), q = exp(log_q) (H,); x (..., d) -> (..., d). Source: Araujo et al. 2023, Theorem 3. Only
    activations with slopes in [0, 1] keep the promise; GELU does not (trap D14d).
    """

    def __init__(self, dim: int, hidden: int, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.log_q = nn.Parameter(torch.zeros(hidden))
        self.act = act()
        nn.init.xavier_normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        q = self.log_q.exp()
        t = ((self.weight.mT @ self.weight).abs() * q).sum(1) / q
        hidden = self.act(x @ self.weight + self.bias)
        # An all-zero column of W has T_ii = 0 and no effect: the clamp only keeps 0 / 0 out.
        return x - 2 * (hidden / t.clamp_min(1e-12)) @ self.weight.mT


class ConstrainedMlp(nn.Module):
    """An MLP that brings its own residual and is 1-Lipschitz where act has slopes in [0, 1]:

        y = (x + f(x)) / 2,    f(x) = W_2 act(W_1 x + b_1) + b_2,    ||W_1|| <= 1, ||W_2|| <= 1.

    x (..., d) -> (..., d). Args: constraint: how the norms are kept, 'aol', 'orthogonal' or 'cap' (`zoo.lipschitz`).
    """

    def __init__(
        self, dim: int, hidden: int, constraint: str = "aol", act: type[nn.Module] = nn.ReLU, bias: bool = True
    ) -> None:
        super().__init__()
        self.constraint = constraint
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden, bias=bias), act(), nn.Linear(hidden, dim, bias=bias)

    def finish_init(self) -> None:
        """Put the constraints on; called by the model after its weights have their initial values."""
        constrain_(self.fc1, self.constraint)
        constrain_(self.fc2, self.constraint)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.fc2(self.act(self.fc1(x)))) / 2


ONE_LIPSCHITZ_ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid)


@rule(SLL)
def sll(module: SLL) -> Layer:
    """0 <= W T^{-1} W^T <= I (T - W^T W is diagonally dominant after scaling by q), so slopes in [0, 1] give
    ||I - 2 W T^{-1} D W^T|| <= 1. Rounding of T is covered by the certificate's final slack."""
    if type(module.act) not in ONE_LIPSCHITZ_ACTIVATIONS:
        raise NoRule(module, f"SLL is not 1-Lipschitz with {type(module.act).__name__} (slopes leave [0, 1])")
    return lambda x: (module(x), lambda r: r)


@rule(Mlp)
def mlp(module: Mlp) -> Layer:
    """fc2(sigma(fc1 x)): the product of the three constants."""
    parts = (module.fc1, module.act, module.drop1, module.norm, module.fc2, module.drop2)
    return chain(layer_of(part) for part in parts)


@rule(ConstrainedMlp)
def constrained_mlp(module: ConstrainedMlp) -> Layer:
    """(1 + ||W_2|| slope ||W_1||) / 2, measured: the constraints are not trusted."""
    branch = chain(layer_of(part) for part in (module.fc1, module.act, module.fc2))

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        y, bound = branch(x)
        return (x + y) / 2, lambda r: (r + bound(r)) / 2

    return layer
