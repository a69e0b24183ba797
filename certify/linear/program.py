"""A program: operations on one image, in order, as steps that have linear bounds (capture.py writes it)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from certify.linear.enclosures.steps import Affine, Pull, Shape, Step, gathered, transposed
from zoo.arithmetic import OUT, gamma, length

TOGETHER = 2**20  # entries of rows computed at once


@dataclass(frozen=True)
class Ref:
    """The result of a step, by number; 0 is the image."""

    number: int
    shape: Shape


class Lacking(Exception):
    """An operation has no linear bounds; the message says which."""


@dataclass
class Program:
    """Steps in order; step k computes result k + 1."""

    image: Ref
    device: torch.device
    steps: list[Step] = field(default_factory=list)
    result: Ref | None = None
    _lengths: dict[int, Tensor | None] = field(default_factory=dict)

    def zeros(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(tuple(shape), dtype=torch.float64, device=self.device)

    def add(self, step: Step) -> Ref:
        self.steps.append(step)
        return Ref(len(self.steps), step.shape)

    def results(self, x: Tensor) -> list[Tensor]:
        """Return all results for images (B, 1, C, H, W), by number."""
        known = [x]
        for step in self.steps:
            known.append(step.value(*(known[k] for k in step.inputs)))
        return known

    def values(self, x: Tensor) -> Tensor:
        """Return the logits of images (B, 1, C, H, W): (B, J)."""
        assert self.result is not None
        return self.results(x)[self.result.number].flatten(1)

    def base(self, number: int) -> int:
        """Return the result that this one rearranges, scales and shifts: its box gives this one's exactly."""
        while number and isinstance(step := self.steps[number - 1], Affine) and step.entrywise:
            (number,) = step.inputs
        return number

    def maker(self, ref: Ref) -> Step | None:
        """Return the step whose result this is, rearranged or not; None for the image."""
        number = self.base(ref.number)
        return self.steps[number - 1] if number else None

    def lengths(self, number: int) -> Tensor | None:
        """Bound how much a unit step of the image in L2 moves each entry of a result, (*shape).

        None if the result is not an affine function of the image, made step by step from one input each. What torch
        computes of a row of J = J_k ... J_1 is off by at most gamma |J_k| ... |J_1|, whose rows are no longer than the
        sums of their entries.
        """
        if number not in self._lengths:
            self._lengths[number] = self._measured(number)
        return self._lengths[number]

    def path(self, number: int) -> list[int]:
        """Return the results from the image to this one if each is an affine function of the one before it, else []."""
        found = list[int]()
        while number:
            step = self.steps[number - 1]
            if not isinstance(step, Affine) or len(step.inputs) != 1:
                return []
            found.append(number)
            (number,) = step.inputs
        return found[::-1]

    def _measured(self, number: int) -> Tensor | None:
        path = [step for k in self.path(number) if isinstance(step := self.steps[k - 1], Affine)]
        if not path:
            return None
        shape, sums, terms = path[-1].shape, self.zeros(self.image.shape) + 1, sum(step.terms + 8 for step in path)
        for step in path:
            sums = step.absolute(sums).abs()  # a step that moves entries keeps its constants
        found, count = list[Tensor](), math.prod(shape)
        few = max(1, TOGETHER // max(count, math.prod(self.image.shape)))
        for some in torch.arange(count, device=sums.device).split(few):
            rows = nn.functional.one_hot(some, count).to(sums).view(-1, *shape)
            for step in reversed(path):
                (rows,) = step.pull(rows)
            found.append(length(rows.flatten(1)))
        return (torch.cat(found) + gamma(2 * terms) * sums.flatten()).view(shape) * OUT

    def chain(self, number: int) -> list[int]:
        """Return the results from this one back to its base, which comes last."""
        found, base = [number], self.base(number)
        while found[-1] != base:
            found.append(self.steps[found[-1] - 1].inputs[0])
        return found


def affine(
    program: Program,
    refs: Sequence[Ref],
    apply: Callable[..., Tensor],
    absolute: Callable[..., Tensor] | None = None,
    terms: int = 0,
    offset: Tensor | None = None,
    moves: bool = False,
    entrywise: bool = False,
    pull: Pull | None = None,
) -> Ref:
    """Add an affine step; its shape is that of `apply` on zeros."""
    zeros = [program.zeros(ref.shape) for ref in refs]
    y = apply(*zeros)
    if moves and len(refs) == 1 and pull is None and offset is None:
        pull = gathered(apply, zeros[0])
    return program.add(
        Affine(
            inputs=tuple(ref.number for ref in refs),
            shape=tuple(y.shape),
            apply=apply,
            absolute=absolute or apply,
            terms=terms,
            offset=None if offset is None else offset.abs().expand(y.shape),
            pull=pull or transposed(apply, zeros),
            moves=moves,
            entrywise=entrywise or (moves and len(refs) == 1),
            constant=None if offset is None else y,
        )
    )
