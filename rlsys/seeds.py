"""Where randomness comes from: a hash of what is being drawn, so that any sample can be drawn again on its own."""

import hashlib


def derive_seed(*what: object) -> int:
    """63 bits from any values. `seed_of(run_seed, step, uid, index)` is a sample's."""
    text = "\x1f".join(str(w) for w in what)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
