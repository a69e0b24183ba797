"""Modules around the model that the engine calls in its place.

    EngineModel          the module that DeepSpeed receives
        model            gathered block by block at ZeRO stage 3, as it runs
        gathered[i]      the weights of one module, for a penalty: gathered separately, forward and backward

At stages 0-2 every rank has all weights, and `gathered` does not exist.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from trainers.model_parts import blocks_of
from zoo.layers.block import recomputed


class EngineModel(nn.Module):
    """A module whose forward pass runs any function `measure` of the model, not only its logits.

    Args:
        owners: modules of the model whose weights are penalised.
    """

    def __init__(self, model: nn.Module, owners: Sequence[nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.gathered = nn.ModuleList(GatheredWeights(owner) for owner in owners)

    def forward(self, measure: Callable[..., Any], *inputs: Any) -> Any:
        return measure(self.model, *inputs)

    def gathered_around(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Iterate over (module, owner): all weights of the owner are gathered while the module runs."""
        yield from ((block, block) for block in blocks_of(self.model))
        yield from ((each, each.owner) for each in self.gathered if isinstance(each, GatheredWeights))


class GatheredWeights(nn.Module):
    """total -> total + measure(owner), where measure depends on the owner's weights only.

    The owner belongs to the model and is not registered as a child here, so that no checkpoint contains it twice. The
    running total chains the modules of one penalty: in the backward pass ZeRO-3 gathers weights when the gradient of an
    output arrives, and frees them when the gradient of the input is done.
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
    """Enable activation checkpointing and return the number of blocks.

    Only the input of each block is kept, and the backward pass runs the block once more.
    """
    blocks = blocks_of(model)
    for block in blocks:
        block.forward = recomputed(block, block.forward)
    return len(blocks)
