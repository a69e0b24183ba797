"""The bounds of a program on sets of images: every result that enters a relaxation, then any functionals of the end.

Functionals go backwards through the enclosures of all steps until they are linear in the image, where

    min over |x' - x| <= r of  <a, x'>  =  <a, x> - <|a|, r>        (a box, such as a ball in Linf)
    min over ||x' - x||_2 <= eps of  <a, x'>  =  <a, x> - eps ||a||_2.

A result's box is the intersection of the box that its step makes of the boxes before it, and of these bounds. They
are computed for the entries that a relaxation needs.

Letters: B images, R functionals of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from certify.linear.enclosures.forms import Form
from certify.linear.enclosures.steps import TINY, Box, Free, Relaxed, inner
from certify.linear.program import Program
from certify.shared.ball import LINF, Ball
from zoo.arithmetic import OUT, U, broadcast_batch, gamma, length, nan_to_inf

ENTRIES = 2**20  # of one tensor of functionals, so that it stays in the cache
GPU = 64  # times as many on a GPU


@dataclass
class Bounds:
    """The boxes and enclosures of a program on sets of images, as far as they are known.

    The first box contains the images, (B, 1, C, H, W). With `eps_B`, they are the balls in L2 around x.
    """

    program: Program
    boxes: list[Box]
    relaxed: list[Relaxed]
    x: Tensor
    eps_B: Tensor | None = None

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
    ) -> "Bounds":
        """Bound every result of the program on boxes of images, or on balls in L2 around x within them."""
        found = Bounds(program, [images], [], images.centre if x is None else x, eps_B)
        bounded: dict[int, Tensor] = {}
        for step in program.steps:
            formed = step.formed(images.lower[0].numel(), *(found.boxes[k] for k in step.inputs))
            if formed is not None and found.boxes[formed[0]].form is None:
                found._form(*formed)
            for k in step.inputs:
                found._tighten(k, step.needs(found.boxes[k]), bounded)
            given = [found.boxes[k] for k in step.inputs]
            found.relaxed.append(step.relaxed(*given))
            found.boxes.append(step.box(*given))
        return found

    def _tighten(self, number: int, needed: Tensor | None, bounded: dict[int, Tensor]) -> None:
        """Bound the entries of a result that are needed (B, *shape), unless that was done, and those they come from."""
        *chain, base = self.program.chain(number)
        if needed is None or base == 0 or self.program.steps[base - 1].tight or self.boxes[number].form is not None:
            return
        if self.eps_B is not None and (lengths := self.program.lengths(base)) is not None:
            self.boxes[base] = self.boxes[base].meet(self._on_ball(base, lengths, self.eps_B))
            self._along(chain)
            return
        open_ = needed.any(0, keepdim=True)
        for k in chain:
            open_ = self.relaxed[k - 1].back(open_.to(self.x).unsqueeze(1)).parts[0].squeeze(1) != 0
        done = bounded.setdefault(base, torch.zeros_like(open_))
        entries = (open_ & ~done).flatten().nonzero().flatten()
        if len(entries):
            bounded[base] = done | open_
            self.boxes[base] = self.boxes[base].meet(self.box(base, entries))
            self._along(chain)

    def _along(self, chain: Sequence[int]) -> None:
        """Make the boxes of a chain smaller, its last result first, by that of its base."""
        for k in reversed(chain):
            step = self.program.steps[k - 1]
            self.boxes[k] = self.boxes[k].meet(step.box(*(self.boxes[j] for j in step.inputs)))

    def _on_ball(self, number: int, lengths: Tensor, eps_B: Tensor) -> Box:
        """Return the box of an affine function of the image on the balls in L2, which backward bounds would find."""
        at = Box(self.x, self.x)
        for k in self.program.path(number):
            at = self.program.steps[k - 1].box(at)
        reach = broadcast_batch(eps_B, lengths.shape) * lengths * OUT
        off = 4 * U * (at.size + reach)
        return Box(at.lower - reach - off, at.upper + reach + off)

    def _form(self, number: int, pays_B: Tensor) -> None:
        """Bound a result by linear functions of the image, and make its box smaller by them."""
        shape, size = self.boxes[number].lower.shape[1:], self.boxes[number].lower[0].numel()
        identity = torch.eye(size, dtype=self.x.dtype, device=self.x.device).view(1, size, *shape)
        parts = [self._forms(number, part) for part in identity.split(self._few(number), 1)]
        low, high, rest_low, rest_high, slope = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        open_B1 = ~pays_B.unsqueeze(1)
        rest_low = rest_low.masked_fill(open_B1, -torch.inf).view(-1, *shape)
        rest_high = rest_high.masked_fill(open_B1, torch.inf).view(-1, *shape)
        form = Form(slope.view(len(slope), *shape, -1), rest_low, rest_high, self.eps_B is not None)
        found = Box(low.view(-1, *shape), high.view(-1, *shape), form)
        self.boxes[number] = self.boxes[number].meet(found)

    def _forms(self, number: int, rows: Tensor) -> tuple[Tensor, ...]:
        rows = rows.expand(len(self.x), *rows.shape[1:])
        lower, upper = (self._to_image(number, sign * rows) for sign in (1, -1))
        slope = (lower[0] - upper[0]) / 2
        low, rest_low = self._least(*lower), self._least(*lower, slope)
        high, rest_high = -self._least(*upper), -self._least(*upper, -slope)
        scale = self._reach if self.eps_B is None else self.eps_B.view(-1, *(1,) * (self.x.ndim - 1))
        return low, high, rest_low, rest_high, (slope * scale.unsqueeze(1)).flatten(2)

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
        return Box(ends[0], ends[1])

    def lower(self, number: int, rows: Tensor) -> Tensor:
        """Return a lower bound of the functionals (B, R, *shape) of a result: (B, R), -inf where there is none."""
        return torch.cat([self.free_lower(number, part) for part in rows.split(self._few(number), 1)], 1)

    def _few(self, number: int) -> int:
        widest = max(box.lower[0].numel() for box in self.boxes[: number + 1])
        return max(1, (GPU if self.x.is_cuda else 1) * ENTRIES // (widest * len(self.x)))

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
        a, const, rounding = self._to_image(number, rows, free, added, seen)
        if seen is not None and 0 in seen:
            seen[0] = a.detach()
        return self._least(a, const, rounding)

    def _to_image(
        self,
        number: int,
        rows: Tensor,
        free: dict[int, Free] | None = None,
        added: dict[int, Tensor] | None = None,
        seen: dict[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the functionals of the image, constants and rounding."""
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
            functionals[0] = rows.new_zeros(*rows.shape[:2], *self.x.shape[1:])
        return functionals[0], const, rounding

    def worst(self, a: Tensor) -> Tensor:
        """Return the image (B, 1, C, H, W) where a functional (B, 1, C, H, W) is least, about."""
        if self.eps_B is None:
            return self.x - self._reach * a.sign()
        return self.x - a * (self.eps_B / length(a.flatten(1)).clamp_min(TINY)).view(-1, *(1,) * (a.ndim - 1))

    @property
    def _reach(self) -> Tensor:
        box = self.boxes[0]
        return torch.maximum(box.upper - self.x, self.x - box.lower) * (1 + 4 * U)

    def _least(self, a: Tensor, const: Tensor, rounding: Tensor, less: Tensor | None = None) -> Tensor:
        """Return the least values on the images, of <a, x'> + const - <less, x' - x>."""
        moved = a if less is None else a - less
        fall = inner(moved.abs(), self._reach) if self.eps_B is None else length(moved.flatten(2)) * self.eps_B[:, None]
        sum_1 = torch.linalg.vector_norm(a.flatten(2), 1, -1)
        off = gamma(self.x[0].numel() + 16) * (sum_1 * self.x.flatten(1).abs().amax(1, keepdim=True) + fall)
        least = inner(a, self.x) + const - (fall + rounding + off + 4 * U * const.abs()) * OUT
        return -nan_to_inf(-least)


def lowest(bounds: Bounds, rows_BRJ: Tensor) -> Tensor:
    """Return lower bounds of functionals of the logits: (B, R)."""
    result = bounds.program.result
    assert result is not None
    return bounds.lower(result.number, rows_BRJ.view(*rows_BRJ.shape[:2], *result.shape))
