"""The timeline: what each process of a run did, and when. A line per span of work, in a file next to the process's log.

logs/policy-0.spans     {"span": "update", "at": 1732222222.125, "s": 0.5, "packs": 3, "tokens": 4096, "pairs": 1048576}
logs/rollout-0.spans    {"span": "generate", "at": …, "s": …, "requests": [["zigzag:17#0", 3, 0], …],
                         "samples": [["zigzag:17#0", 3, 0.41, 7], …]}

`at` is in seconds since 1970 by the clock of the process's host; time synchronization keeps several hosts within
milliseconds. `s` is the duration. A request has its uid and index, and the number of tokens that exist already, in the
order of turns. A sample has its uid and index, the second of its span when it was finished, and its number of tokens.
The span includes the time in which it waited for its turn in the engine.

A process opens its file once (`open_timeline`). Then functions that are `recorded` and blocks in `span` write lines.
The run itself never reads them, and nothing here can make it fail. `launch.tools.analysis.trace` reads them.
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

MAX_FILE_BYTES = 16 << 20  # then a new file begins; the previous one is kept as rollout-0.spans.before
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
        """Appends a line. It begins with a line break, in case a killed process has left half a line."""
        line = {"span": name, "at": round(at, 6), "s": round(seconds, 6)} | facts
        text = b"\n" + json.dumps(line, separators=(",", ":")).encode()
        with self.lock, contextlib.suppress(OSError):  # a full disk is reported where it matters
            if self.descriptor < 0:
                return
            if self.size + len(text) > MAX_FILE_BYTES:
                os.close(self.descriptor)
                self.descriptor = -1  # if no new file can be opened, nothing more is recorded
                self.file.rename(self.file.with_suffix(".spans.before"))
                self.open()
            self.size += os.write(self.descriptor, text)

    def close(self) -> None:
        with self.lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
            self.descriptor = -1


_timeline: Timeline | None = None  # of this process, which is one worker or the driver


def open_timeline(name: str, logs: Path) -> None:
    """Opens the timeline of this process, which is called `name`."""
    global _timeline
    close_timeline()
    with contextlib.suppress(OSError):  # a host without the run directory
        _timeline = Timeline(logs / f"{name}.spans")


def close_timeline() -> None:
    global _timeline
    if _timeline:
        _timeline.close()
    _timeline = None


@contextlib.contextmanager
def span(name: str, **facts: Any) -> Iterator[Facts]:
    """Records a block of work. Its line also has what the block puts into the dictionary."""
    at, began = time.time(), time.perf_counter()
    try:
        yield facts
    finally:
        if _timeline:
            _timeline.add(name, at, time.perf_counter() - began, facts)


def recorded(facts: Callable[..., Facts] | None = None, *, name: str = "") -> Callable[[F], F]:
    """Decorates a function so that each call is recorded as a span of its name, with `facts(*arguments)`.

    A function that yields samples records each of them.
    """

    def wrap(function: F) -> F:
        span_name = name or function.__name__

        def call_facts(arguments: tuple[Any, ...]) -> Facts:
            return facts(*arguments) if facts else {}

        @functools.wraps(function)
        def plain(*arguments: Any, **options: Any) -> Any:
            with span(span_name, **call_facts(arguments)):
                return function(*arguments, **options)

        @functools.wraps(function)
        async def awaited(*arguments: Any, **options: Any) -> Any:
            with span(span_name, **call_facts(arguments)):
                return await function(*arguments, **options)

        @functools.wraps(function)
        async def streamed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            with span(span_name, **call_facts(arguments)) as span_facts:
                span_facts["samples"] = samples = []
                async with contextlib.aclosing(function(*arguments, **options)) as stream:
                    async for finished in stream:
                        now = round(time.perf_counter() - began, 6)
                        samples += [[s.uid, s.index, now, len(s.tokens)] for s in finished]
                        yield finished

        if inspect.isasyncgenfunction(function):
            return cast(F, streamed)
        return cast(F, awaited if inspect.iscoroutinefunction(function) else plain)

    return wrap


def step_facts(trainer: Any, step: int) -> Facts:
    return {"step": step}


def request_facts(engine: Any, requests: list[Request]) -> Facts:
    """Returns the facts of a call that generates: its requests."""
    return {"requests": [[r.uid, r.index, len(r.partial.tokens) if r.partial else 0] for r in requests]}


def pack_facts(worker: Any, packs: Iterable[Pack], *others: Any) -> Facts:
    """Returns the facts of a call that scores or updates: the size of its packs."""
    packs = list(packs)
    return {
        "packs": len(packs),
        "tokens": sum(len(p.tokens) for p in packs),
        "pairs": round(sum(p.pairs for p in packs)),
    }
