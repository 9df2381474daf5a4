"""Games of TextArena, against the real package."""

import asyncio
import random
import re

import numpy as np
import pytest
from scripted import Scripted, play

from rlsys.episodes.ask import EpisodeOver
from rlsys.episodes.environments import load_environment
from rlsys.errors import ConfigError

pytest.importorskip("textarena")


def tower_moves(disks, source="A", target="C", spare="B"):
    if not disks:
        return []
    before = tower_moves(disks - 1, source, spare, target)
    return [*before, f"[{source} {target}]", *tower_moves(disks - 1, spare, target, source)]


class Halving:
    """Guesses from 1 to 20 by halving, from `higher` and `lower` alone."""

    def __init__(self):
        self.low, self.high, self.guesses = 1, 20, []

    def __call__(self, text):
        if self.guesses and "higher" in text:
            self.low = self.guesses[-1] + 1
        elif self.guesses:
            self.high = self.guesses[-1] - 1
        self.guesses.append((self.low + self.high) // 2)
        return f"[{self.guesses[-1]}]"


def test_the_towers_are_moved_in_seven_moves():
    ask = Scripted(tower_moves(3))
    assert play("textarena:TowerOfHanoi-v0", {"seed": 0}, ask) == 1.0
    assert len(ask.replies) == 7
    assert "C: [1]" in ask.asked[1]
    assert "You are playing Tower of Hanoi" in ask.asked[0]
    assert not any("You are playing" in text for text in ask.asked[1:]), "what was said before is not repeated"


def test_options_go_to_the_game():
    ask = Scripted(tower_moves(4))
    assert play("textarena:TowerOfHanoi-v0", {"seed": 0}, ask, num_disks=4, max_turns=20) == 1.0
    assert len(ask.replies) == 15


def test_a_game_that_is_not_over_has_no_score_of_its_own():
    with pytest.raises(EpisodeOver):
        play("textarena:TowerOfHanoi-v0", {"seed": 0}, Scripted(["[A C]"]))


def test_replies_without_brackets_are_moves_too():
    ask = Scripted(["A C"])
    with pytest.raises(EpisodeOver):
        play("textarena:TowerOfHanoi-v0", {"seed": 0}, ask)
    assert "C: [1]" in ask.asked[1]


def test_equal_seeds_are_equal_games_even_side_by_side():
    """The games draw from the random state of the whole process. Each episode keeps its own."""
    alone = []
    for seed in range(6):
        model = Halving()
        assert play("textarena:GuessTheNumber-v0", {"seed": seed}, Scripted(model)) == 1.0
        alone.append(model.guesses)
    models = [Halving() for _ in range(6)]

    async def together():
        playing = load_environment("textarena:GuessTheNumber-v0", {})
        await asyncio.gather(*(playing({"seed": i}, Scripted(model)) for i, model in enumerate(models)))

    asyncio.run(together())
    assert [model.guesses for model in models] == alone
    assert len({guesses[-1] for guesses in alone}) > 2


def test_a_random_game_does_not_depend_on_what_else_draws_meanwhile():
    """2048 draws a tile after each move."""

    def boards(disturb):
        def move(text):
            disturb()
            return ["[up]", "[left]", "[down]", "[right]"][len(ask.replies) % 4]

        ask = Scripted(lambda text: move(text) if len(ask.replies) < 12 else None)
        with pytest.raises(EpisodeOver):
            play("textarena:2048-v0", {"seed": 5}, ask)
        return ask.asked

    random.seed(1)
    before = random.getstate()
    quiet = boards(lambda: None)
    assert random.getstate() == before
    assert boards(lambda: (random.random(), np.random.rand())) == quiet


OPPONENTS = """
import re

def first_free(seen):
    board = seen[seen.rindex("Current Board"):]
    return re.search(r"\\d", board)[0].join("[]")

async def loses(seen):
    return "nonsense"
"""


def test_a_function_plays_the_other_seat(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "opponents.py").write_text(OPPONENTS)
    #   0 1 2    we take the diagonal 2, 4, 6; the opponent takes the first free one: 0, 1, 3
    #   3 4 5
    #   6 7 8
    ask = Scripted(["[4]", "[2]", "[6]"])
    assert play("textarena:TicTacToe-v0", {"seed": 0}, ask, opponent="opponents.py:first_free") == 1.0
    assert len(ask.replies) == 3
    assert "[Player 0]" not in "".join(ask.asked), "the model is not told what it wrote itself"
    ask = Scripted(["[8]", "[6]", "[4]", "[5]"])  # the opponent: 0, 1, 2
    assert play("textarena:TicTacToe-v0", {"seed": 0}, ask, opponent="opponents.py:first_free") == -1.0
    ask = Scripted(lambda text: re.findall(r"\[\d\]", text)[-1])
    assert play("textarena:TicTacToe-v0", {"seed": 0}, ask, opponent="opponents.py:loses") == 1.0


def test_a_reward_that_is_no_number_is_a_failure_with_its_reason():
    """Countdown gives its reason for the reward, after two invalid moves."""
    with pytest.raises(RuntimeError, match=r"gave player 0 the reward 'Invalid action format.*, which is no number"):
        play("textarena:Countdown-v0", {"seed": 0}, Scripted(["no", "no"]))


def test_a_game_that_begins_with_too_few_players_says_what_it_lacks():
    with pytest.raises(RuntimeError, match=r"the turn of another player.*Give episode\.options\.opponent"):
        play("textarena:SpiteAndMalice-v0", {"seed": 3}, Scripted(lambda text: text[text.rindex("[discard") :]))


@pytest.mark.parametrize(
    ("game", "options", "parts"),
    [
        ("Nope-v0", {}, ["textarena:Nope-v0 does not exist", "TowerOfHanoi-v0"]),
        ("TicTacToe-v0", {}, ["has to be 2, received 1", "episode.options.opponent"]),
        ("GermanWhist-v0", {}, ["two-player game only", "Give episode.options.opponent"]),
        ("TicTacToe-v0", {"players": 2}, ["episode.options.opponent"]),
        ("TicTacToe-v0", {"opponent": "absent.py:move"}, ["absent.py"]),
        ("TowerOfHanoi-v0", {"size": 4}, ["size"]),
    ],
)
def test_what_cannot_be_played_is_refused_at_the_start(game, options, parts):
    with pytest.raises(ConfigError) as error:
        load_environment(f"textarena:{game}", options)
    [problem] = error.value.problems
    assert all(part in problem for part in parts), problem
