"""Random seeds: a hash of what is drawn, so that any sample can be drawn again on its own."""

import hashlib


def derive_seed(*parts: object) -> int:
    """Hashes any values to 63 bits. `derive_seed(run_seed, step, uid, index)` is the seed of a sample."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
