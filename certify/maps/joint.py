"""The maps M_i of ellipsoid.py, all at once: u = (G / E, r_k / W_k, d_n / w_n) pushed through the tape, and back.

Letters: B images, C vectors of each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.arithmetic import broadcast_batch
from zoo.bounds.contracts import QuadraticForm
from zoo.bounds.tape import Tape, Vectors

IMAGE, NOISE = -1, -2  # sources beside the leaves that bend

Sizes = dict[int, Tensor]  # of leaves: (B,)


@dataclass(frozen=True)
class Scale:
    """A diagonal matrix in front of u: its entries (C, B, n), the largest of them, and that of the noise (C, B)."""

    entries: Tensor
    most: Tensor
    noise: Tensor


@dataclass(frozen=True)
class Noise:
    """What is off at the outputs of leaves: w_n (B,) of every leaf. `lengths`: about |M_i|, of the inputs of all
    leaves."""

    weights: Sizes
    lengths: Sizes

    @staticmethod
    def of(defects: Sizes, theta_B: Tensor, floors: Sizes, lengths: Sizes) -> "Noise":
        """w_n above these floors, and for defects (B,) of about these lengths so large that theta_0 is about that."""
        scale_B, weights = (len(defects) / theta_B).sqrt(), dict(floors)
        for at, defect_B in defects.items():
            weight_B = (scale_B * defect_B).nan_to_num(1.0, 1.0)
            weights[at] = torch.hypot(weight_B, floors[at]) if at in floors else weight_B
        return Noise(weights, lengths)


class Joint:
    """u -> H_i, of all leaves at once: the weighted sources pushed through the tape. u is flat, (C, B, n)."""

    def __init__(
        self, tape: Tape, images_BCHW: Tensor, most_B: Tensor, weights: Mapping[int, Tensor], noise: Noise
    ) -> None:
        self.tape, self.images, self.most_B = tape, images_BCHW, most_B
        self.weights, self.noise, self.ones_B = weights, noise, torch.ones_like(most_B)

    @property
    def _image(self) -> torch.Size:
        return self.images.shape[1:]

    def sources(self, last: int) -> list[int]:
        """Leaves whose remainders move the input of leaf `last`."""
        return [k for k in self.weights if k < last]

    def room(self, last: int) -> int:
        """The entries of u that count there."""
        return sum(self._sizes(last))

    def part(self, source: int, last: int) -> Tensor:
        """1 for the entries of u that a source has (IMAGE, NOISE, or a leaf), 0 for the others: (n,)."""
        names = [IMAGE, *self.sources(last), *(NOISE for _ in self._ends(last))]
        parts = zip(names, self._sizes(last), strict=True)
        return torch.cat([self.ones_B.new_full((size,), float(name == source)) for name, size in parts])

    def push(self, u: Tensor, visit: Callable[[int, Tensor], None], last: int) -> None:
        """Show H_i of every leaf up to `last`."""
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
        """The transpose of what joins at the inputs of leaves up to `last`."""
        sources, ends = self.sources(last), self._ends(last)
        g, seen = self.tape.pull(None, joining, {*sources, *ends})
        back = [g * broadcast_batch(self.most_B, self._image)]
        back += [self.tape.collected(seen, k) * self.weights[k] for k in sources]
        back += [seen[n] * broadcast_batch(self.noise.weights[n], self._end(n)) for n in ends]
        return torch.cat([piece.flatten(2) for piece in back], -1)

    def _ends(self, last: int) -> list[int]:
        """Leaves at the ends of nodes whose defects move the input of leaf `last`."""
        return [n for n in self.noise.weights if n < last]

    def _end(self, at: int) -> torch.Size:
        return self.tape.leaves[at].y.shape[1:]

    def _sizes(self, last: int) -> list[int]:
        """The entries of the image, of each source, and of each defect."""
        rooms = [self.tape.rooms[k] for k in self.sources(last)] + [self._end(n) for n in self._ends(last)]
        return [self._image.numel(), *(room.numel() for room in rooms)]

    def gram(self, forms: Mapping[int, QuadraticForm]) -> Callable[[Tensor], Tensor]:
        """u -> sum_i M_i^T C_i M_i u; of C forms the vectors stand behind each other, equally many for each."""
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
    """C v of C forms, of vectors that stand behind each other; one form is that of all of them."""
    if len(form.largest) in (1, len(v)):
        return form.apply(v)
    each = v.unflatten(0, (len(form.largest), -1))
    return torch.stack([form.apply(some) for some in each.unbind(1)], 1).flatten(0, 1)
