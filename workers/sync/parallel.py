"""Spreads work that only moves memory over all cores: the other processes wait while weights are sent."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def parallel_map(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Returns what `work` returns for each item, in order. Each item uses one core, whatever torch is set to."""
    import torch

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            return list(pool.map(work, items))
        finally:
            torch.set_num_threads(threads)  # torch keeps part of this number for the whole process, not per thread
