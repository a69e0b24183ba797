"""Entries of a tensor as linear functions of the image, and functionals of them.

With images x + r z, where r is the radius (of every pixel of a box) and |z|_p <= 1,

    y_e  =  <L_e, z> + rest_e,    rest_e in [lower_e, upper_e]
    sum_e a_e y_e  in  sum_e a_e [lower_e, upper_e] +- |sum_e a_e L_e|_q

which is smaller than the sum of the boxes of a_e y_e, because slopes cancel. Proof: docs/proofs.md#linear-forms.

Letters: B images, R functionals, H leading axes, I rows of weights, J entries of a row, D features, N pixels.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zoo.arithmetic import OUT, gamma, length

SINGLE = 2.0**-24  # unit round-off of float32
TINY = 1e-30  # far above what underflow of float32 loses
PIXELS = {"cpu": 2**21, "cuda": 2**27}  # of the functionals measured at once


@dataclass(frozen=True)
class Form:
    """The slopes L (B, *shape, N), the ends of what is left (B, *shape), and whether the images are balls in L2."""

    slope: Tensor
    lower: Tensor
    upper: Tensor
    l2: bool

    def _length(self, slope: Tensor) -> Tensor:
        return length(slope.double()) if self.l2 else torch.linalg.vector_norm(slope, 1, -1).double()

    @cached_property
    def _size(self) -> Tensor:
        """The sum over all terms of an entry."""
        return self._length(self.slope) + torch.maximum(self.lower.abs(), self.upper.abs()) + TINY

    def sums(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of <a, y_j> for a (B, R, *H, I, D) and y (B, *H, J, D): (B, R, *H, I, J).

        There may be one y for all B. Derivatives leave out those of the lengths of slopes.
        """
        middle, half = (self.upper + self.lower) / 2, (self.upper - self.lower) / 2
        middle, half, size = (t.mT.unsqueeze(1) for t in (middle, half, self._size))
        far = self._lengths(a.detach()) + a.abs() @ half
        off = gamma(2 * a.shape[-1] + self.slope.shape[-1] + 16, SINGLE)
        far = (far + off * ((a.abs() + TINY) @ size)) * OUT
        at = a @ middle
        return at - far, at + far

    def _lengths(self, a: Tensor) -> Tensor:
        """Return |sum_d a_d L_jd|_q, computed in float32; equal rows, such as those of different tokens, count once."""
        j, d, n = self.slope.shape[-3:]
        slope = self._single.view(len(self.slope), -1, j, d, n)
        rows = a.float().reshape(len(slope), -1, slope.shape[1], *a.shape[-2:])  # (B, R, H, I, D)
        found = a.new_zeros(*rows.shape[:-1], j)
        r, i = (rows != 0).any(-1).any(2).any(0).nonzero().unbind(1)
        if len(r):
            picked, index = rows[:, r, :, i].unique(dim=0, return_inverse=True)  # (M, B, H, D)
            few = max(1, PIXELS[slope.device.type] // (slope.numel() // d))
            parts = [
                self._length(part.permute(1, 2, 0, 3).unsqueeze(2) @ slope)  # (B, H, J, M)
                for part in picked.split(few)
            ]
            found[:, r, :, i] = torch.cat(parts, -1).permute(3, 0, 1, 2)[index]
        return found.view(*a.shape[:-1], j)

    @cached_property
    def _single(self) -> Tensor:
        return self.slope.float()

    def differences(self) -> tuple[Tensor, Tensor]:
        """Return the ends of y_j - y_i (B, ..., I, J) for the entries of the last axis."""
        ends = [self._difference(self.slope - self.slope[..., i : i + 1, :], i) for i in range(self.lower.shape[-1])]
        lower, upper = (torch.stack(end, -2) for end in zip(*ends, strict=True))
        return lower, upper

    def _difference(self, slope: Tensor, i: int) -> tuple[Tensor, Tensor]:
        size = self._size + self._size[..., i : i + 1]
        far = (self._length(slope) + gamma(slope.shape[-1] + 16) * size) * OUT
        return self.lower - self.upper[..., i : i + 1] - far, self.upper - self.lower[..., i : i + 1] + far
