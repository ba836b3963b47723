"""Seeds that are pure functions of what they are for."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *parts: str | int) -> int:
    """A seed from 0 to 2^31 - 1 that is a pure function of its arguments, on every machine and Python."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
