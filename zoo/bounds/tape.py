"""The modules of a chain as a flat list, those inside residual branches too; vectors are pushed and pulled through.

    FORK  leaf  leaf  JOIN  leaf ...          a residual sum x + f_2(f_1(x)), then f_3
    FORK  leaf  SWAP  leaf  JOIN              a sum f_1(x) + f_2(x)

FORK keeps the vector, SWAP exchanges it with the kept one, JOIN adds both. A leaf is an expansion without parts; its
index on the tape is its name. Remainders enter at the outputs of leaves: B r where the leaf has forms, R itself where
it has none.

Letters: B images, C vectors of each.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from zoo.bounds.contracts import Expansion

Mark = Literal["FORK", "SWAP", "JOIN"]
Vectors = dict[int, Tensor]  # one (C, B, ...) a leaf
Visit = Callable[[int, Tensor], Tensor | None]


class Tape:
    """The flat list of expansions around one clean batch."""

    def __init__(self, chain: Sequence[Expansion]) -> None:
        laid_out = [_laid_out(expansion) for expansion in chain]
        self._ops = [op for ops in laid_out for op in ops]
        self.leaves = {at: op for at, op in enumerate(self._ops) if isinstance(op, Expansion)}
        ends = list(accumulate(map(len, laid_out)))
        self.of_nodes = [
            [at for at in self.leaves if end - len(ops) <= at < end] for ops, end in zip(laid_out, ends, strict=True)
        ]
        self.nonlinear = [at for at, leaf in self.leaves.items() if not leaf.affine]
        self.gains = [dict(_gains(ops, end - len(ops))) for ops, end in zip(laid_out, ends, strict=True)]

    @property
    def ends_in_sum(self) -> bool:
        """True if a residual sum follows the last leaf."""
        return self._ops[-1] == "JOIN"

    def push(self, v: Tensor, visit: Visit, last: int) -> None:
        """Push v (C, B, *image) from the image to the input of the leaf `last`.

        At every leaf on the way, `visit` gets the vector at the input, and returns what is added at the output, or
        None.
        """
        skips = list[Tensor]()
        for at, op in enumerate(self._ops[: last + 1]):
            if op == "FORK":
                skips.append(v)
            elif op == "SWAP":
                v, skips[-1] = skips[-1], v
            elif op == "JOIN":
                v = v + skips.pop()
            else:
                entering = visit(at, v)
                if at < last:
                    v = op.push(v)
                    v = v if entering is None else v + entering

    def pull(
        self,
        g: Tensor | None,
        joining: Mapping[int, Tensor],
        kept: Collection[int],
        visit: Callable[[int, Tensor], None] | None = None,
        end: int = -1,
    ) -> tuple[Tensor, Vectors]:
        """Pull vectors back: the transpose of `push`.

        Args:
            g: (C, B, *y), the vector at the end, if any.
            joining: vectors that join at the inputs of leaves.
            kept: leaves at whose outputs the vector is kept.
            visit: called with the vector at the output of every leaf.
            end: the leaf at whose output the pull ends; by default it goes on to the image.

        Returns:
            The vector that arrives at the image or at `end`, and those at the outputs of `kept`, where there is one.
        """
        skips, seen = list[Tensor | None](), Vectors()
        for at in range(len(self._ops) - 1, -1, -1):
            op = self._ops[at]
            if op == "JOIN":
                skips.append(g)
            elif op == "SWAP":
                g, skips[-1] = skips[-1], g
            elif op == "FORK":
                g = _sum(g, skips.pop())
            else:
                if g is not None:
                    if at in kept:
                        seen[at] = g
                    if visit is not None:
                        visit(at, g)
                    if at == end:
                        break
                    g = op.pull(g)
                if at in joining:
                    g = _sum(g, joining[at])
        assert g is not None
        for at in kept:  # a leaf of the other branch of a sum
            if at not in seen and at < max(joining, default=-1):
                seen[at] = g.new_zeros(len(g), *self.leaves[at].y.shape)
        return g, seen

    def gain_between(self, one: int, other: int) -> Tensor:
        """Return how much longer a vector at the output of one leaf can be at the input of another: (B,).

        The leaves in between are affine; the result is infinite where there is a sum.
        """
        gain_B = torch.ones_like(self.leaves[one].gain_B)
        for op in self._ops[one + 1 : other]:
            if op != "FORK":
                gain_B = gain_B * (op.gain_B if isinstance(op, Expansion) else torch.inf)
        return gain_B

    def spread(self, r: Tensor, at: int) -> Tensor:
        """Return B r of a leaf."""
        forms = self.leaves[at].forms
        return r if forms is None else forms.spread(r)

    def collected(self, seen: Mapping[int, Tensor], at: int) -> Tensor:
        """Return B^T g of a leaf."""
        forms = self.leaves[at].forms
        return seen[at] if forms is None else forms.collect(seen[at])

    @cached_property
    def rooms(self) -> dict[int, torch.Size]:
        """The shape of the remainder r of one image, for every nonlinear leaf."""
        return {at: self.collected({at: self.leaves[at].y[None]}, at).shape[2:] for at in self.nonlinear}


def _gains(ops: Sequence[Expansion | Mark], start: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the leaves of a node that only affine leaves precede, each with a gain.

    The gain bounds how much longer the input of the leaf can be than the input of the node.
    """
    gain_B = next(torch.ones_like(op.gain_B) for op in ops if isinstance(op, Expansion))
    for at, op in enumerate(ops, start):
        if op in ("SWAP", "JOIN"):
            return
        if isinstance(op, Expansion):
            yield at, gain_B
            if not op.affine:
                return
            gain_B = gain_B * op.gain_B


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def _laid_out(expansion: Expansion) -> list[Expansion | Mark]:
    if expansion.branches:
        first, second = ([op for part in branch for op in _laid_out(part)] for branch in expansion.branches)
        swap: list[Mark] = ["SWAP"] if first and second else []
        return ["FORK", *first, *swap, *second, "JOIN"]
    return [op for part in expansion.parts for op in _laid_out(part)] or [expansion]
