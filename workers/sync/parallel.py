"""Work that only moves memory, on all cores: while weights travel, the others wait for them."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def parallel_map(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """What `work` makes of each item, in order. Each item has one core, whatever torch would take for it."""
    import torch

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            return list(pool.map(work, items))
        finally:
            torch.set_num_threads(threads)  # a part of that number is the whole process's
