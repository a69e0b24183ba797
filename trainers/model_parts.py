"""The parts of a model that options of a training speak of: blocks, attention, weights to penalise."""

from collections.abc import Collection

import torch
from torch import nn

import zoo


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What is gathered, and recomputed, as one: everything in a container that is called `blocks`."""
    return [block for module in model.modules() for block in getattr(module, "blocks", ())]


def attentions_of(model: nn.Module) -> list[nn.Module]:
    """The attention of every block."""
    return [module for name, module in model.named_modules() if name.endswith(".attn")]


@torch.no_grad()  # or reading a capped weight would move its power iteration on
def owners_of(model: nn.Module, branches: Collection[str]) -> tuple[nn.Module, ...]:
    """The modules with weights of one of these branches, those of `zoo.hinge`."""
    wanted = set(branches)
    return tuple(module for module in model.modules() if wanted & {branch for branch, _ in zoo.hinge.weights(module)})
