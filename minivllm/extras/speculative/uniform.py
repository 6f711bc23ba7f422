"""Random numbers for verdicts, independent of the noise that draws tokens."""

from __future__ import annotations

import hashlib
import struct


def uniform(seed: int, position: int, salt: int = 0) -> float:
    """A number in [0, 1) that depends on (seed, position, salt) alone."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, position, salt), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
