"""How the C library keeps the host memory of tensors that are no longer used."""

import contextlib
import ctypes
from collections.abc import Iterator

# Of glibc's malloc.h: when it gives free memory at the end of its heap back to the system, and from which size on a block
# is kept apart from the heap and given back when it is freed.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGE = 1 << 20
LARGEST = 32 << 20  # up to which glibc raises the size by itself, when blocks are freed


@contextlib.contextmanager
def giving_back_large_blocks() -> Iterator[None]:
    """While it lasts, freed blocks of a MiB and more do not stay in the heap.

    There they leave holes, which the next block often does not fit: loading a model under ZeRO 3 took up to twice the
    memory. In training the heap keeps them, because to reuse a block is faster than to map a new one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)  # other C libraries have none
    mallopt(MMAP_THRESHOLD, LARGE)
    try:
        yield
    finally:
        mallopt(MMAP_THRESHOLD, LARGEST)
        mallopt(TRIM_THRESHOLD, 2 * LARGEST)
