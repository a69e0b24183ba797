"""The origins of the nonces behind an entry.

A failure probability holds for a nonce that nobody chose. Someone who supplies a nonce may have tried many before,
until a norm came out too small. So a nonce counts only if the run drew it, or if it derives from the weights, the
images and a beacon that was published after both. A check of an entry draws another one in any case.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import zoo
from certify.leaderboard.entry import Entry
from certify.rows.draws import DERIVED, DRAWN, GIVEN, derived_nonce
from certizoo import UserError
from certizoo.text import shown

ORIGINS = (DRAWN, DERIVED, GIVEN)
UNKNOWN = "unknown"
UNRECORDED = {  # the nonces that may have this origin, with their published weights
    "n4bf8de11032e627b49321b256b5bef92": "cert_vit_c10",
    "nffafaed1c8f752b746bff7ce76df0c05": "cert_vit_c10",
    "n0f461328ff77c8f3fad39b8f8ea9e49a": "cert_gpsa_vit_c10",
    "n0b8890e62c82b8f931c2a8af8da02cdd": "cert_gpsa_vit_c10_gpu",
    "n452ac05441463d31ee2cd97d5833fdbd": "cert_vit_mnist",
}


def faults(
    nonces: Iterable[Mapping[str, Any]], weights_sha256: str, images_sha256: str, chance: float
) -> Iterator[str]:
    """Yield the faults in {nonce, origin, beacon} of a result with this failure probability.

    There are none if the probability is 0, because then no norm was found by a random method.
    """
    for said in nonces if chance != 0 else ():
        nonce, origin, beacon = (said[key] for key in ("nonce", "origin", "beacon"))
        if origin == UNKNOWN and _is_unrecorded(nonce, weights_sha256):
            continue
        if origin not in ORIGINS:
            yield f"the nonce {shown(nonce)} has the origin {shown(origin)}; it must be one of {', '.join(ORIGINS)}"
        elif origin == GIVEN:
            yield f"the nonce {shown(nonce)} was given, and may be the best of many; remove nonce=, or set beacon="
        elif origin == DERIVED and not _derives(nonce, weights_sha256, images_sha256, beacon):
            yield f"the nonce {shown(nonce)} does not derive from weights, images and the beacon {shown(beacon)}"


def of_entry(entry: Entry) -> Iterator[str]:
    """Yield the faults in the nonces of an entry."""
    yield from faults(entry["nonces"], entry["weights_sha256"], entry["images_sha256"], entry["failure_probability"])


def origins(entry: Entry) -> str:
    """Return the origins of the nonces, in words."""
    return ", ".join(dict.fromkeys(str(said["origin"]) for said in entry["nonces"]))


def _is_unrecorded(nonce: str, weights_sha256: str) -> bool:
    return nonce in UNRECORDED and zoo.weights.entries()[UNRECORDED[nonce]].sha256 == weights_sha256


def _derives(nonce: object, weights_sha256: str, images_sha256: str, beacon: object) -> bool:
    try:
        return isinstance(beacon, str) and nonce == derived_nonce(weights_sha256, images_sha256, beacon)
    except UserError:
        return False
