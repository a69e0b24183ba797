"""How much is spent on one image: the size of a model decides, here and nowhere else. Less is looser, and sound.

A push through a ViT-Ti at 224 pixels costs a thousand times what it costs through a small model at 32, and a map has
millions of entries. So of what is only estimated, or found to a factor, large models get less, and what may be done at
once is what fits the memory.
"""

from dataclasses import dataclass

from zoo.bounds.tape import Tape

LARGE = 2**19  # entries of the outputs of all leaves: from here on models get less
PROBES = (384, 768)  # random vectors that find how far functionals reach: by a half more than they do, or by a third
LOOKS = (8, 16)  # random vectors of a look
STEPS = (2, 5)  # of Lanczos, of a look
CLOSE = (1.1, 1.03)  # of norms, as in zoo/bounds/lanczos.py
BYTES = 2**30  # of the vectors of one basis, and of probes


@dataclass(frozen=True)
class Effort:
    """The numbers that are meant at the head of this file."""

    probes: int
    looks: int
    steps: int
    close: float


def effort(tape: Tape) -> Effort:
    share = min(1.0, LARGE / sum(leaf.y[0].numel() for leaf in tape.leaves.values()))

    def between(least: float, most: float) -> float:
        return most - (1 - share) * (most - least)

    return Effort(round(between(*PROBES)), round(between(*LOOKS)), round(between(*STEPS)), between(*CLOSE))


def at_once(entries: int, vectors: int = 1) -> int:
    """How many things fit the memory, of so many vectors with so many entries each."""
    return max(1, BYTES // (8 * entries * vectors))
