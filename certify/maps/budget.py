"""How much is spent on one image: the size of a model decides, here and nowhere else. Less is looser, and sound.

A push through a ViT-Ti at 224 pixels costs a thousand times what it costs through a small model at 32, and a map has
millions of entries. So of what is only estimated, or found to a factor, large models get less, and what may be done at
once is what fits the memory.
"""

from dataclasses import dataclass

from zoo.bounds.tape import Tape

LARGE = 2**19  # entries of the outputs of all leaves: from here on models get less
PROBES = (96, 640)  # random vectors that find how far functionals reach: to twice what they do, or a third more
SAMPLES = (8, 64)  # random vectors of a look: with 16, radii differed by up to 8 % from nonce to nonce
ROUNDS = (2, 8)  # that a look is taken to find the first radius, at most
START = (0.02, 1.0)  # where the first of them is taken, in units of where the first order alone ends
STEPS = (2, 5)  # of Lanczos, of a look
CLOSE = (2.0, 1.03)  # of norms, as in zoo/bounds/lanczos.py
GAIN = (1.16, 1.1)  # what a next rung has to promise, in units of what is proved (ladder.py)
OVER = (2.0, 1.2)  # what will be proved of reaches and lengths, in units of what a look finds
BYTES = 2**30  # of the vectors of one basis, and of probes


@dataclass(frozen=True)
class Budget:
    """The numbers that are meant at the head of this file. `large`: nothing is measured layer by layer, as the norms of
    many layers are astronomic together."""

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
    """How many things fit the memory, of so many vectors with so many entries each."""
    return max(1, BYTES // (8 * entries * vectors))
