"""The assumptions of a certificate besides its proof: sentences, each with the place that explains it (docs/proofs.md).

There are three kinds: kernels compute as IEEE arithmetic says, to stated errors; rounding that is not bounded operation
by operation is covered by a reserve; and random numbers are as random as they should be.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from certify.rows.intervals import at_most
from zoo.bounds.rounding import ASSUMPTIONS

PROOFS = "docs/proofs.md"


@dataclass(frozen=True)
class Assumption:
    """A sentence, and its anchor in docs/proofs.md."""

    sentence: str
    anchor: str

    def said(self) -> dict[str, Any]:
        """Return its entry of certificate.json."""
        return {"sentence": self.sentence, "proof": f"{PROOFS}#{self.anchor}"}


KERNELS = Assumption(
    "float64 kernels round each operation as IEEE 754 says, add in any order, and give exp, erf and tanh to 40 units "
    "in the last place.",
    "slack",
)
RESERVE = Assumption(
    "Quantities that the prover computes from activations outside the forward pass round by at most 8 times the error "
    "bounded for that pass.",
    "slack",
)
SLACK = Assumption(
    "The rounding of bounds, which add up terms that do not cancel, is below the slack of 1e-9 of the terms compared.",
    "slack",
)
CROWN = Assumption("auto_LiRPA computes the bounds that CROWN defines, to 1e-6 of the margins.", "crown")
EXACT = Assumption(
    "The certified function is the model in exact arithmetic; the rounding of the served type is measured on these "
    "images, not proved.",
    "served-weights",
)
SERVED = tuple(Assumption(f"{text[0].upper()}{text[1:]}.", "rounding") for text in ASSUMPTIONS)
RANDOM = Assumption(
    "Random starts are as uniform on the sphere as if SHA-256 and the generator (SFC64 on a CPU, Philox on a GPU) were "
    "random.",
    "lanczos",
)
CHANCE = "No random start makes a norm too small; the probability that one does is at most"
DRAWN_AFTER = Assumption(
    "Weights and images were fixed before the nonce of the random starts was known to their authors.", "lanczos"
)
EVERY = (KERNELS, RESERVE, SLACK, CROWN, EXACT, *SERVED, RANDOM, DRAWN_AFTER)


def assumptions(served_dtype: str | None, failure: float, crown: bool) -> list[Assumption]:
    """Return all assumptions of a table.

    `failure` is the probability that any of its images fails; `crown` says whether auto_LiRPA takes part.
    """
    return [*_of_arithmetic(served_dtype, crown), *_of_chance(failure)]


def _of_arithmetic(served_dtype: str | None, crown: bool) -> Iterator[Assumption]:
    yield from (KERNELS, RESERVE, SLACK)
    if crown:
        yield CROWN
    yield from SERVED if served_dtype else (EXACT,)


def _of_chance(failure: float) -> Iterator[Assumption]:
    """Yield the assumptions about random starts; nothing if no norm was found by a random method."""
    if failure:
        yield Assumption(f"{CHANCE} {at_most(failure)} for all images together.", "lanczos")
        yield from (RANDOM, DRAWN_AFTER)
