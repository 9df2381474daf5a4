"""The driver's handle to all episode workers.

driver ──starts, turns──▶ EpisodeWorker (actor) ──▶ EpisodeRunner ──▶ episode process (user's code)
       ◀──asks, ends─────
"""

import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from rlsys.config.schema import Config
from rlsys.errors import WorkerLost
from workers.episodes.messages import Answer, Command, Drop, Ended, Event, Start
from workers.fleet.ray_cluster import call_failed
from workers.fleet.replaceable_workers import ReplaceableWorkers
from workers.fleet.watchdog import StallTimer, Watchdog, explain_failure

DOING = "playing episodes"
Arrival = tuple[str, Any, list[Event] | Exception]  # worker, its actor, what came


class EpisodePool:
    """`begin` episodes, then `poll` what they ask, and `answer`; `flush` sends the collected messages.

    A lost worker is replaced, and the replacement plays its episodes again.
    """

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        self.config, self.watchdog = config, watchdog
        names = [f"episode-{i}" for i in range(config.episode.workers)]
        self.workers = ReplaceableWorkers(names, spawn, watchdog)
        self.playing: dict[str, dict[int, Start]] = {name: {} for name in names}
        self.worker_of: dict[int, str] = {}  # by episode
        self.waiting: dict[str, set[int]] = {name: set() for name in names}  # episodes that wait for a turn
        self.outbox: dict[str, list[Command]] = {name: [] for name in names}
        self.timers: dict[str, StallTimer] = {}
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None  # called when something has arrived, on any thread
        self.started = 0

    def start(self, model: str, window: int) -> None:
        limit = self.config.cluster.start_timeout_s
        doing = "starting the episode workers"
        notes = self.workers.call("start", model, window, doing=doing, limit_s=limit, replay=True)
        for name, actor in self.workers.actors.items():
            self.read_events(name, actor)
        for note in dict.fromkeys(note for of_worker in notes.values() for note in of_worker):
            self.watchdog.note(note)

    def read_events(self, name: str, actor: Any) -> None:
        self.timers[name] = self.watchdog.start_timer()
        events = actor.events.options(num_returns="streaming").remote()
        threading.Thread(target=self.read, args=(name, actor, events), daemon=True).start()

    def read(self, name: str, actor: Any, events: Any) -> None:
        """Puts all messages of a worker into the queue, its error last. Runs in a thread of its own."""
        try:
            for ref in events:
                self.arrivals.put((name, actor, pickle.loads(ray.get(ref))))
                self.wake()
        except RayError as error:
            self.arrivals.put((name, actor, explain_failure(call_failed(error), name, DOING, self.watchdog.logs)))
        except Exception as error:
            self.arrivals.put((name, actor, error))
        self.wake()

    def begin(self, start: Start) -> None:
        """Starts an episode, on the worker that plays the fewest."""
        name = min(self.playing, key=lambda n: len(self.playing[n]))
        self.expect_news(name)
        self.playing[name][start.number] = start
        self.worker_of[start.number] = name
        self.outbox[name].append(start)

    def answer(self, answer: Answer) -> None:
        name = self.worker_of[answer.number]
        self.expect_news(name)
        self.playing[name][answer.number].turns.append(answer.turn)
        self.waiting[name].discard(answer.number)
        self.outbox[name].append(answer)

    def drop(self, number: int) -> None:
        """Ends an episode. It may have ended: after an error nobody handles the events that `poll` has returned."""
        if name := self.worker_of.get(number):
            self.forget(name, number)
            self.outbox[name].append(Drop(number))

    def forget(self, name: str, number: int) -> None:
        del self.playing[name][number], self.worker_of[number]
        self.waiting[name].discard(number)

    def flush(self) -> None:
        for name, commands in self.outbox.items():
            if commands:
                self.workers.actors[name].send.options(num_returns=0).remote(pickle.dumps(commands))
                self.outbox[name] = []

    def expect_news(self, name: str) -> None:
        """Starts the worker's stall timer, unless it is busy already. Called before the worker gets something to do."""
        if not self.is_busy(name):
            self.timers[name].reset()

    def is_busy(self, name: str) -> bool:
        """True if some of the worker's episodes do not wait for a turn, so it has to answer."""
        return len(self.playing[name]) > len(self.waiting[name])

    def poll(self) -> list[Event]:
        """Returns all that has arrived. Replaces workers that were lost or have stalled."""
        events: list[Event] = []
        while not self.arrivals.empty():
            name, actor, news = self.arrivals.get()
            if self.workers.actors[name] is not actor:
                continue
            self.timers[name].reset()
            if isinstance(news, WorkerLost):
                self.replace(name, news)
            elif isinstance(news, Exception):
                raise news
            else:
                events += [event for event in news if self.note_event(name, event)]
        for name in self.playing:
            if (waited := self.timers[name].expired()) and self.is_busy(name):
                error = self.watchdog.report_stall([name], DOING, waited)
                if not isinstance(error, WorkerLost):
                    raise error
                self.replace(name, error)
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
        self.waiting[name].add(event.number)
        return True

    def replace(self, name: str, error: WorkerLost) -> None:
        """Replaces a worker, and starts its episodes again with the turns sampled so far."""
        self.workers.replace({name: error}, {name: self.workers.actors[name]})
        self.read_events(name, self.workers.actors[name])
        self.waiting[name].clear()
        self.outbox[name] = list(self.playing[name].values())

    def episodes_by_worker(self) -> dict[str, int]:
        """Counts the episodes that each worker plays. Any thread may call it."""
        return {name: len(playing) for name, playing in self.playing.items()}
