"""Maximum Singular Value Penalization (SpecFormer, paper 000, eq. 14).

    L_msvp = sum_{l,h} lambda_q sigma(W_Q^{l,h})^2 + lambda_k sigma(W_K^{l,h})^2 + lambda_v sigma(W_V^{l,h})^2

Heads are the OUTPUT rows of the stored weights (trap D13). One power iteration a step for all layers and heads at
once; its vectors are buffers of the attention modules, so they are in every checkpoint and a resumed run continues
with the same ones. The penalty reads the modules; `forward` knows nothing of it.
"""

from collections import defaultdict
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from zoo.spectral import power_step


@runtime_checkable
class HasHeads(Protocol):
    """What an attention module offers to the penalty."""

    power_3HD: Tensor

    def head_weights_3HOD(self) -> Tensor: ...


def msvp(model: nn.Module, lambda_q: float, lambda_k: float, lambda_v: float) -> Tensor:
    """Eq. 14 for all attention layers of `model`: a scalar, differentiable in the weights (float32).

    The vectors move on by one iteration when gradients are enabled, so call it once an optimiser step. sigma is an
    estimate from below and never enters a certificate.
    """
    groups: dict[torch.Size, list[HasHeads]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, HasHeads):
            groups[module.power_3HD.shape].append(module)
    if not groups:
        raise ValueError("the model has no attention with heads to penalise")
    terms = [_sum_of_squares(layers) for layers in groups.values()]
    total_3 = torch.stack(terms).sum(0)
    return (total_3 * total_3.new_tensor((lambda_q, lambda_k, lambda_v))).sum()


def _sum_of_squares(layers: list[HasHeads]) -> Tensor:
    """sum_{l,h} sigma^2 of Q, K and V for layers of one shape: -> (3,)."""
    weight_L3HOD = torch.stack([layer.head_weights_3HOD().float() for layer in layers])
    power_L3HD = torch.stack([layer.power_3HD.float() for layer in layers])
    sigma_L3H, power_L3HD = power_step(weight_L3HOD, power_L3HD)
    if torch.is_grad_enabled():
        for layer, power_3HD in zip(layers, power_L3HD, strict=True):
            layer.power_3HD.copy_(power_3HD)
    return sigma_L3H.square().sum((0, 2))
