"""All worlds by name, and how many schedules of each a storm has."""

from collections.abc import Callable

from engines import Engines
from episodes import Episodes
from rewards import Rewards
from schedules import World
from trainer import Trainers

WORLDS: dict[str, Callable[[int], World]] = {
    "engines": Engines,
    "episodes": Episodes,
    "rewards": Rewards,
    "trainer": Trainers,
}
SHARES = {"engines": 50, "episodes": 20, "rewards": 20, "trainer": 10}
