"""Plays the episodes of an engine on its event loop."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path

from rlsys.types import Request, Sample
from workers.fleet.watchdog import Watchdog
from workers.turns.engine_episodes import EngineEpisodes, Progress
from workers.turns.pool import Life


class EpisodePlays:
    """`play` episodes, of which `sample(turns)` samples the turns."""

    def __init__(
        self, engine: str, logs: Path, stall_s: float, sample: Callable[[list[Request]], AsyncIterator[list[Sample]]]
    ):
        self.sample, self.arrived = sample, asyncio.Event()
        self.episodes = EngineEpisodes(engine, secrets.randbits(28), Watchdog(logs, stall_s), self.wake)
        self.exchanging: asyncio.Task[None] | None = None
        self.sampling: set[asyncio.Task[None]] = set()
        self.callers: set[asyncio.Queue[Progress | Exception]] = set()

    def use(self, lives: Mapping[str, Life]) -> None:
        """Names the episode workers: at first, and again when the driver has replaced one."""
        self.event_loop = asyncio.get_running_loop()
        self.episodes.use(lives)

    def wake(self) -> None:
        self.event_loop.call_soon_threadsafe(self.arrived.set)

    async def play(self, requests: list[Request]) -> AsyncGenerator[Progress, None]:
        """Yields episodes as they end, and what else the driver is to know."""
        queue: asyncio.Queue[Progress | Exception] = asyncio.Queue()
        missing = {(r.uid, r.index) for r in requests}
        self.callers.add(queue)
        try:
            self.episodes.begin(requests, queue.put_nowait)
            if not self.exchanging or self.exchanging.done():
                self.exchanging = asyncio.create_task(self.exchange_until_done())
            while missing:
                progress = await queue.get()
                if isinstance(progress, Exception):
                    raise progress
                missing -= {(sample.uid, sample.index) for sample in progress.finished}
                yield progress
        finally:
            self.callers.discard(queue)
            self.episodes.drop(queue.put_nowait)

    def stop_early(self) -> None:
        """Ends all episodes: they come with the turns that they have. The engine is to end the turns that it samples."""
        self.episodes.stop_early()

    async def exchange_until_done(self) -> None:
        """Runs once for all callers of `play`."""
        while self.episodes.is_open:
            self.arrived.clear()
            if turns := self.episodes.exchange():
                task = asyncio.create_task(self.sample_turns(turns))
                self.sampling.add(task)
                task.add_done_callback(self.sampling.discard)
            await asyncio.sleep(self.episodes.batching_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.arrived.wait(), self.episodes.patience_s)

    async def sample_turns(self, turns: list[Request]) -> None:
        try:
            async for samples in self.sample(turns):
                self.episodes.accept(samples)
        except Exception as error:
            for queue in self.callers:
                queue.put_nowait(error)
