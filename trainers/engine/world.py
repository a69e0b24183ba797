"""The ranks of a run and their collective operations; `engine.start` creates it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad


@dataclass(frozen=True)
class World:
    """The ranks of this run and their collective operations. All ranks must call every method."""

    rank: int
    size: int
    device: torch.device

    def sums(self, values: Tensor) -> Tensor:
        """Sum over ranks elementwise; a value that is not finite on one rank is not finite on all."""
        values = values.to(self.device, torch.float64)
        dist.all_reduce(values)
        return values

    def means(self, terms: Mapping[str, Tensor | float]) -> dict[str, float]:
        """Average named numbers over ranks; the names must be the same on every rank."""
        mine = torch.stack(
            [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in terms.values()]
        )
        return dict(zip(terms, (self.sums(mine) / self.size).tolist(), strict=True))

    def same_buffers(self, module: nn.Module) -> None:
        """Copy rank 0's buffers to every rank.

        Batch statistics differ by rank, and a checkpoint keeps only rank 0's.
        """
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        if self.size == 1 or not buffers:
            return
        together = torch.cat([buffer.detach().double().flatten() for buffer in buffers])
        dist.broadcast(together, src=0)
        parts = together.split([buffer.numel() for buffer in buffers])
        with torch.no_grad():
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))

    def texts(self, own: str) -> list[str]:
        """Return every rank's text in rank order. Sent as bytes: nothing from another rank is unpickled."""
        sent = torch.frombuffer(bytearray(own.encode() + b"\n"), dtype=torch.uint8).to(self.device)
        sizes = self.sums(one_hot(torch.tensor(self.rank), self.size) * len(sent)).long().tolist()
        received = [torch.empty(max(sizes), dtype=torch.uint8, device=self.device) for _ in range(self.size)]
        dist.all_gather(received, pad(sent, (0, max(sizes) - len(sent))))
        return [bytes(text[: size - 1].tolist()).decode() for text, size in zip(received, sizes, strict=True)]

    def barrier(self) -> None:
        dist.barrier()
