"""Modules around the model: what the engine and an attack call in its place.

    EngineModel          what DeepSpeed calls the model
        model            at ZeRO stage 3 gathered block by block, as it runs
        gathered[i]      the weights of one module, for a penalty: gathered alone, forward and backward
    InFloat32            a bfloat16 model as an attack in float32 sees it

At stages 0-2 every rank has all weights, and there is no `gathered`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainers.model_parts import blocks_of


class EngineModel(nn.Module):
    """A forward pass is whatever `measure` does with the model, not only its logits.

    Args: owners: modules of the model whose weights are penalised.
    """

    def __init__(self, model: nn.Module, owners: Sequence[nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.gathered = nn.ModuleList(GatheredWeights(owner) for owner in owners)

    def forward(self, measure: Callable[..., Any], *inputs: Any) -> Any:
        return measure(self.model, *inputs)

    def gathered_around(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """(module, owner): all weights of the owner are gathered while the module runs."""
        yield from ((block, block) for block in blocks_of(self.model))
        yield from ((each, each.owner) for each in self.gathered if isinstance(each, GatheredWeights))


class GatheredWeights(nn.Module):
    """total -> total + measure(owner), a function of the owner's weights alone.

    The owner is the model's: it is kept out of this module's own children, so that no checkpoint has it twice. The
    running total ties the modules of one penalty into a chain: in the backward pass ZeRO-3 gathers where the gradient
    of what came out arrives, and gives back where that of what went in is done.
    """

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self._owner = (owner,)

    @property
    def owner(self) -> nn.Module:
        return self._owner[0]

    def forward(self, total: Tensor, measure: Callable[[nn.Module], Tensor]) -> Tensor:
        return total + measure(self.owner)


def recompute_blocks_(model: nn.Module) -> int:
    """Activation checkpointing: of each block only its input is kept, and the backward pass runs the block once more.
    Returns the number of blocks."""
    blocks = blocks_of(model)
    for block in blocks:
        forward = block.forward
        block.forward = partial(
            checkpoint, forward, use_reentrant=False, context_fn=partial(_seen_twice, block), early_stop=False
        )
    return len(blocks)


def _seen_twice(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the block's first pass and around its second, which must compute the same. Power iterations of caps move
    their vectors in each pass: the second gets a copy of those that the first had, and its own moves are forgotten."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]

    @contextmanager
    def second() -> Iterator[None]:
        for module, name, _, first in buffers:
            setattr(module, name, first)
        try:
            yield
        finally:
            for module, name, now, _ in buffers:
                setattr(module, name, now)

    return nullcontext(), second()


class InFloat32(nn.Module):
    """A model of bfloat16 weights and buffers, computing in float32: for attacks that must not be rounded."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.names = [name for name, tensor in named.items() if tensor.is_floating_point()]
        # In front of the model: an attack gives images the dtype of the first parameter.
        self.wide = nn.ParameterList(named[name].detach().float() for name in self.names)
        self.model = model

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits_BK: Tensor = torch.func.functional_call(
            self.model, dict(zip(self.names, self.wide, strict=True)), (images_BCHW,)
        )
        return logits_BK
