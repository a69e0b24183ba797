"""Maximum Singular Value Penalization (SpecFormer, eq. 14).

    L_msvp = sum_{l,h} lambda_q sigma(W_Q^{l,h})^2 + lambda_k sigma(W_K^{l,h})^2 + lambda_v sigma(W_V^{l,h})^2

and, beyond the paper, lambda_o sigma(W_O^l)^2 + lambda_mlp ( sigma(W_1^l)^2 + sigma(W_2^l)^2 ) for layers l.

Heads are the OUTPUT rows of the stored weights (docs/references.md#erratum-specformer-heads). Each step runs one power
iteration for all layers and heads at once. Its vectors are buffers of the modules that own the weights, so they are in
every checkpoint, and a resumed run continues with the same ones. The penalty reads the modules; `forward` does not
depend on it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from zoo.spectral import power_step, settled


@runtime_checkable
class HasSpectralTerms(Protocol):
    """A module with weights for the penalty.

    For each weight it yields the branch ('q', 'k', 'v', 'o', 'mlp'), the weights of its heads (H, O, D) and the vectors
    of their power iteration (H, D).
    """

    def spectral_terms(self) -> Iterable[tuple[str, Tensor, Tensor]]: ...


def msvp(
    model: nn.Module,
    lambda_q: float,
    lambda_k: float,
    lambda_v: float,
    lambda_o: float = 0.0,
    lambda_mlp: float = 0.0,
) -> Tensor:
    """Return eq. 14 over all attention layers of `model`: a scalar, differentiable in the weights (float32).

    A branch with lambda 0 is not computed. With gradients enabled, a call advances the vectors by one iteration, so
    call it once per optimiser step. sigma is an estimate from below and never enters a certificate. Where W_K = W_Q
    (tied L2 attention) lambda_q weights both. Raises ValueError for a negative lambda and for a model without such
    weights.

    Proof: docs/proofs.md#msvp.
    """
    lambdas = {"q": lambda_q, "k": lambda_k, "v": lambda_v, "o": lambda_o, "mlp": lambda_mlp}
    if negative := [branch for branch, value in lambdas.items() if value < 0]:
        raise ValueError(f"lambda_{negative[0]} is {lambdas[negative[0]]}; set it to 0 (off) or more")
    if not any(lambdas.values()):
        return torch.zeros((), device=next(model.parameters()).device)
    groups: dict[torch.Size, list[tuple[float, Tensor, Tensor]]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, HasSpectralTerms):
            for branch, weight_HOD, power_HD in module.spectral_terms():
                if lambdas[branch]:
                    groups[weight_HOD.shape].append((lambdas[branch], weight_HOD, power_HD))
    if not groups:
        raise ValueError("the model has no weights of the branches to penalise")
    return torch.stack([_weighted_squares(terms) for terms in groups.values()]).sum()


@torch.no_grad()
def settle_(model: nn.Module) -> None:
    """Run power iterations before the first step, whose penalty would otherwise be that of random vectors."""
    for module in model.modules():
        if isinstance(module, HasSpectralTerms):
            for _, weight_HOD, power_HD in module.spectral_terms():
                power_HD.copy_(settled(weight_HOD, power_HD))


def _weighted_squares(terms: list[tuple[float, Tensor, Tensor]]) -> Tensor:
    """Return sum_k lambda_k sum_h sigma^2 over K weights of one shape, in one batch."""
    lambda_K = torch.tensor([weight for weight, _, _ in terms])
    weight_KHOD = torch.stack([weight_HOD.float() for _, weight_HOD, _ in terms])
    power_KHD = torch.stack([power_HD.float() for _, _, power_HD in terms])
    sigma_KH, power_KHD = power_step(weight_KHOD, power_KHD)
    if torch.is_grad_enabled():
        for (_, _, power_HD), moved_HD in zip(terms, power_KHD, strict=True):
            power_HD.copy_(moved_HD)
    # A blocking copy would wait for all pending work of the GPU.
    return (sigma_KH.square().sum(1) * lambda_K.to(sigma_KH, non_blocking=True)).sum()


def name_of(lambdas: Mapping[str, object]) -> str:
    """Return 'msvp' if any lambda of a configuration is above zero, else 'none'."""
    return "msvp" if any(value for value in lambdas.values() if isinstance(value, int | float)) else "none"
