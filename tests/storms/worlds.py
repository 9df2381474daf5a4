"""All worlds by name, and how many schedules of each a storm has."""

from collections.abc import Callable

from engines import Engines
from schedules import World

WORLDS: dict[str, Callable[[int], World]] = {"engines": Engines}
SHARES = {"engines": 70}
