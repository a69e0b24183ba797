"""The maps M_i of ellipsoid.py, measured by random vectors: the lengths of all functionals, and the norms of forms.

A Gaussian vector pushed through the maps meets all functionals at once, and sums of squares bound their lengths |M_i^T
a|. Lanczos runs with a random start bound lambda_max( sum_i M_i^T C_i M_i ) for forms C_i. Each measurement is too
small with a stated probability, and `failure` adds these up. torch's own rounding is measured first, and every bound
contains it (rounding.py). Proofs: docs/proofs.md#probes, docs/proofs.md#lanczos, docs/proofs.md#rounding-of-maps.

Letters: B images, C forms of each, M random vectors.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from certify.ellipsoids.budget import at_once, budget
from certify.ellipsoids.columns import Columns
from certify.ellipsoids.joint import Joint, Scale, Sizes
from certify.ellipsoids.rounding import ALLOWED, Rounding
from certify.shared import block_power
from certify.shared.quantiles import least_square_sum
from zoo.arithmetic import OUT, broadcast_batch, nan_to_inf, product
from zoo.bounds import lanczos
from zoo.bounds.contracts import QuadraticForm

TINY = 1e-290  # over underflow
LEAST_LENGTH = 1e-100  # smallest length that is divided by, for maps that are nearly 0
TOGETHER = 16  # random vectors per push that bound functionals, at most; more are no faster
PROBE_FAILURE = 1e-11  # probability that one reach of an image is too small
SIZES = 1.5  # times `share`: errors of pushes are at most half of it; those of pulls twice that, as images may be 2 x
COARSE = 1.2  # coarse precision of norms, as in zoo/bounds/lanczos.py; budget.py has the fine one

Draw = Callable[[torch.Size, str, Tensor], Tensor]  # room, purpose, numbers (B, n) -> a Gaussian vector (B, *room) each


class MeasuredMaps:
    """The maps M_i around a batch of clean images, with the bounds that random vectors prove.

    `lengths_of` has the lengths of the functionals of every leaf (B, ...). `failure` is the probability, for one image,
    that a bound is too small.
    """

    def __init__(self, joint: Joint, draw: Draw, first: Columns | None) -> None:
        self.joint, self.tape, self.most_B, self.draw = joint, joint.tape, joint.most_B, draw
        self.budget, self.failure = budget(self.tape), PROBE_FAILURE
        self.rounding = self._measured()
        self.rounding = self._closer()
        self.lengths_of = self._probed()
        if first is not None:
            length = first.lengths(self.tape, self.most_B, joint.noise.weights)
            self.lengths_of[first.at] = torch.fmin(self.lengths_of[first.at], length)

    def _measured(self) -> Rounding:
        """Bound the sizes of all M_i at once, and return the rounding that follows from them.

        The sizes come from the norm of the sum of (M_i / lengths_i)^T (M_i / lengths_i). The rounding of this norm
        itself depends on the lengths of the vectors met while it was computed, so the result is valid only if those
        were within the sizes.
        """
        weights = {at: 1 / length_B.clamp_min(LEAST_LENGTH) for at, length_B in self.joint.noise.lengths.items()}
        self.rounding = Rounding(self.joint, {at: torch.zeros_like(weight_B) for at, weight_B in weights.items()})
        met = {at: torch.zeros_like(weight_B) for at, weight_B in weights.items()}
        forms = {at: _met(met, at, _multiple(weight_B.square())) for at, weight_B in weights.items()}
        norm_B = self.seminorms(forms, "sizes", [self.most_B[:, None]], self.budget.close)[0]
        measured = Rounding(self.joint, {at: norm_B / weight_B * OUT for at, weight_B in weights.items()})
        within_B = torch.stack([met[at] <= size_B for at, size_B in measured.sizes.items()]).all(0)
        return measured.only(within_B & (SIZES * measured.share(max(weights)) <= ALLOWED))

    def _closer(self) -> Rounding:
        """Measure the sizes of leaves with forms one by one: together, some come out far too large."""
        if self.budget.large:
            return self.rounding
        formed = {at: self.norm_of(at) for at in self.tape.nonlinear if self.tape.leaves[at].forms is not None}
        sizes = self.rounding.sizes
        return Rounding(self.joint, sizes | {at: torch.fmin(size_B, sizes[at]) for at, size_B in formed.items()})

    def _probed(self) -> Sizes:
        """Bound the lengths |M_i^T a| of the functionals of all leaves by random vectors.

        For a Gaussian vector u, <a, M_i u> is normal with variance |M_i^T a|^2. A sum of M squares is therefore below
        `share` |M_i^T a|^2 with a stated probability only (docs/proofs.md#probes).
        """
        formed = {at: forms for at in self.tape.nonlinear if (forms := self.tape.leaves[at].forms) is not None}
        if not formed:
            return {}
        last, squares = max(formed), Sizes()
        room = self.joint.room(last)

        def visit(at: int, v: Tensor) -> None:
            if at in formed:
                squares[at] = formed[at].squares(v) + squares.get(at, 0.0)

        fit, longest_B = at_once(self.most_B.numel() * room), torch.zeros_like(self.most_B)
        for start in range(0, self.budget.probes, TOGETHER):  # the vectors do not depend on how many fit
            rooms = torch.Size([min(TOGETHER, self.budget.probes - start), room])
            u = self.draw(rooms, f"probes {start}", self.most_B[:, None]).movedim(1, 0)
            longest_B = torch.maximum(longest_B, torch.linalg.vector_norm(u, dim=-1).amax(0))
            for fitting in u.split(fit):
                self.joint.push(fitting, visit, last)
        count = sum(found[0].numel() for found in squares.values())
        share = least_square_sum(self.budget.probes, PROBE_FAILURE / count)
        return {at: self._length(at, found, share, longest_B) for at, found in squares.items()}

    def _length(self, at: int, squares: Tensor, share: float, longest_B: Tensor) -> Tensor:
        """Bound |M_i^T a| from sums of squares of <a, M_i u> with |u| <= longest, as torch computed them.

        Each computed value is <a, M_i u'> for |u' - u| <= share() |u| / 2, up to the rounding of the functional itself.
        """
        forms, root = self.tape.leaves[at].forms, self.budget.probes**0.5
        assert forms is not None
        moved_B = self.rounding.share(at) * longest_B * OUT
        far_B = product(self.rounding.sizes[at], longest_B) * OUT
        rounded = product(forms.slack, broadcast_batch(far_B, squares.shape[1:]))
        sure = broadcast_batch(share**0.5 - root * moved_B, squares.shape[1:])
        return norm_of_squares(squares, self.budget.probes, rounded, sure)

    def seminorms(
        self,
        forms: Mapping[int, QuadraticForm],
        word: str,
        numbers: Sequence[Tensor],
        close: float,
        scale: Scale | None = None,
    ) -> Tensor:
        """Return upper bounds of lambda_max(s sum_i M_i^T C_i M_i s)^(1/2), s diagonal: (C, B).

        They are infinite where a form is. `numbers` are C tensors that seed the starts. Where s is 0 on a part, it must
        not be 0 on the noise, of which rounding is measured.
        """
        unknown = ~torch.stack([torch.isfinite(form.largest) for form in forms.values()]).all(0)
        known = {at: _silenced(form, unknown) for at, form in forms.items()} if bool(unknown.any()) else forms
        last = max(forms)
        room = torch.Size([lanczos.STARTS, self.joint.room(last)])
        self.failure += len(numbers) * lanczos.chance(room[-1])
        start = torch.stack([self.draw(room, word, of_map).movedim(1, 0) for of_map in numbers])
        shift, gram = self.rounding.shift(known, scale), self.joint.gram(known)
        rounding = torch.where(self.rounding.left(last, scale) > 0, ALLOWED, torch.inf).expand(len(start), -1)

        def apply(u: Tensor) -> Tensor:
            if scale is None:
                return gram(u) + _repeated(shift, u) * u
            s = scale.entries.repeat_interleave(lanczos.STARTS, 0)
            return s * gram(s * u) + _repeated(shift, u) * u

        found = lanczos.norms(apply, start, rounding, close)
        return torch.where(unknown, torch.inf, found)

    def top(self, forms: Mapping[int, QuadraticForm], word: str, numbers: Sequence[Tensor], within: Tensor) -> Tensor:
        """Return upper bounds of lambda_max( sum_i (E A_i)^T C_i E A_i ) and 0, for forms of either sign: (C, B).

        `within` (C, B) is never below the norm of sum_i M_i^T |C_i| M_i. Rounding is at most ALLOWED times `shift`, and
        hence times the largest eigenvalue of the shifted sum. Where negative eigenvalues are larger, `within` is the
        answer.
        """
        size = self.joint.images[0].numel()
        self.failure += len(numbers) * lanczos.chance(size)
        room = torch.Size([lanczos.STARTS, size])
        start = torch.stack([self.draw(room, word, of_map).movedim(1, 0) for of_map in numbers])
        shift, gram = self.rounding.shift_of(forms, within), self.joint.gram(forms)
        rest = self.joint.room(max(forms)) - size
        allowed = torch.where(torch.isfinite(shift), ALLOWED, torch.inf)

        def apply(v: Tensor) -> Tensor:
            return gram(pad(v, (0, rest)))[..., :size] + _repeated(shift, v) * v

        found = lanczos.norms(apply, start, allowed, self.budget.close).square() * OUT
        return torch.fmin(nan_to_inf((found - shift).clamp_min(0)), within)

    def across(
        self,
        forms: Mapping[int, QuadraticForm],
        sources: Collection[int],
        word: str,
        numbers: Sequence[Tensor],
        within: Tensor,
    ) -> Tensor:
        """Return upper bounds of |P S v| for images v of length 1, S = sum_i M_i^T C_i M_i of either sign: (C, B).

        P keeps these sources and the noise; `within` as for `top`. Rounding is large compared with this norm, so that
        it is bounded by powers (certify/shared/block_power.py).
        """
        last, size = max(forms), self.joint.images[0].numel()
        self.failure += len(numbers) * PROBE_FAILURE
        room, kept = torch.Size([block_power.VECTORS, size]), self.joint.only(sources, last, within).entries[0, 0]
        start = torch.stack([self.draw(room, word, of_map) for of_map in numbers])
        slip, gram = OUT * ALLOWED * self.rounding.shift_of(forms, within), self.joint.gram(forms)

        def product_with(v: Tensor) -> Tensor:
            """(C B, M, n) -> (C B, M, n)."""
            whole = v.unflatten(0, slip.shape).movedim(2, 1).flatten(0, 1)
            return gram(whole).unflatten(0, (len(slip), -1)).movedim(1, 2).flatten(0, 1)

        found = block_power.norm_upper(
            lambda v: kept * product_with(pad(v, (0, len(kept) - size))),
            lambda y: product_with(y)[..., :size],
            start.flatten(0, 1),
            slip.flatten(),
            within.flatten(),
            least_square_sum(block_power.VECTORS, PROBE_FAILURE),
        )
        return found.view_as(within)

    def norm_of(self, at: int) -> Tensor:
        """Return ||M_i|| (B,)."""
        whole = {at: identity(self.joint.ones_B)}
        return self.seminorms(whole, f"input {at}", [self.most_B[:, None]], COARSE)[0]


def norm_of_squares(squares: Tensor, count: int, off: Tensor, least: Tensor | float) -> Tensor:
    """Bound a norm from the sum of so many squares, whose root is at least `least` times the norm.

    Each value was computed to within `off`. The result is infinite where `least` is not positive.
    """
    found = (OUT * squares + TINY).sqrt() + count**0.5 * off
    return nan_to_inf(found / torch.as_tensor(least).clamp_min(0))


def _met(met: Sizes, at: int, form: QuadraticForm) -> QuadraticForm:
    """Return the form with a record of the longest vector that it was applied to."""

    def apply(v: Tensor) -> Tensor:
        met[at] = torch.maximum(met[at], torch.linalg.vector_norm(v.flatten(2), dim=-1).amax(0))
        return form.apply(v)

    return replace(form, apply=apply)


def _multiple(factor_B: Tensor) -> QuadraticForm:
    """Return the form factor |H|^2."""
    return QuadraticForm(lambda v: broadcast_batch(factor_B, v.shape[2:]) * v, factor_B[None], rounding=0.0)


def identity(like_B: Tensor) -> QuadraticForm:
    return QuadraticForm(lambda v: v, torch.ones_like(like_B)[None], rounding=0.0)


def _silenced(form: QuadraticForm, unknown: Tensor) -> QuadraticForm:
    """Return the form with 0 where it is unknown."""

    def apply(v: Tensor) -> Tensor:
        return torch.where(broadcast_batch(unknown, v.shape[2:]), 0.0, form.apply(v))

    return QuadraticForm(apply, form.largest, form.constant, form.rounding)


def _repeated(shift: Tensor, u: Tensor) -> Tensor:
    """Repeat (C, B) for multiplication with vectors (C STARTS, B, n)."""
    return shift.repeat_interleave(len(u) // len(shift), 0).unsqueeze(-1)
