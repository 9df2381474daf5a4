"""The episodes that the driver has given to an engine, and what it is told of them.

driver ──requests──▶ EngineEpisodes ──▶ TurnLoop ◀──▶ episode workers
       ◀─Progress──                 ──turns──▶ engine
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlsys.types import Request, Sample
from workers.fleet.watchdog import POLL_S, Watchdog
from workers.turns.messages import batching_s
from workers.turns.pool import EpisodePool, Life, LostLife
from workers.turns.turn_loop import TurnLoop

NEWS_S = 0.25  # or a quarter of the time so far: between two messages to the driver, which cost it milliseconds
SIGN_OF_LIFE_S = 5.0  # or watchdog.stall_s / 4: between two messages, unless the engine owes turns and none comes


@dataclass
class Progress:
    """What the driver is told."""

    finished: list[Sample] = field(default_factory=list)
    between_turns: int = 0  # episodes for which the engine has nothing to do: it may begin as many others
    lost: list[LostLife] = field(default_factory=list)  # to be replaced
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # for events.jsonl
    notes: list[str] = field(default_factory=list)  # for the screen
    error: Exception | None = None  # that ends the run


Tell = Callable[[Progress], None]


class EngineEpisodes:
    """`begin` episodes; then `exchange` and `accept` in turn, while it `is_open`. `line` as in `EpisodePool`."""

    def __init__(self, engine: str, line: int, watchdog: Watchdog, wake: Callable[[], object]):
        """`wake` is called on any thread when there is something to exchange."""
        self.engine, self.line, self.wake = engine, line, wake
        self.watchdog = replace(watchdog, note=self.note, event=self.event)
        self.now = watchdog.threads.now
        self.sign_of_life_s = min(SIGN_OF_LIFE_S, watchdog.stall_s / 4)
        self.loop: TurnLoop
        self.callers: dict[tuple[str, int], Tell] = {}  # of the driver, by episode
        self.news = Progress()  # that it was not told yet, but for finished episodes
        self.began_at = self.told_at = 0.0  # by `now`
        self.is_alive = True  # something has come since, or the engine owes nothing

    def use(self, lives: Mapping[str, Life]) -> None:
        """Names the episode workers: at first, and again when the driver has replaced one."""
        if hasattr(self, "loop"):
            self.loop.pool.use(lives)
        else:
            pool = EpisodePool(self.engine, self.line, lives, self.watchdog)
            pool.on_arrival(self.wake)
            self.loop = TurnLoop(pool, pool.first_number)
        self.wake()

    def begin(self, requests: list[Request], tell: Tell) -> None:
        if not self.is_open:
            self.began_at = self.told_at = self.now()
        self.callers |= {(r.uid, r.index): tell for r in requests}
        self.loop.begin(requests)

    def drop(self, tell: Tell) -> None:
        """Ends the episodes for which this caller does not wait any more."""
        keys = [key for key, caller in self.callers.items() if caller == tell]
        for key in keys:
            del self.callers[key]
        self.loop.drop(keys)

    def stop_early(self) -> None:
        """Ends all episodes: they come with the turns that they have. The engine is to end the turns that it samples."""
        if self.is_open:
            self.loop.stop_early()
            self.wake()

    @property
    def is_open(self) -> bool:
        return bool(self.callers) and not self.news.error

    def exchange(self) -> list[Request]:
        """Exchanges messages with episode workers and the driver. Returns turns that the engine is to sample now."""
        try:
            self.loop.exchange()
        except Exception as error:
            self.news.error = error
        self.news.lost += self.loop.pool.take_lost()
        if self.is_due():
            self.tell_driver()
        return self.loop.take_turns()

    @property
    def batching_s(self) -> float:
        """Seconds for which messages wait for others. None waits while the engine has no work."""
        return batching_s(len(self.loop.by_key)) if self.loop.sampled else 0.0

    @property
    def patience_s(self) -> float:
        """Seconds until the next exchange, unless `wake` is called."""
        return NEWS_S if self.loop.finished else POLL_S

    def accept(self, turns: Iterable[Sample]) -> None:
        self.loop.accept(turns)
        self.is_alive = True
        self.wake()

    # --- what the driver is told -------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        loop, news, waited_s = self.loop, self.news, self.now() - self.told_at
        self.is_alive |= not loop.sampled
        if news.error or news.lost or news.notes or (loop.finished and not loop.by_key):
            return True
        if loop.finished or loop.between_turns != news.between_turns:
            return waited_s >= min(NEWS_S, (self.told_at - self.began_at) / 4)
        return self.is_alive and waited_s >= self.sign_of_life_s

    def tell_driver(self) -> None:
        """Gives each caller its episodes, and one of them all else."""
        between = self.news.between_turns = self.loop.between_turns
        progress_of = {next(iter(self.callers.values())): self.news}
        for sample in self.loop.take_finished():
            if tell := self.callers.pop((sample.uid, sample.index), None):
                progress_of.setdefault(tell, Progress(between_turns=between)).finished.append(sample)
        for tell, progress in progress_of.items():
            tell(progress)
        self.news = Progress(between_turns=between, error=self.news.error)
        self.told_at, self.is_alive = self.now(), False

    def note(self, text: str) -> None:
        self.news.notes.append(text)

    def event(self, kind: str, **facts: Any) -> None:
        self.news.events.append((kind, facts))
