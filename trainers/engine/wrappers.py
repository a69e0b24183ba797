"""Modules around the model: what the engine calls in its place.

    EngineModel          what DeepSpeed calls the model
        model            at ZeRO stage 3 gathered block by block, as it runs
        gathered[i]      the weights of one module, for a penalty: gathered alone, forward and backward

At stages 0-2 every rank has all weights, and there is no `gathered`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

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
