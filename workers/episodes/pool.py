"""The driver's handle to all episode workers.

driver ──starts, turns──▶ EpisodeWorker (actor) ──▶ EpisodeRunner ──▶ episode process (user's code)
       ◀──asks, ends─────
"""

import pickle
from collections.abc import Callable
from typing import Any

from rlsys.config.schema import Config
from rlsys.errors import WorkerLost
from workers.episodes.messages import Answer, Command, Drop, Ended, Event, Start
from workers.fleet.pool import WorkPool
from workers.fleet.replaceable_workers import ReplaceableWorkers
from workers.fleet.watchdog import Watchdog


class EpisodePool:
    """`begin` episodes, then `poll` what they ask, and `answer`; `flush` sends the collected messages.

    A worker owes an answer for the episodes that do not wait for a turn. A lost worker is replaced, and the replacement
    plays its episodes again.
    """

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        self.config, self.watchdog = config, watchdog
        names = [f"episode-{i}" for i in range(config.episode.workers)]
        self.workers = ReplaceableWorkers(names, spawn, watchdog)
        self.pool: WorkPool[int, Start] = WorkPool(self.workers, watchdog, "playing episodes")
        self.playing: dict[str, dict[int, Start]] = {name: {} for name in names}
        self.worker_of: dict[int, str] = {}  # by episode
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
        """Starts an episode, on the worker that plays the fewest."""
        name = min(self.playing, key=lambda n: len(self.playing[n]))
        self.pool.give(name, {start.number: start})
        self.playing[name][start.number] = start
        self.worker_of[start.number] = name
        self.outbox[name].append(start)

    def answer(self, answer: Answer) -> None:
        name = self.worker_of[answer.number]
        start = self.playing[name][answer.number]
        start.turns.append(answer.turn)
        self.pool.give(name, {answer.number: start})
        self.outbox[name].append(answer)

    def drop(self, number: int) -> None:
        """Ends an episode. It may have ended: after an error nobody handles the events that `poll` has returned."""
        if name := self.worker_of.get(number):
            self.forget(name, number)
            self.outbox[name].append(Drop(number))

    def forget(self, name: str, number: int) -> None:
        del self.playing[name][number], self.worker_of[number]
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
                self.replace(line.worker, news)
            elif isinstance(news, Exception):
                raise news
            else:
                events += [event for event in pickle.loads(news) if self.note_event(line.worker, event)]
        return events

    def note_event(self, name: str, event: Event) -> bool:
        """Returns whether the event is new: the episode is still played, and has not been sent the turn that it asks for."""
        if event.number not in self.playing[name]:
            return False
        if isinstance(event, Ended):
            self.forget(name, event.number)
            return True
        start = self.playing[name][event.number]
        start.history, turns = event.history, start.turns
        if event.turn < len(turns) and turns[event.turn].observation == event.observation:
            return False  # a new worker asked before the answer to the old one reached it
        del turns[event.turn :]
        self.pool.held[name].pop(event.number, None)  # it waits for a turn
        return True

    def replace(self, name: str, error: WorkerLost) -> None:
        """Replaces a worker, and starts its episodes again with the turns sampled so far."""
        self.pool.lose(name)
        self.pool.replace(name, error)
        self.pool.open(name, "events", stream=True)
        self.pool.give(name, self.playing[name])
        self.outbox[name] = list(self.playing[name].values())

    def episodes_by_worker(self) -> dict[str, int]:
        """Counts the episodes that each worker plays. Any thread may call it."""
        return {name: len(playing) for name, playing in self.playing.items()}
