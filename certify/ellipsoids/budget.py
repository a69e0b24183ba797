"""The computing budget per image, which depends only on the size of the model.

A smaller budget loosens the bounds and keeps them sound. A push through a ViT-Ti at 224 pixels costs a thousand times a
push through a small model at 32, and a map has millions of entries. Large models therefore get fewer vectors for
estimates and coarser norms, and the memory decides how much is computed together.
"""

from dataclasses import dataclass

from zoo.bounds.tape import Tape

LARGE = 2**19  # entries of the outputs of all leaves; larger models get a smaller budget
PROBES = (96, 640)  # random vectors that bound the functionals: to twice their reach, or a third above it
SAMPLES = (8, 64)  # random vectors of a weight estimate; with 16, radii varied by up to 8 % between nonces
ROUNDS = (2, 8)  # weight estimates for the first radius, at most
START = (0.02, 1.0)  # radius of the first of them, relative to where the first order alone uses up the margin
STEPS = (2, 5)  # Lanczos steps of a weight estimate
CLOSE = (2.0, 1.03)  # precision of norms, as in zoo/bounds/lanczos.py
GAIN = (1.16, 1.07)  # what a next stage must promise, relative to the proved radius (schedule.py)
OVER = (2.0, 1.2)  # proved reaches and lengths relative to the estimated ones, approximately
BYTES = 2**30  # memory for the vectors of one basis, and for probes


@dataclass(frozen=True)
class Budget:
    """The numbers of this module for one model.

    `large`: nothing is measured layer by layer, as the product of the norms of many layers is astronomic.
    """

    large: bool
    probes: int
    samples: int
    rounds: int
    start: float
    steps: int
    close: float
    gain: float
    over: float


def budget(tape: Tape) -> Budget:
    share = min(1.0, LARGE / sum(leaf.y[0].numel() for leaf in tape.leaves.values()))

    def between(least: float, most: float) -> float:
        return most - (1 - share) * (most - least)

    probes, samples, rounds, steps = (round(between(*ends)) for ends in (PROBES, SAMPLES, ROUNDS, STEPS))
    start = START[0] ** (1 - share) * START[1] ** share
    return Budget(share < 1 / 2, probes, samples, rounds, start, steps, between(*CLOSE), between(*GAIN), between(*OVER))


def at_once(entries: int, vectors: int = 1) -> int:
    """Return how many items fit the memory, each of `vectors` vectors with `entries` entries."""
    return max(1, BYTES // (8 * entries * vectors))
