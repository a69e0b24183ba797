"""Branch and bound over the signs of hidden units (beta-CROWN, Wang et al. 2021).

A unit with z in [l, u], l < 0 < u, is split into z <= 0 and z >= 0, where a ReLU is linear. On a part with sign s of z,

    <a, y>  >=  <a, y> - b s z,      b >= 0,

so that any multipliers b give a bound. A functional is proved to be positive once it is on all parts. Proof:
docs/proofs.md#linear-search.

The bound is the functional's value at the image x* where it is attained, minus what each line leaves there. So units
are tried in the order of what their lines leave at x*. Of a few, the one that raises the bounds of both halves most is
split (filtered smart branching, De Palma et al. 2021).

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
from certify.linear.enclosures.scalars import Elementwise, Lines, Scalar
from certify.linear.enclosures.steps import Box, Free
from certify.linear.tuned import STEPS as STEPS_AT_ROOT
from certify.linear.tuned import ascend, start

TOGETHER = {"cpu": 8, "cuda": 128}  # parts split at once
FEW, HIGHER = 4, 0.1  # units tried for a split, and how much the better half counts
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
            count = min(TOGETHER[self.rows.device.type], len(heap))
            halves = self._split([heapq.heappop(heap)[2] for _ in range(count)])
            for low_R, part in zip(self._bound(halves), halves, strict=True):
                if not bool((low_R > 0).all()):
                    heapq.heappush(heap, (float(low_R.min()), next(order), part))
        return proved_R if heap else torch.ones_like(proved_R)

    def _root(self) -> tuple[Tensor, Part | None]:
        """Return which functionals are proved on the whole set, and that set as a part for the others."""
        bounds, rows, self.parts = self.bounds, self.rows, 1
        free, seen = start(bounds, self.number, 1, rows.shape[1]), dict.fromkeys((0, *self.units.values()), rows)
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
        self._score(bounds, [part], {k: a[:, open_R] for k, a in seen.items()}, low_BR[:, open_R])
        return proved_R, part

    def _score(self, on: Bounds, parts: list[Part], seen: dict[int, Tensor], low_BR: Tensor) -> None:
        """Score units by what their lines leave at the image where the lowest bound is attained."""
        worst_B, all_B = low_BR.argmin(1), torch.arange(len(parts), device=low_BR.device)
        known = self.bounds.program.results(on.worst(seen[0][all_B, worst_B]))
        for j, k in self.units.items():
            free = tuple(
                torch.cat([part.free[k][leaf][:, worst] for part, worst in zip(parts, worst_B[:, None], strict=True)])
                for leaf in range(len(parts[0].free[k]))
            )
            lines = on.relaxed[k - 1]
            assert isinstance(lines, Lines)
            gap = lines.gap(seen[k][all_B, worst_B], known[j], known[k], free)
            for part, gap_ in zip(parts, gap, strict=True):
                part.scores[j] = (gap_ * (part.signs[j][0] == 0)).flatten()

    def _split(self, parts: list[Part]) -> list[Part]:
        """Split each part at the unit, of few with the highest scores, that raises the bounds of both halves most."""
        tried = [[self._halves(part, *unit) for unit in self._highest(part)] or [[part]] for part in parts]
        alone = iter(self._lower([half for pairs in tried for pair in pairs for half in pair]).amin(1).tolist())
        chosen = []
        for pairs in tried:
            worth = [sorted(next(alone) for _ in pair) for pair in pairs]
            chosen += pairs[max(range(len(pairs)), key=lambda n: worth[n][0] + HIGHER * worth[n][-1])]
        return chosen

    def _highest(self, part: Part) -> list[tuple[int, int]]:
        """Return the units with the highest positive scores, as result and place."""
        best = [
            (score, j, place)
            for j in self.units
            for score, place in zip(
                *(t.tolist() for t in part.scores[j].topk(min(FEW, len(part.scores[j])))), strict=True
            )
        ]
        return [(j, place) for score, j, place in sorted(best, reverse=True)[:FEW] if score > 0]

    def _halves(self, part: Part, number: int, unit: int) -> list[Part]:
        return [self._half(part, number, unit, sign) for sign in (-1.0, 1.0)]

    def _half(self, part: Part, number: int, unit: int, sign: float) -> Part:
        signs = dict(part.signs)
        signs[number] = signs[number].clone()
        signs[number].view(-1)[unit] = sign
        return replace(part, signs=signs, scores={})

    def _bound(self, parts: list[Part]) -> Tensor:
        """Return lower bounds of the functionals on parts, and give them their best parameters: (B, R)."""
        on, free, split = self._joined(parts)
        seen = dict.fromkeys((0, *self.units.values()), self.rows)
        low_BR = ascend(on, self.number, self._rows(parts), free, 0.0, STEPS, RATE, split, seen)
        for b, part in enumerate(parts):
            part.multipliers = {j: m[b : b + 1] for j, (_, m) in split.items()}
            part.free = {k: tuple(leaf[b : b + 1] for leaf in leaves) for k, leaves in free.items()}
        self._score(on, parts, seen, low_BR)
        self.parts += len(parts)
        return low_BR

    def _lower(self, parts: list[Part]) -> Tensor:
        """Return lower bounds on parts for the parameters that they have: (B, R)."""
        on, free, split = self._joined(parts)
        added = {j: -sign.unsqueeze(1) * b for j, (sign, b) in split.items()}
        return on.free_lower(self.number, self._rows(parts), free, added)

    def _rows(self, parts: list[Part]) -> Tensor:
        return self.rows.expand(len(parts), *self.rows.shape[1:])

    def _joined(self, parts: list[Part]) -> tuple[Bounds, dict[int, Free], dict[int, tuple[Tensor, Tensor]]]:
        signs = {j: torch.cat([part.signs[j] for part in parts]) for j in self.units}
        split = {j: (signs[j], torch.cat([part.multipliers[j] for part in parts])) for j in self.units}
        free = {
            k: tuple(torch.cat(leaves) for leaves in zip(*(part.free[k] for part in parts), strict=True))
            for k in parts[0].free
        }
        return self._on(signs), free, split

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
