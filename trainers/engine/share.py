"""One rank's share of the training state, under names that depend on neither the ranks nor the ZeRO stage.

    piece     entries start .. start + size of one parameter, which this rank's optimiser updates
    stage 0   every parameter, whole, on every rank
    stage 1-2 parameters lie one after another in flat tensors; each rank has a part
    stage 3   each rank has a part of every parameter

A piece lies at `offset` of `flat`, the float32 tensor that the optimiser updates; its momenta lie in tensors of the
same shape. This file knows DeepSpeed's attribute names, so that no other file needs to; it does not import DeepSpeed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainers.engine.optimizers import kept_of

WEIGHT = "weight"


@dataclass(frozen=True)
class Piece:
    """Entries [start, start + size) of the flattened parameter `name`."""

    name: str
    start: int
    size: int
    flat: Tensor
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of the piece in a tensor shaped as `flat`."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.size)


class Share:
    """The pieces of this rank.

    `sizes` holds the number of entries of every parameter of the model, `keys` the names of the state kept for it.

    Args:
        optimizer: the plain one at stage 0, DeepSpeed's wrapper at other stages.
    """

    def __init__(self, module: nn.Module, optimizer: Any, stage: int, rank: int) -> None:
        named: dict[str, Any] = dict(module.named_parameters())  # DeepSpeed adds attributes
        self.pieces = [piece for piece in _pieces(named, optimizer, stage, rank) if piece.size > 0]
        self.sizes = {name: getattr(value, "ds_numel", value.numel()) for name, value in named.items()}
        persistent = module.state_dict().keys()
        self.buffers = {name: value for name, value in module.named_buffers() if name in persistent}
        # At stage 0 all ranks have the same state, and the first one writes it.
        self.written = self.pieces if stage > 0 or rank == 0 else []
        self._optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        flats = {piece.name: piece.flat for piece in self.pieces}
        self.keys = {name: (WEIGHT, *kept_of(self._optimizer, flats.get(name))) for name in self.sizes}

    def part(self, piece: Piece, key: str) -> Tensor:
        """Return a view of a piece of the weights, or of one momentum."""
        return piece.of(piece.flat if key == WEIGHT else self._optimizer.state[piece.flat][key])

    def begin(self, step: int) -> None:
        """Create zero momenta, as of an optimiser that has made `step` steps: torch creates them at its first step."""
        fused = self._optimizer.defaults.get("fused")
        for flat in {id(piece.flat): piece.flat for piece in self.pieces}.values():
            state: dict[str, Tensor] = {key: torch.zeros_like(flat) for key in kept_of(self._optimizer, flat)}
            if "exp_avg" in state:
                state["step"] = torch.tensor(float(step), device=flat.device if fused else None)
            self._optimizer.state[flat] = state


def _pieces(named: dict[str, Any], optimizer: Any, stage: int, rank: int) -> Iterator[Piece]:
    for name, parameter in named.items():
        if stage == 0:
            yield Piece(name, 0, parameter.numel(), parameter, 0)
        elif stage < 3:
            yield from _of_a_group(name, parameter, optimizer)
        else:
            group, offset, count = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = rank * count
            size = min(count, parameter.ds_numel - start)  # the last part is padded
            yield Piece(name, start, size, optimizer.fp32_partitioned_groups_flat[group], offset)


def _of_a_group(name: str, parameter: Any, optimizer: Any) -> Iterator[Piece]:
    found = parameter._hp_mapping
    if found is not None:  # this rank has it, or a part of it
        flat = optimizer.single_partition_of_fp32_groups[found.param_group_index]
        own, inside = found.hp_fragment_address, found.lp_fragment_address
        yield Piece(name, inside.start, own.numel, flat, own.start)
