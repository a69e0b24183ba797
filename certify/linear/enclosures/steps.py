"""Steps of a program: what bounds each of them needs, and the steps that are affine.

A step computes y from tensors x_1, x_2, ... of one image. On boxes of these, it is enclosed between linear functions,
so that any functional A of y is, from below, one of x_1, x_2, ...:

    <A, y>  >=  <A_1, x_1> + <A_2, x_2> + ... + const - rounding            on the boxes

`rounding` covers that A_i and `const` are computed in float64: gamma_K |A|_1 size, with `size` never below the sum of
the moduli of all terms of any entry of y on the boxes. Proof: docs/proofs.md#linear-bounds.

Letters: B images, R functionals of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from certify.linear.enclosures.forms import Form
from zoo.arithmetic import OUT, U, gamma

Shape = tuple[int, ...]
Pull = Callable[[Tensor], tuple[Tensor, ...]]
Free = tuple[Tensor, ...]  # parameters (B, R, ...) in [0,1] of an enclosure, which holds for any
TINY = 1e-290  # above what underflow loses


@dataclass(frozen=True)
class Box:
    """Bounds of a tensor, entry by entry: (B, *shape) each; and its form, if that is known."""

    lower: Tensor
    upper: Tensor
    form: Form | None = None

    @property
    def centre(self) -> Tensor:
        return (self.lower + self.upper) / 2

    @property
    def reach(self) -> Tensor:
        """The distance of the ends from the computed centre, rounded up."""
        return torch.maximum(self.upper - self.centre, self.centre - self.lower) * (1 + 4 * U)

    @property
    def size(self) -> Tensor:
        return torch.maximum(self.lower.abs(), self.upper.abs())

    def meet(self, other: "Box") -> "Box":
        """Return the intersection; NaN in `other` counts as no bound."""
        return Box(torch.fmax(self.lower, other.lower), torch.fmin(self.upper, other.upper), self.form or other.form)


@dataclass(frozen=True)
class Back:
    """A functional of a step's result as one of each input, a constant and its rounding, (B, R) both."""

    parts: tuple[Tensor, ...]
    const: Tensor
    rounding: Tensor


class Relaxed(Protocol):
    """A step enclosed on given boxes."""

    def free(self, batch: int, rows: int) -> Free:
        """Return where the search for the best parameters begins; () if there are none."""
        ...

    def back(self, a: Tensor, free: Free = ()) -> Back:
        """Return a lower bound of the functionals a (B, R, *shape)."""
        ...


class Step(Protocol):
    """An operation on earlier results, `inputs` by number.

    `tight`: its own box needs no bounds from the image. `formed`: the input, by number, whose form pays, and for which
    images.
    """

    @property
    def inputs(self) -> tuple[int, ...]: ...

    @property
    def shape(self) -> Shape: ...

    @property
    def tight(self) -> bool: ...

    def formed(self, pixels: int, *boxes: Box) -> tuple[int, Tensor] | None: ...

    def value(self, *xs: Tensor) -> Tensor:
        """Return y for a batch: (B, *shape)."""
        ...

    def box(self, *boxes: Box) -> Box:
        """Return the box of y, rounded outwards."""
        ...

    def needs(self, box: Box) -> Tensor | None:
        """Return the entries of an input's box that should be as small as possible; None if no box matters."""
        ...

    def relaxed(self, *boxes: Box) -> Relaxed: ...


def inner(a: Tensor, v: Tensor) -> Tensor:
    """Return <a, v> of (B, R, *shape) and (B, *shape): (B, R)."""
    return (a.flatten(2) @ v.flatten(1).unsqueeze(-1)).squeeze(-1)


def inner_of_rows(a: Tensor, v: Tensor) -> Tensor:
    """Return <a, v> of two tensors (B, R, *shape): (B, R)."""
    return (a * v).flatten(2).sum(-1)


def rounding_of(a: Tensor, size: Tensor, terms: int) -> Tensor:
    """Return gamma |a|_1 max size for sums of so many terms, and one more for every entry of y."""
    length = torch.linalg.vector_norm(a.flatten(2), 1, -1)
    return gamma(terms + size[0].numel() + 8) * OUT * length * size.flatten(1).amax(1, keepdim=True) + TINY


@dataclass(frozen=True)
class Affine:
    """y = J_1 x_1 + J_2 x_2 + ... + c, on tensors of one image.

    Args:
        inputs: the numbers of x_1, x_2, ...
        shape: of y.
        apply: the map.
        absolute: |J_1| X_1 + |J_2| X_2 + ... of sizes.
        terms: of the longest sum in J or in its transpose; 0 for entries that are moved, each to one place at most.
        offset: never below the moduli of the terms of c.
        pull: a -> J_1^T a, J_2^T a, ... for any number of functionals, (K, *shape) -> (K, *shape of the input).
        moves: whether every entry of y is one of the inputs or a constant.
        entrywise: whether every entry of y depends on at most one of x_1.
        constant: c, None if it is 0.
    """

    inputs: tuple[int, ...]
    shape: Shape
    apply: Callable[..., Tensor]
    absolute: Callable[..., Tensor]
    terms: int
    offset: Tensor | None
    pull: Pull
    moves: bool = False
    entrywise: bool = False
    constant: Tensor | None = None
    tight: bool = False

    def value(self, *xs: Tensor) -> Tensor:
        return torch.func.vmap(self.apply)(*xs)

    def box(self, *boxes: Box) -> Box:
        if self.moves:
            return Box(self.value(*(box.lower for box in boxes)), self.value(*(box.upper for box in boxes)))
        y = self.value(*(box.centre for box in boxes))
        reach = torch.func.vmap(self.absolute)(*(box.reach for box in boxes))
        reach = (reach + gamma(self.terms + 8) * (self._size(*boxes) + reach)) * OUT + TINY
        return Box(y - reach, y + reach)

    def _size(self, *boxes: Box) -> Tensor:
        size = torch.func.vmap(self.absolute)(*(box.size for box in boxes))
        return size if self.offset is None else size + self.offset

    def needs(self, box: Box) -> Tensor | None:
        return None

    def formed(self, pixels: int, *boxes: Box) -> tuple[int, Tensor] | None:
        return None

    def relaxed(self, *boxes: Box) -> "Pulled":
        exact = self.moves and self.offset is None and self.terms == 0
        return Pulled(self.pull, self.constant, None if exact else self._size(*boxes), self.terms)


@dataclass(frozen=True)
class Pulled:
    """An affine step: it is its own enclosure."""

    pull: Pull
    constant: Tensor | None
    size: Tensor | None
    terms: int

    def free(self, batch: int, rows: int) -> Free:
        return ()

    def back(self, a: Tensor, free: Free = ()) -> Back:
        parts = tuple(part.view(*a.shape[:2], *part.shape[1:]) for part in self.pull(a.flatten(0, 1)))
        none = a.new_zeros(a.shape[:2])
        const = none if self.constant is None else inner(a, self.constant[None])
        return Back(parts, const, none if self.size is None else rounding_of(a, self.size, self.terms))


def transposed(apply: Callable[..., Tensor], zeros: Sequence[Tensor]) -> Pull:
    """Return a -> J^T a of an affine map by autograd."""
    pull = torch.func.vjp(apply, *zeros)[1]
    found: Pull = torch.func.vmap(pull)
    return found


def gathered(apply: Callable[..., Tensor], zeros: Tensor) -> Pull | None:
    """Return a -> J^T a of a map that moves every entry of one tensor to one place; None if it does something else."""
    count, shape = zeros.numel(), tuple(zeros.shape)
    index = apply(torch.arange(count, dtype=zeros.dtype, device=zeros.device).view(shape)).flatten().long()
    if len(index) != count or not bool((index.bincount(minlength=count) == 1).all()):
        return None
    if bool((index == torch.arange(count, device=index.device)).all()):
        return lambda a: (a.reshape(len(a), *shape),)
    back = index.argsort()
    return lambda a: (a.flatten(1).index_select(1, back).view(len(a), *shape),)
