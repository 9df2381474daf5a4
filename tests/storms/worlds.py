"""All worlds by name, and how many schedules of each a storm has."""

from collections.abc import Callable

from engine_storms import Engines
from episode_storms import Episodes
from reward_storms import Rewards
from schedules import World
from trainer_storms import Trainers

WORLDS: dict[str, Callable[[int], World]] = {
    "engines": Engines,
    "episodes": Episodes,
    "rewards": Rewards,
    "trainer": Trainers,
}
SHARES = {"engines": 50, "episodes": 20, "rewards": 20, "trainer": 10}
