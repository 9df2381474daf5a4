"""Workers without processes: a `Cluster` whose actors are generators on a virtual clock.

    def generate(self, requests):        a method of an actor
        yield 2.5                        time passes
        yield call                       another worker's answer is there
        yield Answer(samples)            the next of a stream
        return value                     the answer of a call

Answers are late. A dead actor's calls fail, later. A stalled one does nothing, until it is killed or goes on: a kill may
not reach it, and then it still answers those who asked it. A stream may give an answer twice.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from schedules import World

from workers.fleet.cluster import END, CallFailed, Receive

Steps = Generator[Any, Any, Any]


@dataclass
class Answer:
    value: Any


class Signal:
    """Several tasks wait for it, each once."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.waiting: list[Callable[[], None]] = []

    def then(self, go: Callable[[], None]) -> None:
        self.waiting.append(go)

    def give(self) -> None:
        waiting, self.waiting = self.waiting, []
        for go in waiting:
            self.world.time.after(0.0, go)


class SimulatedCall(Signal):
    """What a `Cluster` calls a call."""

    done, value = False, None

    def then(self, go: Callable[[], None]) -> None:
        if self.done:
            go()
        else:
            super().then(go)

    def set(self, value: Any) -> None:
        self.done, self.value = True, value
        self.give()


class SimulatedCluster:
    """Implements `workers.fleet.cluster.Cluster`."""

    def __init__(self, world: World):
        self.world = world
        self.waiting: list[Any] = []  # threads, for any answer

    def call(self, actor: "SimulatedActor", method: str, *arguments: Any) -> SimulatedCall:
        call = SimulatedCall(self.world)

        def receive(news: Any) -> None:
            if not call.done:
                call.set(news)
                self.world.time.wake_all(self.waiting)

        actor.receive(method, arguments, receive, stream=False)
        return call

    def wait(self, calls: Sequence[SimulatedCall], count: int, timeout_s: float) -> list[SimulatedCall]:
        until = self.world.time.now() + timeout_s
        while True:
            done = [call for call in calls if call.done]
            left = until - self.world.time.now()
            if len(done) >= count or left <= 0:
                return done[:count]
            self.world.time.wait(self.waiting, left)

    def answer(self, call: SimulatedCall) -> Any:
        while not call.done:
            self.world.time.wait(self.waiting)
        if isinstance(call.value, CallFailed):
            raise call.value
        return call.value

    def ask(self, actor: "SimulatedActor", method: str, *arguments: Any, receive: Receive) -> None:
        actor.receive(method, arguments, receive, stream=False)

    def stream(self, actor: "SimulatedActor", method: str, *arguments: Any, receive: Receive) -> None:
        actor.receive(method, arguments, receive, stream=True)

    def tell(self, actor: "SimulatedActor", method: str, *arguments: Any) -> None:
        actor.receive(method, arguments, lambda news: None, stream=False)

    def kill(self, actor: "SimulatedActor") -> None:
        actor.be_killed()


class Task:
    """One call of an actor's method, under way."""

    def __init__(self, actor: "SimulatedActor", steps: Steps, receive: Receive, stream: bool):
        self.actor, self.steps, self.receive, self.stream = actor, steps, receive, stream
        self.last_arrival = 0.0  # answers of one call come in order

    def go(self) -> None:
        actor, time = self.actor, self.actor.world.time
        actor.step()
        if actor.dead:
            return
        if actor.stalled:
            actor.frozen.append(self)
            return
        try:
            step = next(self.steps)
        except StopIteration as end:
            self.end(END if self.stream else end.value)
        except WorkerRaises as error:
            self.end(CallFailed(f"{error}", error.raised))
        else:
            if isinstance(step, float):
                time.after(step, self.go)
            elif isinstance(step, Signal):
                step.then(self.go)
            else:
                self.deliver(step.value)
                if actor.world.rng.random() < 0.02:
                    self.deliver(step.value)
                time.after(0.0, self.go)

    def end(self, news: Any) -> None:
        self.actor.tasks.pop(self, None)
        self.deliver(news)

    def deliver(self, news: Any) -> None:
        world = self.actor.world
        self.last_arrival = max(self.last_arrival + 1e-6, world.time.now() + world.rng.expovariate(50))
        world.time.after(self.last_arrival - world.time.now(), lambda: self.receive(news))


class WorkerRaises(Exception):
    """What a worker's method raises."""

    def __init__(self, raised: Exception):
        super().__init__(str(raised))
        self.raised = raised


class SimulatedActor:
    def __init__(self, world: World, name: str):
        self.world, self.name = world, name
        self.dead = self.stalled = self.faulty = False
        self.stalled_at = 0.0
        self.tasks: dict[Task, None] = {}
        self.frozen: list[Task] = []
        self.last_arrival, self.steps_left = 0.0, 0

    def receive(self, method: str, arguments: tuple[Any, ...], receive: Receive, stream: bool) -> None:
        """Messages arrive a little later, in order. Work begins once the calls among its arguments have their answers."""
        task = Task(self, self.steps(method, arguments), receive, stream)
        self.tasks[task] = None
        if self.dead:
            self.fail(task)
        else:
            now = self.world.time.now()
            self.last_arrival = max(self.last_arrival + 1e-6, now + self.world.rng.expovariate(50))
            self.world.time.after(self.last_arrival - now, task.go)

    def at_step(self, number: int, happen: Callable[[], None]) -> None:
        """Something happens at a certain step of all that the actor does from now on."""
        self.steps_left, self.happen = number, happen

    def step(self) -> None:
        self.steps_left -= 1
        if not self.steps_left:
            self.happen()

    def steps(self, method: str, arguments: tuple[Any, ...]) -> Steps:
        calls = [a for a in arguments if isinstance(a, SimulatedCall)]
        yield from calls
        plain = [a.value if isinstance(a, SimulatedCall) else a for a in arguments]
        if failed := next((a for a in plain if isinstance(a, CallFailed)), None):
            raise WorkerRaises(RuntimeError(f"an argument could not be read: {failed}"))
        return (yield from getattr(self, method)(*plain))

    def fail(self, task: Task, node_died: bool = False) -> None:
        task.end(CallFailed(f"the actor {self.name} died", node_died=node_died))

    def die(self, node_died: bool = False) -> None:
        """The process ends, and the driver learns it later."""
        if self.dead:
            return
        self.dead = self.faulty = True
        for task in list(self.tasks):
            self.world.time.after(self.world.rng.expovariate(1), lambda task=task: self.fail(task, node_died))

    def stall(self) -> None:
        if not self.dead:
            self.stalled = self.faulty = True
            self.stalled_at = self.world.time.now()

    def go_on(self) -> None:
        self.stalled, frozen, self.frozen = False, self.frozen, []
        for task in frozen:
            task.go()

    def pause(self, seconds: float) -> None:
        """A stall that is short enough."""
        if not self.stalled and not self.dead:
            self.stalled = True
            self.world.time.after(seconds, lambda: None if self.faulty else self.go_on())

    def be_killed(self) -> None:
        """The driver gives it up. A kill takes a moment, and may not reach a stalled process, which goes on later."""
        late = self.stalled and self.world.rng.random() < 0.5
        if late:
            self.world.time.after(self.world.rng.expovariate(0.1), self.go_on)
        self.faulty = True
        self.world.time.after(self.world.rng.expovariate(0.05 if late else 0.5), self.die)
