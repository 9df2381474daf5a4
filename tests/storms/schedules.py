"""One schedule of one world: what all worlds share, how a schedule runs, and what it tells."""

import itertools
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from launch.tools.estimates.virtual_time import EndlessWait, VirtualTime

TIMELINE = 200  # lines that are kept


class World:
    """A clock, chance, and what has happened so far."""

    name = ""
    limit_s = 20_000.0

    def __init__(self, seed: int):
        self.seed = seed
        self.rng = random.Random(f"{self.name} {seed}")
        self.time = VirtualTime(seed=f"{self.name} order {seed}", limit_s=self.limit_s)
        self.timeline: list[str] = []
        self.faults: list[str] = []  # that have happened

    def run(self) -> None:
        """The driver, in virtual time. Raises `Broken` where an invariant does not hold."""
        raise NotImplementedError

    def pass_by(self) -> None:
        self.time.run(self.run)

    def log(self, text: str) -> None:
        self.timeline.append(f"{self.time.now():10.3f}  {text}")

    def event(self, kind: str, **facts: Any) -> None:
        brief = ", ".join(f"{k}={str(v)[:60]}" for k, v in facts.items() if k not in ("stacks", "log", "uids"))
        self.log(f"event {kind}: {brief}")

    def fault(self, text: str) -> None:
        self.faults.append(text)
        self.log(f"FAULT {text}")


@dataclass
class Outcome:
    world: str
    seed: int
    problem: str = ""  # the first line says what does not hold; empty if all does
    timeline: list[str] = field(default_factory=list)
    seconds: float = 0.0  # simulated
    faults: int = 0
    events: int = 0


def run_schedule(make: Callable[[int], World], seed: int) -> Outcome:
    world = make(seed)
    problem = ""
    try:
        world.pass_by()
    except EndlessWait as error:
        problem = f"invariant 5 (every wait has somebody who owes): {error}"
    except AssertionError as error:
        problem = f"{error}" or traceback.format_exc()
    except Exception:
        problem = traceback.format_exc()
    timeline = list(itertools.islice(world.timeline, max(0, len(world.timeline) - TIMELINE), None))
    return Outcome(world.name, seed, problem, timeline, world.time.now(), len(world.faults), world.time.events)
