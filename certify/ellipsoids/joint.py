"""The maps M_i of ellipsoid.py, all at once: u = (G / E, r_k / W_k, d_n / w_n) pushed through the tape, and back.

Letters: B images, C vectors of each.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.arithmetic import broadcast_batch
from zoo.bounds.contracts import QuadraticForm
from zoo.bounds.tape import Tape, Vectors

IMAGE, NOISE = -1, -2  # sources besides the nonlinear leaves

Sizes = dict[int, Tensor]  # leaf -> (B,)


@dataclass(frozen=True)
class Scale:
    """A diagonal matrix that multiplies u: its entries (C, B, n), the largest of them, and that of the noise (C, B)."""

    entries: Tensor
    most: Tensor
    noise: Tensor


@dataclass(frozen=True)
class Noise:
    """The errors that enter at the outputs of leaves: w_n (B,) of every leaf.

    `lengths` are approximately |M_i| of the inputs of all leaves.
    """

    weights: Sizes
    lengths: Sizes

    @staticmethod
    def of(defects: Sizes, theta_B: Tensor, floors: Sizes, lengths: Sizes) -> "Noise":
        """Return w_n above these floors, for defects (B,) of approximately these lengths.

        The w_n are so large that theta_0 is approximately `theta_B`.
        """
        scale_B, weights = (len(defects) / theta_B).sqrt(), dict(floors)
        for at, defect_B in defects.items():
            weight_B = (scale_B * defect_B).nan_to_num(1.0, 1.0)
            weights[at] = torch.hypot(weight_B, floors[at]) if at in floors else weight_B
        return Noise(weights, lengths)


class Joint:
    """The map u -> H_i for all leaves at once: weighted sources pushed through the tape. u is flat, (C, B, n)."""

    def __init__(
        self, tape: Tape, images_BCHW: Tensor, most_B: Tensor, weights: Mapping[int, Tensor], noise: Noise
    ) -> None:
        self.tape, self.images, self.most_B = tape, images_BCHW, most_B
        self.weights, self.noise, self.ones_B = weights, noise, torch.ones_like(most_B)

    @property
    def _image(self) -> torch.Size:
        return self.images.shape[1:]

    def sources(self, last: int) -> list[int]:
        """Return the leaves whose remainders move the input of leaf `last`."""
        return [k for k in self.weights if k < last]

    def room(self, last: int) -> int:
        """Return the number of entries of u that reach leaf `last`."""
        return sum(self._sizes(last))

    def part(self, source: int, last: int) -> Tensor:
        """Return the mask (n,) of the entries of u that belong to a source: IMAGE, NOISE, or a leaf."""
        names = [IMAGE, *self.sources(last), *(NOISE for _ in self._ends(last))]
        parts = zip(names, self._sizes(last), strict=True)
        return torch.cat([self.ones_B.new_full((size,), float(name == source)) for name, size in parts])

    def only(self, sources: Collection[int], last: int, like: Tensor) -> Scale:
        """Return the scale (C, B, n) that keeps these parts of u, with C, B as in `like`.

        The noise, of which rounding is measured, is always one of them.
        """
        mask = torch.stack([self.part(k, last) for k in {*sources, NOISE}]).amax(0)
        return Scale(mask.expand(*like.shape, -1), torch.ones_like(like), torch.ones_like(like))

    def piece(self, u: Tensor, source: int, last: int) -> Tensor:
        """Return the part of u that belongs to a leaf: (C, B, ...)."""
        pieces = u.split(self._sizes(last), -1)
        return pieces[1 + self.sources(last).index(source)].unflatten(-1, self.tape.rooms[source])

    def push(self, u: Tensor, visit: Callable[[int, Tensor], None], last: int) -> None:
        """Call `visit` with H_i of every leaf up to `last`."""
        first, *rest = u.split(self._sizes(last), -1)
        sources, ends = self.sources(last), self._ends(last)
        remainders = dict(zip(sources, rest[: len(sources)], strict=True))
        defects = dict(zip(ends, rest[len(sources) :], strict=True))

        def at_leaf(at: int, v: Tensor) -> Tensor | None:
            visit(at, v)
            entering = None
            if at in remainders:
                r = remainders[at].unflatten(-1, self.tape.rooms[at]) * self.weights[at]
                entering = self.tape.spread(r, at)
            if at in defects:
                room = self._end(at)
                d = defects[at].unflatten(-1, room) * broadcast_batch(self.noise.weights[at], room)
                entering = d if entering is None else entering + d
            return entering

        self.tape.push(first.unflatten(-1, self._image) * broadcast_batch(self.most_B, self._image), at_leaf, last)

    def pull(self, joining: Vectors, last: int) -> Tensor:
        """Return the transpose of the map, applied to vectors that join at the inputs of leaves up to `last`."""
        sources, ends = self.sources(last), self._ends(last)
        g, seen = self.tape.pull(None, joining, {*sources, *ends})
        back = [g * broadcast_batch(self.most_B, self._image)]
        back += [self.tape.collected(seen, k) * self.weights[k] for k in sources]
        back += [seen[n] * broadcast_batch(self.noise.weights[n], self._end(n)) for n in ends]
        return torch.cat([piece.flatten(2) for piece in back], -1)

    def _ends(self, last: int) -> list[int]:
        """Return the leaves whose noise moves the input of leaf `last`."""
        return [n for n in self.noise.weights if n < last]

    def _end(self, at: int) -> torch.Size:
        return self.tape.leaves[at].y.shape[1:]

    def _sizes(self, last: int) -> list[int]:
        """Return the numbers of entries of the image, of each source, and of each noise vector."""
        rooms = [self.tape.rooms[k] for k in self.sources(last)] + [self._end(n) for n in self._ends(last)]
        return [self._image.numel(), *(room.numel() for room in rooms)]

    def gram(self, forms: Mapping[int, QuadraticForm]) -> Callable[[Tensor], Tensor]:
        """Return u -> sum_i M_i^T C_i M_i u.

        With C forms per leaf, the vectors of all forms are concatenated, equally many for each form.
        """
        last = max(forms)

        def apply(u: Tensor) -> Tensor:
            joining = Vectors()

            def visit(at: int, v: Tensor) -> None:
                if at in forms:
                    joining[at] = _applied(forms[at], v)

            self.push(u, visit, last)
            return self.pull(joining, last)

        return apply


def _applied(form: QuadraticForm, v: Tensor) -> Tensor:
    """Return C v for C forms and concatenated vectors; a single form applies to all of them."""
    if len(form.largest) in (1, len(v)):
        return form.apply(v)
    each = v.unflatten(0, (len(form.largest), -1))
    return torch.stack([form.apply(some) for some in each.unbind(1)], 1).flatten(0, 1)
