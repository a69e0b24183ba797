"""Parametrised weights (caps, orthogonality) as plain parameters: the same function, with nothing left to compute."""

import copy

import torch
from torch import nn
from torch.nn.utils import parametrize


def folded(model: nn.Module) -> nn.Module:
    """Return a copy of `model` in eval mode without parametrisations. `model` is unchanged.

    Weights are folded in the precision that they are served in.
    """
    copied = copy.deepcopy(model).eval()
    with torch.no_grad():
        for module in list(copied.modules()):
            if parametrize.is_parametrized(module):
                _fold(module)
    return copied


def _fold(module: nn.Module) -> None:
    """Replace parametrised weights by plain parameters.

    torch's own removal edits the class, which a copy shares with the original model, and so breaks the original.
    """
    parametrizations = module.get_submodule("parametrizations")
    values = {name: getattr(module, name).detach() for name, _ in parametrizations.named_children()}
    module.__class__, _ = parametrize.type_before_parametrizations(module), module._modules.pop("parametrizations")
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value))
