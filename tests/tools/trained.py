"""A training without DeepSpeed: the parts of an engine that checkpoints use, in one process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainers.engine.share import Share


class Alone:
    """A world of one rank."""

    rank, size = 0, 1

    def sums(self, values: Tensor) -> Tensor:
        return values

    def texts(self, own: str) -> list[str]:
        return [own]

    def barrier(self) -> None:
        pass


class Trained:
    """A model of two parameters and buffers with its optimiser; every step is the same."""

    world = Alone()

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), fused=True)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.module(torch.linspace(-1, 1, 12).view(4, 3)).exp().sum().backward()
        self.optimizer.step()

    def share(self) -> Share:
        return Share(self.module, self.optimizer, 0, 0)

    @contextmanager
    def restoring(self) -> Iterator[Share]:
        with torch.no_grad():
            yield self.share()
