"""Workers of several kinds come up at the same time."""

import threading
import time
from functools import partial

import pytest

from launch.cluster import at_once


def test_all_are_started_at_the_same_time() -> None:
    met = threading.Barrier(3, timeout=20)
    at_once([partial(meet, met)] * 3)  # one after the other they would never meet


def meet(others: threading.Barrier) -> None:
    others.wait()


def test_the_first_that_fails_is_told_without_waiting_for_the_others() -> None:
    over = threading.Event()

    def fail() -> None:
        raise ValueError("no such model")

    began = time.monotonic()
    with pytest.raises(ValueError, match="no such model"):
        at_once([partial(linger, over), fail])
    assert time.monotonic() - began < 10
    over.set()


def linger(over: threading.Event) -> None:
    over.wait(20)
