"""What worlds of replaceable workers share: their faults, who may be replaced, and when a run may end."""

from pathlib import Path
from typing import Any, ClassVar

from invariants import require
from schedules import World
from simulated_cluster import SimulatedActor, SimulatedCluster

from rlsys.errors import StepAbandoned, WorkerFailed, WorkerLost
from rlsys.runs.stopping import StopSignal
from workers.fleet.cluster import Receive
from workers.fleet.watchdog import Watchdog

STALL_S, START_S = 30.0, 60.0


class Worker(SimulatedActor):
    """An actor that may suffer a fault of `kinds`: at a moment, or at a step of what it does."""

    world: "Fleet"
    kinds: tuple[str, ...] = ("dies", "dies", "its node dies", "stalls", "pauses")

    def __init__(self, world: "Fleet", name: str):
        super().__init__(world, name)
        self.replaces, self.spawned_at, self.served = name in world.actors, world.time.now(), False
        if world.fault_budget and world.rng.random() < world.fault_rate:
            world.fault_budget -= 1
            kind = world.rng.choice(self.kinds)
            if world.rng.random() < 0.5:
                world.time.after(world.rng.expovariate(1 / world.fault_delay_s), lambda: self.suffer(kind))
            else:
                self.at_step(world.rng.randint(1, 40), lambda: self.suffer(kind))

    def suffer(self, kind: str) -> None:
        if self.dead or self.faulty:
            return
        self.world.fault(f"{self.name} {kind}")
        if kind == "stalls":
            self.stall()
        elif kind == "pauses":
            self.pause(self.world.rng.uniform(0, STALL_S * 0.2))
        elif kind in ("dies", "its node dies"):
            self.die(node_died=kind == "its node dies")
        else:
            self.suffer_own(kind)

    def receive(self, method: str, arguments: tuple[Any, ...], receive: Receive, stream: bool) -> None:
        self.served |= stream
        super().receive(method, arguments, receive, stream)

    def be_killed(self) -> None:
        require(6, self.faulty or self.is_half_set_up, f"{self.name} was replaced")
        super().be_killed()

    @property
    def is_half_set_up(self) -> bool:
        """It was to replace a worker together with another one, which was lost: both begin again."""
        others = [other for other in self.world.actors.values() if other.faulty and isinstance(other, Worker)]
        return self.replaces and not self.served and any(other.spawned_at == self.spawned_at for other in others)

    def suffer_own(self, kind: str) -> None:
        """A fault that only this kind of worker knows."""
        raise NotImplementedError


class Fleet(World):
    """`kinds` are the classes of workers by the first word of their names."""

    kinds: ClassVar[dict[str, type[SimulatedActor]]]
    faults_to_end = 3  # fewer never end a run

    def __init__(self, seed: int):
        super().__init__(seed)
        rng = self.rng
        self.fault_rate, self.fault_budget = rng.choice([0, 0.1, 0.3, 0.6]), rng.randint(0, 4)
        self.fault_delay_s = rng.choice([1.0, 10.0, 100.0])
        self.actors: dict[str, SimulatedActor] = {}
        self.replaced_at, self.stop_at_replacement = 0.0, False
        self.cluster, self.stop = SimulatedCluster(self), StopSignal(self.time)
        self.watchdog = Watchdog(
            Path("/nonexistent"), STALL_S, self.stop, self.log, self.event, self.cluster, self.time
        )

    def some(self, mean: float, most: float = STALL_S * 0.1) -> float:
        """A duration."""
        return min(self.rng.expovariate(1 / mean), most)

    def spawn(self, name: str) -> SimulatedActor:
        if name in self.actors:
            self.replaced_at = self.time.now()
            if self.stop_at_replacement:
                self.stop_at_replacement = False
                self.time.after(self.rng.expovariate(0.2), self.terminate)
        self.log(f"spawn {name}")
        self.actors[name] = self.kinds[name.partition("-")[0]](self, name)
        return self.actors[name]

    def run(self) -> None:
        self.stop_at_replacement = self.rng.random() < 0.15
        if self.rng.random() < 0.1:
            self.time.after(self.rng.expovariate(1 / 50), self.terminate)
        try:
            self.drive()
        except StepAbandoned:
            require(12, self.stop.requested, "a step was abandoned without a stop")
        except WorkerLost as error:
            self.log(f"ended: {error}")
            lost = [fault for fault in self.faults if "pauses" not in fault]
            require(12, len(lost) >= self.faults_to_end, f"the run ended after {len(lost)} faults: {error}")
        except WorkerFailed as error:
            require(12, False, f"the run ended: {error}")

    def terminate(self) -> None:
        self.log("SIGTERM")
        self.stop.request(self.rng.choice([0.0, 1.0, 25.0]))
        self.stop.step_running = True

    def drive(self) -> None:
        raise NotImplementedError


def number_of(value: Any) -> int:
    """A number that is another one for another value, mostly."""
    return sum(i * ord(c) for i, c in enumerate(repr(value), 1))
