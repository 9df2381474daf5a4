"""An engine's handle to all episode workers.

engine ──starts, turns──▶ EpisodeWorker (actor) ──▶ EpisodeRunner ──▶ episode process (user's code)
       ◀──asks, ends─────

The driver has no part in this: it hears of whole episodes, and of lost workers, which it replaces.
"""

import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlsys.errors import WorkerLost
from workers.fleet.cluster import END, Actor
from workers.fleet.pool import WorkPool
from workers.fleet.watchdog import Watchdog
from workers.turns.messages import LINE_BITS, Answer, Asked, Command, Drop, Event, Lost, Start


@dataclass(frozen=True)
class Life:
    """One process of an episode worker: its replacement is another life."""

    number: int
    actor: Actor


@dataclass(frozen=True)
class LostLife:
    worker: str
    number: int
    error: WorkerLost


class Lives:
    """Stands for `ReplaceableWorkers` in an engine, which has the driver replace workers: `lost` is what it is told."""

    def __init__(self, lives: Mapping[str, Life]):
        self.actors = {name: life.actor for name, life in lives.items()}
        self.numbers = {name: life.number for name, life in lives.items()}
        self.lost: list[LostLife] = []
        self.under_way: list[str] = []

    def replace(self, lost: dict[str, WorkerLost], actors: dict[str, Actor]) -> None:
        self.lost += [LostLife(name, self.numbers[name], error) for name, error in lost.items()]


class EpisodePool:
    """`begin` plays, then `poll` what they ask, and `answer`; `flush` sends the collected messages.

    A worker owes an answer for the plays that do not wait for a turn. It keeps nothing: the plays of a lost one are `Lost`.
    """

    def __init__(self, engine: str, line: int, lives: Mapping[str, Life], watchdog: Watchdog):
        """`line` names this process of the engine: numbers of its plays begin with it."""
        self.engine, self.line, self.watchdog = engine, line, watchdog
        self.lives = Lives(lives)
        self.pool: WorkPool[int, None] = WorkPool(self.lives, watchdog, "playing episodes")
        self.playing: dict[str, set[int]] = {}  # numbers of plays, by worker that is there
        self.worker_of: dict[int, str] = {}  # by play
        self.unplaced: dict[int, Start] = {}  # while no worker is there
        self.asked: Counter[int] = Counter()  # turns, by play
        self.answered: Counter[int] = Counter()  # of these
        self.outbox: dict[str, list[Command]] = {}
        self.lost: list[Event] = []  # plays of workers that the driver has replaced before their loss was noticed here
        for name in lives:
            self.open(name)

    @property
    def first_number(self) -> int:
        return self.line << LINE_BITS

    def open(self, name: str) -> None:
        self.playing[name], self.outbox[name] = set(), []
        self.watchdog.cluster.tell(self.lives.actors[name], "begin_line", self.engine, self.line)
        self.pool.open(name, "events", self.line, stream=True)

    def use(self, lives: Mapping[str, Life]) -> None:
        """Goes on with the workers that the driver has put in the place of lost ones."""
        for name, life in lives.items():
            if life.number != self.lives.numbers[name]:
                self.lost += self.lose(name)
                self.pool.lose(name)
                self.lives.actors[name], self.lives.numbers[name] = life.actor, life.number
                self.open(name)
        unplaced, self.unplaced = self.unplaced, {}
        for start in unplaced.values():
            self.begin(start)

    def on_arrival(self, wake: Callable[[], object]) -> None:
        """From now on `wake` is called when something has arrived, on any thread."""
        self.pool.on_arrival = wake

    def begin(self, start: Start) -> None:
        """Starts a play, on the worker that has the fewest."""
        if not self.playing:
            self.unplaced[start.number] = start
            return
        name = min(self.playing, key=lambda n: len(self.playing[n]))
        self.playing[name].add(start.number)
        self.worker_of[start.number] = name
        self.send(start)

    def answer(self, answer: Answer) -> None:
        if answer.number in self.worker_of:  # else its worker was lost since it asked, which `poll` has told too
            self.answered[answer.number] += 1
            self.send(answer)

    def send(self, command: Start | Answer) -> None:
        """From now on the worker has something to do for this play, unless it waits for another turn as well."""
        name = self.worker_of[command.number]
        if self.asked[command.number] == self.answered[command.number]:
            self.pool.give(name, {command.number: None})
        self.outbox[name].append(command)

    def drop(self, number: int) -> None:
        """Ends a play. It may have ended: after an error nobody handles the events that `poll` has returned."""
        self.unplaced.pop(number, None)
        if name := self.worker_of.get(number):
            self.forget(name, number)
            self.outbox[name].append(Drop(number))

    def forget(self, name: str, number: int) -> None:
        del self.worker_of[number]
        self.playing[name].discard(number)
        self.pool.held[name].pop(number, None)
        self.asked.pop(number, None)
        self.answered.pop(number, None)

    def flush(self) -> None:
        for name, commands in self.outbox.items():
            if commands:
                self.watchdog.cluster.tell(self.lives.actors[name], "send", pickle.dumps(commands))
                self.outbox[name] = []

    def poll(self) -> list[Event]:
        """Returns all that has arrived."""
        events, self.lost = self.lost, []
        while arrival := self.pool.poll(0):
            line, news = arrival
            if isinstance(news, WorkerLost):
                events += self.lose(line.worker)
                self.pool.replace(line.worker, news)
            elif isinstance(news, Exception):
                raise news
            elif (
                news is END
            ):  # the worker has heard of another process of this engine: a lost one, whose word came late
                events += self.lose(line.worker)
                self.pool.lose(line.worker)
                self.open(line.worker)
            else:
                events += [event for event in pickle.loads(news) if self.note_event(line.worker, event)]
        return events

    def take_lost(self) -> list[LostLife]:
        """Returns what the driver is to replace."""
        lost, self.lives.lost = self.lives.lost, []
        return lost

    def note_event(self, name: str, event: Event) -> bool:
        """Returns whether it is news of a play that is known. After a question it waits, and the worker owes nothing for it."""
        if event.number not in self.playing.get(name, ()):
            return False
        if isinstance(event, Asked):
            if event.turn < self.asked[event.number]:  # a stream may give an answer twice
                return False
            self.asked[event.number] += 1
            self.pool.held[name].pop(event.number, None)
        else:
            self.forget(name, event.number)
        return True

    def lose(self, name: str) -> list[Event]:
        """Forgets a worker. Its plays are lost."""
        lost: list[Event] = [Lost(number) for number in sorted(self.playing.get(name, ()))]
        for event in lost:
            self.forget(name, event.number)
        self.playing.pop(name, None)
        self.outbox[name] = []
        return lost
