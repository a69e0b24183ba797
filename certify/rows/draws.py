"""The random numbers of an image: its own, whatever images come with it and in whatever order, after a restart too."""

import hashlib
from collections.abc import Iterable

from torch import Generator


def draws(keys: Iterable[str], seed: int = 0) -> list[Generator]:
    """A generator for each of these images, seeded by its key."""
    return [_generator(f"{seed}:{key}") for key in keys]


def _generator(words: str) -> Generator:
    digest = hashlib.sha256(words.encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
