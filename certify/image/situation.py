"""Some images, what is known around them, and the gradients of their margins.

Letters: B images, J classes, C rivals of each, R all rivals, the closest first; e the radius of an L2 ball.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certify.adjoint.adjoint import AdjointAnalysis
from certify.ellipsoids.budget import budget
from certify.ellipsoids.ellipsoid import Off
from certify.ellipsoids.joint import Sizes
from certify.shared.ball import Ball
from certify.shared.certificate import Clean, open_pairs
from zoo.arithmetic import broadcast_batch, nan_to_inf, product
from zoo.bounds import lanczos
from zoo.bounds.tape import Tape, Vectors

BITS = 2**12  # leading bits of a number that enter a seed


@dataclass(frozen=True)
class Gradients:
    """The gradients of some margins, at the image (C, B, *x) and at some leaves; their lengths (C, B) at all leaves."""

    image: Tensor
    leaves: Vectors
    lengths: Sizes


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Some images, and what is known around them."""

    images: Tensor
    clean: Clean
    ball: Ball
    tape: Tape
    head: nn.Linear
    rivals_BR: Tensor
    seed: bytes
    radii: Callable[[Tensor], Sequence[Tensor]]  # e (B,) -> |G_n| (B,) before every node, or an empty list
    proved: Callable[[Tensor], Tensor]  # e (B,) -> (B,): proved by the adjoint analysis, so that no stage is needed
    off: Off  # error at the end of a node
    kept: Callable[[Tensor], Tensor]  # r (B,) -> (B, J): rounding to subtract from margins, for features within r
    along: Tensor | None = None  # (B, *x): the gradient along these unit vectors, downhill, is left out (slabs.py)

    @staticmethod
    def of(inner: AdjointAnalysis, images: Tensor, index_I: Tensor, seed: bytes) -> "Situation":
        tape = Tape((inner.chain if len(index_I) == len(images) else inner.chain.of(index_I)).expansions)
        asked = not budget(tape).large  # for a large model the adjoint analysis is not used

        def of_all(e_I: Tensor) -> Tensor:
            return images.new_zeros(len(images), dtype=e_I.dtype).index_put((index_I,), e_I)

        def radii(e_I: Tensor) -> list[Tensor]:
            return [radius_B[index_I] for radius_B in inner.radii_within(of_all(e_I)).e] if asked else []

        def proved(e_I: Tensor) -> Tensor:
            if not asked:
                return torch.zeros_like(e_I, dtype=torch.bool)
            now, loss_BJ, _ = inner.answered(of_all(e_I))
            return ~open_pairs(now, loss_BJ).any(-1)[index_I]

        def off(node: int, r_I: Tensor) -> Tensor:
            return nan_to_inf(inner.off_behind(node, of_all(r_I))[index_I])

        def kept(r_I: Tensor) -> Tensor:
            return nan_to_inf(inner.kept(of_all(r_I))[index_I])

        return Situation(
            images=images[index_I],
            clean=inner.clean[index_I],
            ball=inner.ball,
            tape=tape,
            head=inner.head,
            rivals_BR=inner.rivals_BR[index_I],
            seed=seed,
            radii=radii,
            proved=proved,
            off=off,
            kept=kept,
        )

    def gradients(self, class_CB: Tensor) -> "Gradients":
        """Return the gradients of the margins over these classes.

        They are taken at the image and at the outputs of the nonlinear leaves; lengths are those at the outputs of all
        leaves.
        """
        weight, lengths = self.head.weight, Sizes()
        g_CBD = weight[self.clean.label_B] - weight[class_CB]
        end = self.tape.leaves[max(self.tape.leaves)].y.shape

        def visit(at: int, g: Tensor) -> None:
            lengths[at] = torch.linalg.vector_norm(g.flatten(2), dim=-1)

        g, seen = self.tape.pull(g_CBD.view(len(g_CBD), *end), {}, self.tape.nonlinear, visit)
        return Gradients(g if self.along is None else across(g, self.along), seen, lengths)

    def first(self, class_CB: Tensor) -> Tensor:
        """Return the first-order loss of the margins over these classes at e = 1: (C, B)."""
        return self.ball.length(self.gradients(class_CB).image)

    def sizes(self, e_B: Tensor) -> Sizes:
        """Return bounds on the inputs of leaves within e, for the leaves that the adjoint analysis bounds."""
        ways = zip(self.tape.gains, self.radii(e_B), strict=False)
        return {at: product(radius_B, gain_B) for gains, radius_B in ways for at, gain_B in gains.items()}

    def draw(self, room: torch.Size, word: str, numbers: Tensor) -> Tensor:
        """Return a Gaussian vector (B, *room) for each image.

        Every purpose, with these numbers (B, n), has its own random stream, because the result of one start chooses the
        maps that another one measures. Only the leading bits of the numbers enter the seed, as the trailing ones are
        rounding.
        """
        mantissa, exponent = numbers.frexp()
        key = torch.cat([self.images.flatten(1), (BITS * mantissa).round(), exponent], 1)
        return lanczos.starts(key, room, self.seed + word.encode())

    def features(self, e_B: Tensor, moved_B: Tensor) -> Tensor:
        """Bound how far the features move, by the forms' bound `moved_B` or by the adjoint radius: (B,)."""
        return torch.fmin(moved_B, radii[-1]) if (radii := self.radii(e_B)) else moved_B


def slope(g: Tensor, along_BCHW: Tensor) -> Tensor:
    """Return how fast margins with gradients g (..., B, *x) fall along unit vectors, 0 where they rise: (..., B)."""
    return -(g * along_BCHW).flatten(-3).sum(-1).clamp(max=0)


def across(g: Tensor, along_BCHW: Tensor) -> Tensor:
    """Return the gradients without what makes margins fall along these unit vectors: (..., B, *x)."""
    return g + broadcast_batch(slope(g, along_BCHW), along_BCHW.shape[1:]) * along_BCHW
