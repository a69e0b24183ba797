"""Random vectors in the maps of some images: what weights are estimated from (weights.py). No bound uses them.

Letters: B images, M random vectors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from certify.ellipsoids.budget import Budget
from certify.ellipsoids.ellipsoid import within
from certify.ellipsoids.joint import Joint, Noise, Sizes
from certify.ellipsoids.measured import Draw, identity
from zoo.arithmetic import broadcast_batch
from zoo.bounds import lanczos
from zoo.bounds.contracts import Forms, Hessian, QuadraticForm
from zoo.bounds.tape import Tape

SECOND = 1.2  # what is proved of a remainder relative to the norm of D^2 f[H, H'] in samples, approximately
FAR = 100.0  # third order relative to the whole remainder from which on the second order is of no use
LENGTHS = (1e-100, 1e100)  # range of lengths


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Some images, the largest eps `most_B` around them, and the source of random vectors.

    `sizes` bound the inputs of some leaves within that eps, from elsewhere. `second` says whether the bounds know the
    second order of units, and of leaves with a Hessian.
    """

    tape: Tape
    images: Tensor
    most_B: Tensor
    draw: Draw
    sizes: Sizes
    budget: Budget
    second: bool

    @cached_property
    def formed(self) -> dict[int, Forms]:
        """The forms of the nonlinear leaves that have some."""
        return {at: forms for at in self.tape.nonlinear if (forms := self.tape.leaves[at].forms) is not None}

    def gaussian(self, room: torch.Size, word: str) -> Tensor:
        """Return random vectors (M, B, *room)."""
        return self.draw(torch.Size([self.budget.samples, *room]), word, self.most_B[:, None]).movedim(1, 0)

    def joint(self, weights: Mapping[int, Tensor], noise: Noise | None = None) -> Joint:
        """Return the maps with these weights, by default without noise."""
        return Joint(self.tape, self.images, self.most_B, weights, noise or Noise({}, {}))

    def walk(self, weight: Callable[[int, Tensor], Tensor]) -> Sizes:
        """Push random vectors through all leaves; return the root mean square lengths at their inputs.

        At each nonlinear leaf, `weight` receives the vectors and returns the weight of what the leaf adds.
        """
        lengths, image = Sizes(), self.images.shape[1:]

        def visit(at: int, v: Tensor) -> Tensor | None:
            square_B = v.flatten(2).square().sum(-1).mean(0)
            lengths[at] = square_B.sqrt().nan_to_num(1.0, 1.0).clamp(*LENGTHS)
            if at not in self.tape.nonlinear:
                return None
            added = weight(at, v)
            return self.tape.spread(self.gaussian(self.tape.rooms[at], f"look {at}") * added, at)

        self.tape.push(self.gaussian(image, "look") * broadcast_batch(self.most_B, image), visit, max(self.tape.leaves))
        return lengths

    def reach(self, at: int, v: Tensor, total_B: Tensor) -> Tensor:
        """Estimate the reach of a leaf's functionals for Theta before it, from random changes v of its input."""
        forms = self.formed[at]
        length = (forms.squares(v) / len(v)).sqrt()
        reach = broadcast_batch(self._around(total_B), length.shape[1:]) * length
        return within(self.sizes[at], forms, reach) if at in self.sizes else reach

    def rest(self, at: int, v: Tensor, joint: Joint, weight: Tensor, total_B: Tensor) -> Tensor:
        """Estimate |r / weight| (B,) of a leaf's remainder r, for Theta before the leaf."""
        leaf = self.tape.leaves[at]
        if leaf.forms is None:
            length_B = self._length(at, joint, identity(self.most_B), total_B)
            return leaf.beta(length_B) / weight.flatten(1).amin(1)
        reach = self.reach(at, v, total_B)
        length_B = self._length(at, joint, leaf.forms.of_rest(reach, 1 / weight), total_B)
        if not self.second or leaf.hessian is None:
            return length_B
        rows = self._rows(leaf.hessian, v, total_B)
        third_B = self._length(at, joint, leaf.hessian.of_third(reach, rows, 1 / weight), total_B)
        second_B = self._second(leaf.hessian, v, weight, total_B)
        return torch.where(third_B < FAR * length_B, second_B, length_B)  # else the bounds take the remainder whole

    def _length(self, at: int, joint: Joint, form: QuadraticForm, total_B: Tensor) -> Tensor:
        """Estimate the root of a form at the input of a leaf."""
        start = self.draw(torch.Size([joint.room(at)]), f"length {at}", self.most_B[:, None])
        length_B = self._around(total_B) * self._ritz(joint, {at: form}, start)
        if at in self.sizes:
            length_B = torch.fmin(length_B, form.largest[0].sqrt() * self.sizes[at])
        return (length_B.square() + form.constant).view(length_B.shape).sqrt()

    def _rows(self, hessian: Hessian, v: Tensor, total_B: Tensor) -> Tensor:
        """Estimate the lengths of all L_r H, from changes v of the input: (B, R)."""
        rows_BRMK = hessian.rows(v).nan_to_num(0.0, 0.0, 0.0).movedim(0, 2)
        norm_BR = (torch.linalg.eigvalsh(rows_BRMK @ rows_BRMK.mT)[..., -1] / len(v)).clamp_min(0).sqrt()
        return norm_BR * self._around(total_B)[:, None]

    def _second(self, hessian: Hessian, v: Tensor, weight: Tensor, total_B: Tensor) -> Tensor:
        """Estimate |D^2 f[H, H] / weight| / 2 from pairs of changes."""
        pairs = len(v) // 2
        r_BMN = (hessian.bilinear(v[:pairs], v[pairs : 2 * pairs]) / weight).flatten(2).movedim(1, 0)
        square_B = torch.linalg.eigvalsh((r_BMN @ r_BMN.mT).nan_to_num(0.0, 0.0, 0.0))[:, -1] / pairs
        return SECOND * total_B * square_B.sqrt()

    def part(self, joint: Joint, forms: Mapping[int, QuadraticForm], source: int) -> Tensor:
        """Estimate the seminorm of the forms for changes of length 1 from one source: (B,)."""
        last = max(forms)
        start = self.draw(torch.Size([joint.room(last)]), f"part {source}", self.most_B[:, None])
        return self._ritz(joint, forms, start * joint.part(source, last))

    def _around(self, total_B: Tensor) -> Tensor:
        """Return Theta^(1/2), times what is proved relative to the estimate."""
        return self.budget.over * total_B.sqrt()

    def _ritz(self, joint: Joint, forms: Mapping[int, QuadraticForm], start_BN: Tensor) -> Tensor:
        """Estimate lambda_max^(1/2) of the forms, on the part of u where the start is not 0."""
        part_BN, gram = start_BN != 0, joint.gram(forms)

        def apply(u_BN: Tensor) -> Tensor:
            return (gram(u_BN[None])[0] * part_BN).nan_to_num(0.0, 0.0, 0.0)

        return lanczos.ritz(apply, start_BN, self.budget.steps).clamp_min(1e-300).sqrt()
