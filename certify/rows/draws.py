"""The random numbers of images, and the nonce of a result's certificates with its origin.

Every image has its own random numbers, independent of the other images, their order and restarts. The nonce is

    drawn     by the run itself, after weights and images were fixed
    derived   SHA-256 of the weights, the image list and a beacon, a text that was published after both
    given     chosen by somebody, who may have tried others before
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Generator

from certify.rows.records import subject_in
from certizoo import UserError
from certizoo.text import shown
from zoo.bounds import lanczos

DRAWN, GIVEN, DERIVED = "drawn", "given", "derived"


@dataclass(frozen=True)
class Nonce:
    """The seed of a result's random starts, and its origin."""

    text: str
    origin: str
    beacon: str | None = None

    def said(self) -> dict[str, str | None]:
        """Return its part of a subject."""
        return {"nonce": self.text, "nonce_origin": self.origin, "beacon": self.beacon}


def recorded(said: Mapping[str, Any]) -> Nonce:
    """Return the nonce of a subject or summary."""
    return Nonce(said["nonce"], said["nonce_origin"], said["beacon"])


def nonce_of(given: str | None, rows: Path, parts: Sequence[Path] = ()) -> Nonce:
    """Return the nonce of the random starts of a result.

    It is the `given` one; that of existing rows, or of the folders of its parts; or one drawn now, after weights and
    images were fixed. The origin that existing rows record for a nonce is kept, even if the same nonce is given.
    """
    for folder in (rows.parent, *(() if given else parts)):
        if (folder / rows.name).exists():
            found = recorded(subject_in(folder))
            if given in (None, found.text):
                return found
    return Nonce(given, GIVEN) if given else Nonce(lanczos.new_nonce(), DRAWN)


def derived(weights_sha256: str, images_sha256: str, beacon: str) -> Nonce:
    """Derive a nonce that nobody could choose from weights, images and a beacon published after both."""
    return Nonce(derived_nonce(weights_sha256, images_sha256, beacon), DERIVED, beacon)


def derived_nonce(weights_sha256: str, images_sha256: str, beacon: str) -> str:
    """Return d and the SHA-256 of the three, a line each. Raises UserError unless the beacon is a line of text."""
    if not beacon or not beacon.isprintable():
        raise UserError(f"beacon={shown(beacon)} is not a line of text; use one that was published after the weights")
    lines = f"{weights_sha256}\n{images_sha256}\n{beacon}\n"
    return f"d{hashlib.sha256(lines.encode()).hexdigest()}"


def draws(keys: Iterable[str], seed: int = 0) -> list[Generator]:
    """Return a generator for each of these images, seeded by its key."""
    return [_generator(f"{seed}:{key}") for key in keys]


def _generator(words: str) -> Generator:
    digest = hashlib.sha256(words.encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
