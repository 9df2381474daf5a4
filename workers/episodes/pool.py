"""The driver's handle to all episode workers.

driver ──starts, turns──▶ EpisodeWorker (actor) ──▶ EpisodeRunner ──▶ episode process (user's code)
       ◀──asks, ends─────
"""

import pickle
from collections.abc import Callable
from typing import Any

from rlsys.config.schema import Config
from rlsys.errors import WorkerLost
from workers.episodes.messages import Answer, Asked, Command, Drop, Event, Lost, Start
from workers.fleet.pool import WorkPool
from workers.fleet.replaceable_workers import ReplaceableWorkers
from workers.fleet.watchdog import Watchdog


class EpisodePool:
    """`begin` plays, then `poll` what they ask, and `answer`; `flush` sends the collected messages.

    A worker owes an answer for the plays that do not wait for a turn. It keeps nothing: the plays of a lost one are `Lost`.
    """

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        self.config, self.watchdog = config, watchdog
        names = [f"episode-{i}" for i in range(config.episode.workers)]
        self.workers = ReplaceableWorkers(names, spawn, watchdog)
        self.pool: WorkPool[int, None] = WorkPool(self.workers, watchdog, "playing episodes")
        self.playing: dict[str, set[int]] = {name: set() for name in names}  # numbers of plays
        self.worker_of: dict[int, str] = {}  # by play
        self.outbox: dict[str, list[Command]] = {name: [] for name in names}

    def start(self, model: str, window: int) -> None:
        limit = self.config.cluster.start_timeout_s
        doing = "starting the episode workers"
        notes = self.workers.call("start", model, window, doing=doing, limit_s=limit, replay=True)
        for name in self.workers.actors:
            self.pool.open(name, "events", stream=True)
        for note in dict.fromkeys(note for of_worker in notes.values() for note in of_worker):
            self.watchdog.note(note)

    def on_arrival(self, wake: Callable[[], None]) -> None:
        """From now on `wake` is called when something has arrived, on any thread."""
        self.pool.on_arrival = wake

    def begin(self, start: Start) -> None:
        """Starts a play, on the worker that has the fewest."""
        name = min(self.playing, key=lambda n: len(self.playing[n]))
        self.playing[name].add(start.number)
        self.worker_of[start.number] = name
        self.send(start)

    def answer(self, answer: Answer) -> None:
        if answer.number in self.worker_of:  # else its worker was lost since it asked, which `poll` has told too
            self.send(answer)

    def send(self, command: Start | Answer) -> None:
        """From now on the worker has something to do for this play."""
        name = self.worker_of[command.number]
        self.pool.give(name, {command.number: None})
        self.outbox[name].append(command)

    def drop(self, number: int) -> None:
        """Ends a play. It may have ended: after an error nobody handles the events that `poll` has returned."""
        if name := self.worker_of.get(number):
            self.forget(name, number)
            self.outbox[name].append(Drop(number))

    def forget(self, name: str, number: int) -> None:
        del self.worker_of[number]
        self.playing[name].discard(number)
        self.pool.held[name].pop(number, None)

    def flush(self) -> None:
        for name, commands in self.outbox.items():
            if commands:
                self.watchdog.cluster.tell(self.workers.actors[name], "send", pickle.dumps(commands))
                self.outbox[name] = []

    def poll(self) -> list[Event]:
        """Returns all that has arrived. Replaces workers that were lost or have stalled."""
        events: list[Event] = []
        while arrival := self.pool.poll(0):
            line, news = arrival
            if isinstance(news, WorkerLost):
                events += self.replace(line.worker, news)
            elif isinstance(news, Exception):
                raise news
            else:
                events += [event for event in pickle.loads(news) if self.note_event(line.worker, event)]
        return events

    def note_event(self, name: str, event: Event) -> bool:
        """Returns whether the play is still known. After a question it waits, and the worker owes nothing for it."""
        if event.number not in self.playing[name]:
            return False
        if isinstance(event, Asked):
            self.pool.held[name].pop(event.number, None)
        else:
            self.forget(name, event.number)
        return True

    def replace(self, name: str, error: WorkerLost) -> list[Event]:
        """Replaces a worker. Its plays are lost."""
        lost: list[Event] = [Lost(number) for number in sorted(self.playing[name])]
        for event in lost:
            self.forget(name, event.number)
        self.outbox[name] = []
        self.pool.replace(name, error)
        self.pool.open(name, "events", stream=True)
        return lost

    def episodes_by_worker(self) -> dict[str, int]:
        """Counts the episodes that each worker plays. Any thread may call it."""
        return {name: len(playing) for name, playing in self.playing.items()}
