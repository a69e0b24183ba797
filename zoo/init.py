"""Initial values of a model's weights."""

from typing import Protocol, runtime_checkable

from timm.layers import trunc_normal_
from torch import nn


@runtime_checkable
class FinishesInit(Protocol):
    """A module with starting values or constraints of its own, put on after the model's default initialisation."""

    def finish_init(self) -> None: ...


def trunc_normal_init_(model: nn.Module) -> None:
    """timm's default for transformers: linear weights truncated normal with 0.02, biases zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def finish_init_(model: nn.Module) -> None:
    """Let every part finish its own initialisation, outermost first."""
    for module in list(model.modules()):
        if isinstance(module, FinishesInit):
            module.finish_init()
