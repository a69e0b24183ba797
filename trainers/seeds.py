"""Random streams named by their purpose, so that no generator's state has to be saved."""

import hashlib


def seed_of(*parts: int | str) -> int:
    """Return a 63-bit seed from (run seed, purpose, step, rank, ...): different parts give unrelated streams."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
