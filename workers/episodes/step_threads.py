"""The threads of an episode process, for steps that block: `await asyncio.to_thread(step)`."""

import contextvars
import threading
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

EPISODE: contextvars.ContextVar[int] = contextvars.ContextVar("EPISODE")  # its number, for all that it starts
MAX_THREADS = 64  # each takes 8 MiB of episode.memory_mb
MAX_LEFT_THREADS = 32  # that functions and tools may leave running before the process is replaced


class StepThreads(ThreadPoolExecutor):
    """Knows which threads are busy for episodes that have ended: a step that hangs never frees its thread."""

    def __init__(self, concurrency: int):
        self.size = min(concurrency, MAX_THREADS)
        super().__init__(self.size)
        # An episode may need two more: for a tool's call, and for its Python session.
        self.most = self.size + 2 * concurrency + MAX_LEFT_THREADS
        self.busy: dict[Future[Any], int | None] = {}  # for which episode

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future = super().submit(call_step, function, *args, **options)
        self.busy[future] = EPISODE.get(None)
        future.add_done_callback(self.busy.pop)
        return future

    def are_lost(self, running: Container[int | None]) -> bool:
        """Returns whether half of these threads are busy for episodes that have ended, or too many others are left."""
        return self.lost(running) >= self.size / 2 or threading.active_count() > self.most

    def count_of(self, running: Container[int | None]) -> int:
        """Returns how many calls of these episodes have a thread or wait for one."""
        return len(self.busy) - self.lost(running)

    def lost(self, running: Container[int | None]) -> int:
        return sum(number not in running for number in list(self.busy.values()))


def call_step(function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    try:
        return function(*args, **options)
    except StopIteration as error:  # asyncio would never end
        raise RuntimeError("the step raised StopIteration") from error
