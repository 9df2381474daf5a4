"""`gymnasium:ID`: Gymnasium's environments whose observations and actions can be written as text.

    episode:
      play: gymnasium:FrozenLake-v1
      options: {is_slippery: false, actions: [left, down, right, up]}

`actions` names the numbers of a discrete action; `prompt` stands in front of the first observation. All else goes to
`gymnasium.make`. ID may be `module:ID`, where importing the module registers it. The reward of each step is the score
of its turn. Without ansi rendering, an observation is written as its numbers.
"""

import asyncio
import importlib
import re
from typing import Any

from rlsys.episodes.ask import Ask
from rlsys.episodes.environments.package import first_line, import_package, row_seed
from rlsys.errors import ConfigError

MAX_NUMBERS = 64  # in an observation or an action; more are a picture
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
COLORED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)
COLORS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


async def play(name: str, row: dict[str, Any], ask: Ask, /, **options: Any) -> float:
    game = await asyncio.to_thread(Game, name, options)
    try:
        text = await asyncio.to_thread(game.start, row_seed(row), str(row.get("prompt") or ""))
        while not game.over:
            reply = await ask(text)
            action = game.read_action(reply.text)
            if action is None:
                text = f"Your reply has no valid action. {game.instruction}"
                continue
            text, reward = await asyncio.to_thread(game.step, action)
            reply.score(reward)
    finally:
        await asyncio.to_thread(game.env.close)
    return 0.0  # turns have their scores


def check(name: str, options: dict[str, Any]) -> None:
    Game(name, options).env.close()


class Game:
    """One environment, in text. Raises `ConfigError` if it cannot be written as text."""

    def __init__(self, name: str, options: dict[str, Any]):
        self.name = name
        settings = dict(options)
        self.prompt, self.actions = settings.pop("prompt", ""), settings.pop("actions", [])
        self.env = make(name, settings)
        self.space = self.env.action_space
        self.renders = self.env.render_mode == "ansi"
        self.over = False
        if problem := self.find_problem():
            self.env.close()
            raise ConfigError(f"gymnasium:{name}: {problem}")

    def find_problem(self) -> str:
        observation, space = self.env.observation_space, self.space
        if not self.renders and count_numbers(observation) > MAX_NUMBERS:
            return f"its observations, {observation}, cannot be written as text; write a play of your own."
        if count_numbers(space) > MAX_NUMBERS or kind_of(space) in ("Tuple", "Dict"):
            return f"its actions, {space}, cannot be read from a reply; write a play of your own."
        if self.actions and not are_names(self.actions):
            return f"episode.options.actions must be a list of different words; it is {self.actions!r:.80}."
        if self.actions and (kind_of(space) != "Discrete" or len(self.actions) != space.n):
            return f"episode.options.actions has {len(self.actions)} names; its actions are {space}."
        return ""

    @property
    def instruction(self) -> str:
        space = self.space
        if self.actions:
            return f"Reply with one of: {', '.join(self.actions)}."
        if kind_of(space) == "Discrete":
            return f"Reply with a whole number from {space.start} to {space.start + space.n - 1}."
        if kind_of(space) == "Text":
            return ""
        return f"Reply with numbers: {count_numbers(space)}, in {space}."

    def start(self, seed: int, prompt: str) -> str:
        observation, _ = self.env.reset(seed=seed)
        title = prompt or self.prompt or f"You are in {self.name}."
        return f"{title}\n{self.describe(observation)}\n{self.instruction}".strip()

    def step(self, action: Any) -> tuple[str, float]:
        observation, reward, terminated, truncated, _ = self.env.step(action)
        self.over = bool(terminated or truncated)
        return self.describe(observation), float(reward)

    def describe(self, observation: Any) -> str:
        text = describe(self.env.observation_space, observation)
        return f"{name_colors(self.env.render()).strip()}\nobservation: {text}" if self.renders else text

    def read_action(self, reply: str) -> Any:
        """Returns the last action that a reply names; None if it names none that is valid."""
        space = self.space
        if kind_of(space) == "Text":
            return reply if space.contains(reply) else None
        if self.actions:
            words = "|".join(map(re.escape, sorted(self.actions, key=len, reverse=True)))
            named = re.findall(rf"(?<!\w)(?:{words})(?!\w)", reply, re.IGNORECASE)
            lower = [str(a).lower() for a in self.actions]
            return space.start + lower.index(named[-1].lower()) if named else None
        size = count_numbers(space)
        numbers = [float(n) for n in NUMBER.findall(reply)][-size:]
        if len(numbers) < size or not fit(space.dtype, numbers):
            return None
        action = space.dtype.type(numbers[0]) if not space.shape else shape_numbers(space, numbers)
        return action if space.contains(action) else None


def make(name: str, settings: dict[str, Any]) -> Any:
    gymnasium = import_package("gymnasium", f"gymnasium:{name}", "gymnasium")
    module, _, env_id = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        creator = gymnasium.spec(env_id).entry_point
        if isinstance(creator, str):
            creator = gymnasium.envs.registration.load_env_creator(creator)
        modes = getattr(creator, "metadata", {}).get("render_modes", ())
        return gymnasium.make(env_id, **({"render_mode": "ansi"} if "ansi" in modes else {}) | settings)
    except Exception as error:  # an environment may raise anything for its options
        raise ConfigError(f"gymnasium:{name}: {first_line(error)}.") from None


def kind_of(space: Any) -> str:
    return type(space).__name__


def count_numbers(space: Any) -> int:
    """Returns how many numbers a value of the space has; a text counts as one."""
    if kind_of(space) in ("Tuple", "Dict"):
        parts = space.spaces.values() if kind_of(space) == "Dict" else space.spaces
        return sum(map(count_numbers, parts))
    if kind_of(space) in ("Discrete", "Text"):
        return 1
    size = 1
    for length in space.shape if kind_of(space) in ("Box", "MultiBinary", "MultiDiscrete") else (MAX_NUMBERS + 1,):
        size *= length
    return size


def describe(space: Any, value: Any) -> str:
    """Returns a value as text.  Discrete: 14    Tuple: 14, 10, 0    Dict: door: 1, key: 0    Box: [0.5, -1]"""
    if kind_of(space) == "Tuple":
        return ", ".join(describe(s, v) for s, v in zip(space.spaces, value, strict=True))
    if kind_of(space) == "Dict":
        return ", ".join(f"{key}: {describe(s, value[key])}" for key, s in space.spaces.items())
    if kind_of(space) == "Text":
        return str(value)
    return write_numbers(value.tolist() if hasattr(value, "tolist") else value)


def write_numbers(value: Any) -> str:
    return f"[{', '.join(map(write_numbers, value))}]" if isinstance(value, list) else f"{float(value):.6g}"


def are_names(actions: Any) -> bool:
    if not isinstance(actions, list) or not all(isinstance(a, str) and a.strip() for a in actions):
        return False
    return len({a.lower() for a in actions}) == len(actions)


def fit(dtype: Any, numbers: list[float]) -> bool:
    """Returns whether the type holds these numbers: none is too large, or has a fraction where it takes whole ones."""
    import numpy as np

    if np.issubdtype(dtype, np.floating):
        return all(abs(n) <= np.finfo(dtype).max for n in numbers)
    limits = np.iinfo(dtype)
    return all(n.is_integer() and limits.min <= int(n) <= limits.max for n in numbers)


def shape_numbers(space: Any, numbers: list[float]) -> Any:
    import numpy as np

    return np.array(numbers, space.dtype).reshape(space.shape)


def name_colors(text: str) -> str:
    """Writes a terminal's colors as words.  "S\\x1b[41mF\\x1b[0m" -> "S(red F)" """
    return COLORED.sub(lambda m: f"({COLORS[int(m[1].split(';')[0]) % 10 % 8]} {m[2]})", text)
