"""The bounds of a program on sets of images: every result that enters a relaxation, then any functionals of the end.

Functionals go backwards through the enclosures of all steps until they are linear in the image, where

    min over |x' - x| <= r of  <a, x'>  =  <a, x> - <|a|, r>        (a box, such as a ball in Linf)
    min over ||x' - x||_2 <= eps of  <a, x'>  =  <a, x> - eps ||a||_2.

A result's box is the intersection of the box that its step makes of the boxes before it, and of these bounds. They
are computed for the entries that a relaxation needs.

Letters: B images, R functionals of each.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from certify.linear.enclosures.steps import Box, Free, Relaxed, inner
from certify.linear.program import Program
from certify.shared.ball import LINF, Ball
from zoo.arithmetic import OUT, U, gamma, length, nan_to_inf

ENTRIES = 2**20  # of one tensor of functionals, so that it stays in the cache


@dataclass
class Bounds:
    """The boxes and enclosures of a program on sets of images, as far as they are known.

    The first box contains the images, (B, 1, C, H, W). With `eps_B`, they are the balls in L2 around x. Entries of
    boxes are bounded by `by`, if it is given, instead of `lower`.
    """

    program: Program
    boxes: list[Box]
    relaxed: list[Relaxed]
    x: Tensor
    eps_B: Tensor | None = None
    by: "Method | None" = None

    @staticmethod
    def on_balls(program: Program, x: Tensor, eps_B: Tensor, ball: Ball) -> "Bounds":
        """Bound every result of the program on balls of radius eps around images."""
        reach = (eps_B * (1 + 4 * U)).view(-1, 1, 1, 1, 1)
        off = 2 * U * (x.abs() + reach)
        return Bounds.on(program, Box(x - reach - off, x + reach + off), x, None if ball.norm == LINF else eps_B)

    @staticmethod
    def on(
        program: Program,
        images: Box,
        x: Tensor | None = None,
        eps_B: Tensor | None = None,
        by: "Method | None" = None,
    ) -> "Bounds":
        """Bound every result of the program on boxes of images, or on balls in L2 around x within them."""
        found = Bounds(program, [images], [], images.centre if x is None else x, eps_B, by)
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
            end[:, entries_R] = sign * (self.by or Bounds.lower)(self, number, sign * rows)
            ends.append(end.view(count, *shape))
        return Box(*ends)

    def lower(self, number: int, rows: Tensor) -> Tensor:
        """Return a lower bound of the functionals (B, R, *shape) of a result: (B, R), -inf where there is none."""
        widest = max(box.lower[0].numel() for box in self.boxes[: number + 1])
        few = max(1, ENTRIES // (widest * len(self.x)))
        return torch.cat([self.free_lower(number, part) for part in rows.split(few, 1)], 1)

    def free_lower(
        self,
        number: int,
        rows: Tensor,
        free: dict[int, Free] | None = None,
        added: dict[int, Tensor] | None = None,
        seen: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Return lower bounds as `lower` does, for more rows or more enclosures than fit into the cache.

        Args:
            number: of the result that is bounded.
            rows: functionals of it (B, R, *shape).
            free: parameters of enclosures by the number of the result.
            added: functionals of results that are nowhere positive on the images.
            seen: receives the functionals of the results that are its keys.
        """
        free, added = free or {}, added or {}
        functionals = {number: rows}
        const = rows.new_zeros(rows.shape[:2])
        rounding = rows.new_zeros(rows.shape[:2])
        for k in range(number, 0, -1):
            if k not in functionals:
                continue
            a = functionals.pop(k)
            if k in added:
                a = a + added[k]
                rounding = rounding + 2 * U * inner(a.abs(), self.boxes[k].size)
            if seen is not None and k in seen:
                seen[k] = a.detach()
            found = self.relaxed[k - 1].back(a, free.get(k, ()))
            const = const + found.const
            rounding = rounding + found.rounding + 2 * U * const.abs()
            for source, part in zip(self.program.steps[k - 1].inputs, found.parts, strict=True):
                if source in functionals:
                    part = functionals[source] + part
                    rounding = rounding + 2 * U * inner(part.abs(), self.boxes[source].size)
                functionals[source] = part
        if 0 not in functionals:
            return -nan_to_inf(-(const - rounding * OUT))
        return self._least(functionals[0], const, rounding)

    def _least(self, a: Tensor, const: Tensor, rounding: Tensor) -> Tensor:
        """Return the least values on the images."""
        box = self.boxes[0]
        reach = torch.maximum(box.upper - self.x, self.x - box.lower) * (1 + 4 * U)
        fall = inner(a.abs(), reach) if self.eps_B is None else length(a.flatten(2)) * self.eps_B[:, None]
        sum_1 = torch.linalg.vector_norm(a.flatten(2), 1, -1)
        off = gamma(self.x[0].numel() + 16) * (sum_1 * self.x.flatten(1).abs().amax(1, keepdim=True) + fall)
        least = inner(a, self.x) + const - (fall + rounding + off + 4 * U * const.abs()) * OUT
        return -nan_to_inf(-least)


Method = Callable[[Bounds, int, Tensor], Tensor]  # bounds, number, rows (B, R, *shape) -> lower bounds (B, R)


def lowest(bounds: Bounds, rows_BRJ: Tensor) -> Tensor:
    """Return lower bounds of functionals of the logits: (B, R)."""
    result = bounds.program.result
    assert result is not None
    return bounds.lower(result.number, rows_BRJ.view(*rows_BRJ.shape[:2], *result.shape))
