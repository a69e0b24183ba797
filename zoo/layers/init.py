"""Initial values of a model's weights."""

from typing import Protocol, runtime_checkable

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from zoo.spectral import sigma_upper


@runtime_checkable
class FinishesInit(Protocol):
    """A module with its own starting values or constraints, applied after the model's default initialisation."""

    def finish_init(self) -> None: ...


def trunc_normal_init_(model: nn.Module) -> None:
    """Apply timm's default for transformers: linear weights truncated normal with 0.02, biases zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def spectral_init_(model: nn.Module) -> None:
    """Apply LipsFormer's spectral initialisation (SpecFormer, eq. 43), biases zero.

        W = X / sigma_max(X),   X Xavier normal; W_Q, W_K, W_V as one matrix, convolutions as (out, rest).

    ||W|| <= 1 holds for the stored weights: rounding W to units of u moves it by at most u ||W||_F.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            nn.init.xavier_normal_(module.weight)
            _divide_by_norm_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _divide_by_norm_(weight: Tensor) -> None:
    if weight.is_meta:  # shapes only
        return
    matrix = weight.detach().double().flatten(1)
    rounding = torch.finfo(weight.dtype).eps * min(matrix.shape) ** 0.5  # >= u ||W||_F / ||W||
    with torch.no_grad():
        weight.copy_((matrix / (sigma_upper(matrix) * (1 + rounding))).view_as(weight))


def orthogonal_init_(model: nn.Module) -> None:
    """Apply CertViT's initialisation (released code): orthonormal rows or columns, biases zero.

    Convolutions are treated as (out, rest).
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            nn.init.orthogonal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def finish_init_(model: nn.Module) -> None:
    """Let every part finish its own initialisation, outermost first."""
    for module in list(model.modules()):
        if isinstance(module, FinishesInit):
            module.finish_init()
