"""Less of the machine than there is, so that a test which overloads it leaves the rest to others."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_processor() -> Iterator[None]:
    """What is started meanwhile shares one."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
