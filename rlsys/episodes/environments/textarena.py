"""`textarena:GAME`: the games of TextArena, with the model as player 0.

    episode: {play: textarena:TowerOfHanoi-v0, max_turns: 20}

    episode:
      play: textarena:TicTacToe-v0
      options: {opponent: my_players.py:move}      # def move(seen: str) -> str, may be async

`players` is the number of players; without it, 1, or 2 with an `opponent`. All else goes to `textarena.make`. The score is the game's
reward. An observation holds the messages of others since the last observation.
"""

import contextlib
import inspect
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rlsys.config.plugins import load_function
from rlsys.episodes.ask import Ask
from rlsys.episodes.environments.package import first_line, import_package, row_seed
from rlsys.errors import ConfigError

MODEL = 0  # its player
OPPONENT = " Give episode.options.opponent, such as my_players.py:move, and episode.options.players."


async def play(
    name: str, row: dict[str, Any], ask: Ask, /, *, opponent: str = "", players: int = 0, **settings: Any
) -> float:
    move = load_function(opponent, {}, "episode.options.opponent") if opponent else None
    game = Game(name, settings, players or (2 if opponent else 1), row_seed(row))
    while not game.over:
        player, text = game.observe()
        # Steps run in the event loop, not in threads: the games share one random state. One that hangs is killed.
        game.step((await ask(text)).text if player == MODEL else await answer(move, game.seen[player]))
    return game.reward()


async def answer(move: Callable[[str], Any] | None, seen: str) -> str:
    if move is None:  # some games begin with too few players
        raise RuntimeError(f"it is the turn of another player than the model.{OPPONENT}")
    action = move(seen)
    return str(await action if inspect.isawaitable(action) else action)


def check(name: str, options: dict[str, Any]) -> None:
    settings = dict(options)
    opponent, players = settings.pop("opponent", ""), settings.pop("players", 0)
    if opponent:
        load_function(opponent, {}, "episode.options.opponent")
    if players > 1 and not opponent:
        raise ConfigError(f"textarena:{name}: give episode.options.opponent, such as my_players.py:move.")
    Game(name, settings, players or (2 if opponent else 1), 0)


class Game:
    """One game, with a random state of its own. Raises `ConfigError` if it cannot be set up."""

    def __init__(self, name: str, settings: dict[str, Any], players: int, seed: int):
        self.name, self.over = name, False
        self.seen: dict[int, str] = defaultdict(str)  # by each player
        self.state = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()
        with self.own_random():
            self.env = make(name, settings)
            try:
                self.env.reset(num_players=players, seed=seed)
            except Exception as error:
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                raise ConfigError(f"textarena:{name}: {kind}{first_line(error)}.{advice(error)}") from None

    @contextlib.contextmanager
    def own_random(self) -> Iterator[None]:
        """Swaps in this game's random state: all games draw from Python's and numpy's shared ones."""
        outer = random.getstate(), np.random.get_state()
        random.setstate(self.state[0])
        np.random.set_state(self.state[1])
        try:
            yield
        finally:
            self.state = random.getstate(), np.random.get_state()
            random.setstate(outer[0])
            np.random.set_state(outer[1])

    def observe(self) -> tuple[int, str]:
        """Returns whose turn it is, and what that player has not seen yet."""
        with self.own_random():
            player, messages = self.env.get_observation()
        roles = self.env.state.role_mapping
        lines = [f"[{roles.get(sender, sender)}] {text}" for sender, text, _ in messages if sender != player]
        text = "\n".join(lines) or "It is your turn."
        self.seen[player] += f"{text}\n"
        return player, text

    def step(self, action: str) -> None:
        with self.own_random():
            self.over, _ = self.env.step(action=action)

    def reward(self) -> float:
        rewards, _ = self.env.close()
        if not rewards or MODEL not in rewards:
            raise RuntimeError(f"the game ended without a reward for player {MODEL}: {rewards!r:.80}")
        if not isinstance(rewards[MODEL], int | float | np.number):  # some games mix up a reward and its reason
            raise RuntimeError(f"the game gave player {MODEL} the reward {rewards[MODEL]!r:.80}, which is no number")
        return float(rewards[MODEL])


def advice(error: Exception) -> str:
    """Returns what to do about the number of players, which some games assert and others raise."""
    if not isinstance(error, AssertionError) and "player" not in str(error).lower():
        return ""
    return OPPONENT


def make(name: str, settings: dict[str, Any]) -> Any:
    """Makes a game without the wrappers of its observations, which repeat what was said before."""
    textarena = import_package("textarena", f"textarena:{name}", "textarena")
    registry = textarena.envs.registration.ENV_REGISTRY
    if name not in registry:
        games = sorted(n for n in registry if n.endswith("-v0"))
        raise ConfigError(f"textarena:{name} does not exist; games: {', '.join(games)}, and variants of them.")
    try:
        env = textarena.make(name, **settings)
    except Exception as error:  # a game may raise anything for its options
        raise ConfigError(f"textarena:{name}: {type(error).__name__}: {first_line(error)}.") from None
    wrappers = []
    while isinstance(env, textarena.Wrapper):
        wrappers += [type(env)] if isinstance(env, textarena.ActionWrapper) else []
        env = env.env
    for wrapper in reversed(wrappers):
        env = wrapper(env)
    return env
