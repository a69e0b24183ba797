"""The random numbers of an image: its own, whatever images come with it and in whatever order, after a restart too."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Generator

from certify.rows.records import SUBJECT
from certizoo.documents import read_json
from zoo.bounds import lanczos


def nonce_of(given: str | None, rows: Path, parts: Sequence[Path] = ()) -> str:
    """The nonce of the random starts of a result: the `given` one; that of its rows, or of the folders of its parts,
    where there are some; or one that is drawn now, after weights and images were fixed."""
    for folder in (rows.parent, *parts):
        recorded = folder / SUBJECT
        if given is None and (folder / rows.name).exists() and recorded.exists():
            given = read_json(recorded).get("nonce")
    return given or lanczos.new_nonce()


def draws(keys: Iterable[str], seed: int = 0) -> list[Generator]:
    """A generator for each of these images, seeded by its key."""
    return [_generator(f"{seed}:{key}") for key in keys]


def _generator(words: str) -> Generator:
    digest = hashlib.sha256(words.encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
