"""The bounds of a program on balls of images: every result that enters a relaxation, then any functionals of the end.

Functionals go backwards through the enclosures of all steps until they are linear in the image, where

    min over ||x' - x||_p <= eps of  <a, x'>  =  <a, x> - eps ||a||_q,      1/p + 1/q = 1.

A result's box is the intersection of the box that its step makes of the boxes before it, and of these bounds. They
are computed for the entries that a relaxation needs.

Letters: B images, R functionals of each.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from certify.linear.program import Program
from certify.linear.steps import Box, Relaxed, inner
from certify.shared.ball import LINF, Ball
from zoo.arithmetic import OUT, U, gamma, nan_to_inf
from zoo.arithmetic import length as length_2

ENTRIES = 2**20  # of one tensor of functionals, so that it stays in the cache


@dataclass
class Bounds:
    """The boxes and enclosures of a program, as far as they are known, on balls of radius eps around images."""

    program: Program
    x: Tensor  # (B, 1, C, H, W)
    eps_B: Tensor
    ball: Ball
    boxes: list[Box]
    relaxed: list[Relaxed]

    @staticmethod
    def on(program: Program, x: Tensor, eps_B: Tensor, ball: Ball) -> "Bounds":
        """Bound every result of the program."""
        reach = (eps_B * (1 + 4 * U)).view(-1, 1, 1, 1, 1)
        off = 2 * U * (x.abs() + reach)
        found = Bounds(program, x, eps_B, ball, [Box(x - reach - off, x + reach + off)], [])
        bounded: dict[int, Tensor] = {}
        for step in program.steps:
            for k in step.inputs:
                found._tighten(k, step.needs(found.boxes[k]), bounded)
            given = [found.boxes[k] for k in step.inputs]
            found.relaxed.append(step.relaxed(*given))
            found.boxes.append(step.box(*given))
        return found

    def _tighten(self, number: int, needed: Tensor | None, bounded: dict[int, Tensor]) -> None:
        """Bound the entries of a result that are needed (B, *shape), unless that was done, and those they come from."""
        *chain, base = self.program.chain(number)
        if needed is None or base == 0 or self.program.steps[base - 1].tight:
            return
        open_ = needed.any(0, keepdim=True)
        for k in chain:
            open_ = self.relaxed[k - 1].back(open_.to(self.x).unsqueeze(1)).parts[0].squeeze(1) != 0
        done = bounded.setdefault(base, torch.zeros_like(open_))
        entries = (open_ & ~done).flatten().nonzero().flatten()
        if len(entries):
            bounded[base] = done | open_
            self.boxes[base] = self.boxes[base].meet(self.box(base, entries))
            for k in reversed(chain):
                self.boxes[k] = self.program.steps[k - 1].box(
                    *(self.boxes[j] for j in self.program.steps[k - 1].inputs)
                )

    def box(self, number: int, entries_R: Tensor) -> Box:
        """Bound some entries of a result from the image: (B, *shape), NaN for others."""
        shape = self.boxes[number].lower.shape[1:]
        size, count = shape.numel(), len(self.x)
        rows = torch.zeros(len(entries_R), size, dtype=self.x.dtype, device=self.x.device)
        rows = rows.scatter_(1, entries_R[:, None], 1.0).view(1, -1, *shape).expand(count, -1, *shape)
        ends = []
        for sign in (1, -1):
            end = torch.full((count, size), torch.nan, dtype=self.x.dtype, device=self.x.device)
            end[:, entries_R] = sign * self.lower(number, sign * rows)
            ends.append(end.view(count, *shape))
        return Box(*ends)

    def lower(self, number: int, rows: Tensor) -> Tensor:
        """Return a lower bound of the functionals (B, R, *shape) of a result: (B, R), -inf where there is none."""
        widest = max(box.lower[0].numel() for box in self.boxes[: number + 1])
        few = max(1, ENTRIES // (widest * len(self.x)))
        return torch.cat([self._lower(number, part) for part in rows.split(few, 1)], 1)

    def _lower(self, number: int, rows: Tensor) -> Tensor:
        functionals = {number: rows}
        const = rows.new_zeros(rows.shape[:2])
        rounding = rows.new_zeros(rows.shape[:2])
        for k in range(number, 0, -1):
            if k not in functionals:
                continue
            a = functionals.pop(k)
            found = self.relaxed[k - 1].back(a)
            const = const + found.const
            rounding = rounding + found.rounding + 2 * U * const.abs()
            for source, part in zip(self.program.steps[k - 1].inputs, found.parts, strict=True):
                if source in functionals:
                    part = functionals[source] + part
                    rounding = rounding + 2 * U * inner(part.abs(), self.boxes[source].size)
                functionals[source] = part
        if 0 not in functionals:
            return -nan_to_inf(-(const - rounding * OUT))
        return self._on_ball(functionals[0], const, rounding)

    def _on_ball(self, a: Tensor, const: Tensor, rounding: Tensor) -> Tensor:
        """Return the least values on the balls."""
        length = torch.linalg.vector_norm(a.flatten(2), 1, -1)
        fall = length if self.ball.norm == LINF else length_2(a.flatten(2))
        fall = fall * self.eps_B[:, None]
        off = gamma(self.x[0].numel() + 16) * (length * self.x.flatten(1).abs().amax(1, keepdim=True) + fall)
        least = inner(a, self.x) + const - (fall + rounding + off + 4 * U * const.abs()) * OUT
        return -nan_to_inf(-least)


def lowest(bounds: Bounds, rows_BRJ: Tensor) -> Tensor:
    """Return lower bounds of functionals of the logits: (B, R)."""
    result = bounds.program.result
    assert result is not None
    return bounds.lower(result.number, rows_BRJ.view(*rows_BRJ.shape[:2], *result.shape))
