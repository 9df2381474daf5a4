"""What each process of a run did, and when: a line per span of work, in a file of the process beside its log.

logs/policy-0.spans     {"span": "update", "at": 1732222222.125, "s": 0.5, "packs": 3, "tokens": 4096, "pairs": 1048576}
logs/rollout-0.spans    {"span": "generate", "at": …, "s": …, "asked": [["zigzag:17#0", 3, 0], …],
                         "samples": [["zigzag:17#0", 3, 0.41, 7], …]}

`at` is seconds since 1970 by the clock of the process's host: spans of several hosts lie as far apart as their clocks do, which
time synchronisation keeps within milliseconds. `s` is how long it took. What an engine is asked for has its uid and index, and the
tokens that are there already, in the order of turns; a sample has its uid and index, when it was finished, in seconds of its span,
and its tokens. What it waited for its turn in the engine is part of it.

A process begins its file once (`begin`); from then on methods that are `recorded`, and blocks in `span`, leave their lines in it.
Nothing is read back by the run itself, and nothing here can fail it. `trace` reads it.
"""

import contextlib
import functools
import inspect
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from rlsys.types import Pack, Request

MAX_FILE_BYTES = 16 << 20  # bytes of a file; the one before it is kept too, as rollout-0.spans.before
Facts = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])


class Timeline:
    def __init__(self, file: Path):
        self.file, self.lock, self.descriptor = file, threading.Lock(), -1
        self.open()

    def open(self) -> None:
        self.descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.size = os.fstat(self.descriptor).st_size

    def add(self, name: str, at: float, seconds: float, facts: Facts) -> None:
        """A line of its own, whatever a process that was killed has left behind."""
        line = {"span": name, "at": round(at, 6), "s": round(seconds, 6)} | facts
        text = b"\n" + json.dumps(line, separators=(",", ":")).encode()
        with self.lock, contextlib.suppress(OSError):  # a full disk is for those to tell who write what matters
            if self.descriptor < 0:
                return
            if self.size + len(text) > MAX_FILE_BYTES:
                os.close(self.descriptor)
                self.descriptor = -1  # if there can be no other, nothing more is recorded
                self.file.rename(self.file.with_suffix(".spans.before"))
                self.open()
            self.size += os.write(self.descriptor, text)

    def close(self) -> None:
        with self.lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
            self.descriptor = -1


_here: Timeline | None = None  # of this process, which is one worker or the driver


def open_timeline(name: str, logs: Path) -> None:
    """From now on this process is `name`, and records what it does."""
    global _here
    close_timeline()
    with contextlib.suppress(OSError):  # on another host without the run directory
        _here = Timeline(logs / f"{name}.spans")


def close_timeline() -> None:
    global _here
    if _here:
        _here.close()
    _here = None


@contextlib.contextmanager
def span(name: str, **facts: Any) -> Iterator[Facts]:
    """A block of work. What is put into the dictionary while it goes on is told with it."""
    at, began = time.time(), time.perf_counter()
    try:
        yield facts
    finally:
        if _here:
            _here.add(name, at, time.perf_counter() - began, facts)


def recorded(facts: Callable[..., Facts] | None = None, *, name: str = "") -> Callable[[F], F]:
    """Each call of the function is a span of its name; `facts(*arguments)` is told with it. A function that yields samples
    tells each of them."""

    def wrap(function: F) -> F:
        called = name or function.__name__

        def told(arguments: tuple[Any, ...]) -> Facts:
            return facts(*arguments) if facts else {}

        @functools.wraps(function)
        def plain(*arguments: Any, **options: Any) -> Any:
            with span(called, **told(arguments)):
                return function(*arguments, **options)

        @functools.wraps(function)
        async def awaited(*arguments: Any, **options: Any) -> Any:
            with span(called, **told(arguments)):
                return await function(*arguments, **options)

        @functools.wraps(function)
        async def streamed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            with span(called, **told(arguments)) as more:
                more["samples"] = samples = []
                async with contextlib.aclosing(function(*arguments, **options)) as stream:
                    async for found in stream:
                        now = round(time.perf_counter() - began, 6)
                        samples += [[s.uid, s.index, now, len(s.tokens)] for s in found]
                        yield found

        if inspect.isasyncgenfunction(function):
            return cast(F, streamed)
        return cast(F, awaited if inspect.iscoroutinefunction(function) else plain)

    return wrap


def step_facts(trainer: Any, step: int) -> Facts:
    return {"step": step}


def request_facts(engine: Any, requests: list[Request]) -> Facts:
    """What an engine is asked for."""
    return {"asked": [[r.uid, r.index, len(r.partial.tokens) if r.partial else 0] for r in requests]}


def pack_facts(worker: Any, packs: Iterable[Pack], *others: Any) -> Facts:
    """What a rank is given."""
    packs = list(packs)
    return {
        "packs": len(packs),
        "tokens": sum(len(p.tokens) for p in packs),
        "pairs": round(sum(p.pairs for p in packs)),
    }
