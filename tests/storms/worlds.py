"""All worlds by name, and how many schedules of each a storm has."""

from collections.abc import Callable

from engines import Engines
from schedules import World
from trainer import Trainers

WORLDS: dict[str, Callable[[int], World]] = {"engines": Engines, "trainer": Trainers}
SHARES = {"engines": 90, "trainer": 10}
