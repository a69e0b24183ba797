"""The parts of a model that training options name: blocks, attention, weights to penalise."""

from collections.abc import Collection

import torch
from torch import nn

import zoo


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the units of gathering and recomputation: every module in a container called `blocks`."""
    return [block for module in model.modules() for block in getattr(module, "blocks", ())]


def attentions_of(model: nn.Module) -> list[nn.Module]:
    """Return the attention of every block."""
    return [module for name, module in model.named_modules() if name.endswith(".attn")]


@torch.no_grad()  # reading a capped weight would advance its power iteration
def owners_of(model: nn.Module, branches: Collection[str]) -> tuple[nn.Module, ...]:
    """Return the modules with weights of one of these branches, as `zoo.hinge` names them."""
    wanted = set(branches)
    return tuple(module for module in model.modules() if wanted & {branch for branch, _ in zoo.hinge.weights(module)})
