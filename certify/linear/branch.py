"""Branch and bound over the signs of hidden units (beta-CROWN, Wang et al. 2021).

A unit with z in [l, u], l < 0 < u, is split into z <= 0 and z >= 0, where a ReLU is linear. On a part with sign s of z,

    <a, y>  >=  <a, y> - b s z,      b >= 0,

so that any multipliers b give a bound. A functional is proved to be positive once it is on all parts. Proof:
docs/proofs.md#linear-search.

Letters: B parts, R functionals. Results are known by their numbers.
"""

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certify.linear.backward import Bounds
from certify.linear.enclosures.scalars import Elementwise, Scalar
from certify.linear.enclosures.steps import Box, Free
from certify.linear.tuned import STEPS as STEPS_AT_ROOT
from certify.linear.tuned import ascend, start

TOGETHER = 16  # parts bounded at once
STEPS, RATE = 12, 0.03  # of the ascent on a part, from the parameters of the part that it was split from


@dataclass
class Part:
    """A part of the images: signs (1, *shape), multipliers (1, R, *shape), parameters, and scores (units,)."""

    signs: dict[int, Tensor]
    multipliers: dict[int, Tensor]
    free: dict[int, Free]
    scores: dict[int, Tensor]


class Search:
    """The search for a proof that functionals (R, J) of the logits are positive on the images of `bounds`, one set."""

    def __init__(self, bounds: Bounds, rows_RJ: Tensor) -> None:
        result = bounds.program.result
        assert result is not None
        self.bounds, self.number, self.parts = bounds, result.number, 0
        self.rows = rows_RJ.view(1, -1, *result.shape)
        self.units = {
            step.inputs[0]: k
            for k, step in enumerate(bounds.program.steps, 1)
            if isinstance(step, Elementwise) and isinstance(step.f, Scalar) and 0.0 in step.f.kinks
        }

    @torch.no_grad()
    def run(self, until: float, clock: Callable[[], float] = time.monotonic) -> Tensor:
        """Return which functionals are proved (R,) when all are, or at `until` by `clock`."""
        proved_R, root = self._root()
        open_R = (~proved_R).nonzero().flatten()
        if root is None or not self.units:
            return proved_R
        self.rows = self.rows[:, open_R]
        order = itertools.count()
        heap = [(0.0, next(order), root)]
        while heap and clock() < until:
            halves = list[Part]()
            while heap and len(halves) < TOGETHER:
                halves += self._halves(heapq.heappop(heap)[2])
            for low_R, part in zip(self._bound(halves), halves, strict=True):
                if not bool((low_R > 0).all()):
                    heapq.heappush(heap, (float(low_R.min()), next(order), part))
        return proved_R if heap else torch.ones_like(proved_R)

    def _root(self) -> tuple[Tensor, Part | None]:
        """Return which functionals are proved on the whole set, and that set as a part for the others."""
        bounds, rows, self.parts = self.bounds, self.rows, 1
        free, seen = start(bounds, self.number, 1, rows.shape[1]), dict.fromkeys(self.units.values(), rows)
        low_BR = torch.maximum(
            bounds.lower(self.number, rows), ascend(bounds, self.number, rows, free, 0.0, STEPS_AT_ROOT, seen=seen)
        )
        proved_R = low_BR[0] > 0
        if bool(proved_R.all()):
            return proved_R, None
        open_R = (~proved_R).nonzero().flatten()
        kept = {k: tuple(leaf[:, open_R] for leaf in leaves) for k, leaves in free.items()}
        shapes = {j: bounds.boxes[j].lower for j in self.units}
        part = Part(
            {j: torch.zeros_like(like) for j, like in shapes.items()},
            {j: like.new_zeros(1, len(open_R), *like.shape[1:]) for j, like in shapes.items()},
            kept,
            {},
        )
        self._score([part], {k: a[:, open_R] for k, a in seen.items()}, low_BR[:, open_R])
        return proved_R, part

    def _score(self, parts: list[Part], seen: dict[int, Tensor], low_BR: Tensor) -> None:
        """Score units by what the triangle of a ReLU leaves, at the functional with the lowest bound."""
        for b, part in enumerate(parts):
            worst = int(low_BR[b].argmin())
            for j, k in self.units.items():
                box = self.bounds.boxes[j]
                fall, rise = (-box.lower[0]).clamp(min=0), box.upper[0].clamp(min=0)
                gap = (fall * rise / (fall + rise)).nan_to_num(0.0)
                part.scores[j] = (seen[k][b, worst].abs() * gap * (part.signs[j][0] == 0)).flatten()

    def _halves(self, part: Part) -> list[Part]:
        """Split the unit with the highest score; a part without such a unit is left to further ascent."""
        best = max(part.scores, key=lambda j: float(part.scores[j].max()))
        if not float(part.scores[best].max()) > 0:
            return [part]
        unit = int(part.scores[best].argmax())
        return [self._half(part, best, unit, sign) for sign in (-1.0, 1.0)]

    def _half(self, part: Part, number: int, unit: int, sign: float) -> Part:
        signs = dict(part.signs)
        signs[number] = signs[number].clone()
        signs[number].view(-1)[unit] = sign
        return replace(part, signs=signs, scores={})

    def _bound(self, parts: list[Part]) -> Tensor:
        """Return lower bounds of the functionals on parts, and give them their best parameters: (B, R)."""
        signs = {j: torch.cat([part.signs[j] for part in parts]) for j in self.units}
        split = {j: (signs[j], torch.cat([part.multipliers[j] for part in parts])) for j in self.units}
        free = {
            k: tuple(torch.cat(leaves) for leaves in zip(*(part.free[k] for part in parts), strict=True))
            for k in parts[0].free
        }
        seen = dict.fromkeys(self.units.values(), self.rows)
        rows = self.rows.expand(len(parts), *self.rows.shape[1:])
        low_BR = ascend(self._on(signs), self.number, rows, free, 0.0, STEPS, RATE, split, seen)
        for b, part in enumerate(parts):
            part.multipliers = {j: m[b : b + 1] for j, (_, m) in split.items()}
            part.free = {k: tuple(leaf[b : b + 1] for leaf in leaves) for k, leaves in free.items()}
        self._score(parts, seen, low_BR)
        self.parts += len(parts)
        return low_BR

    def _on(self, signs: dict[int, Tensor]) -> Bounds:
        """Return the bounds on parts: units with a known sign are enclosed on their half."""
        boxes, relaxed = list(self.bounds.boxes), list(self.bounds.relaxed)
        for j, k in self.units.items():
            box, sign = boxes[j], signs[j]
            lower = torch.where(sign > 0, box.lower.clamp(min=0), box.lower)
            upper = torch.where(sign < 0, box.upper.clamp(max=0), box.upper)
            boxes[j] = Box(torch.minimum(lower, upper), upper)
            relaxed[k - 1] = self.bounds.program.steps[k - 1].relaxed(boxes[j])
        return replace(self.bounds, boxes=boxes, relaxed=relaxed)
