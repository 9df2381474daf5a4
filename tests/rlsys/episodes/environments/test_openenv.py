"""An OpenEnv server on loopback, with the real package on both ends."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager
from typing import Literal

import pytest
from pydantic import Field
from scripted import Scripted, play

from rlsys.episodes.ask import EpisodeOver
from rlsys.episodes.environments import environment_name, load_environment
from rlsys.episodes.environments.openenv import ActionReader, describe
from rlsys.errors import ConfigError

pytest.importorskip("openenv")
uvicorn = pytest.importorskip("uvicorn")

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app  # noqa: E402


class Guess(Action):
    guess: int


class Hint(Observation):
    text: str


class Guessing(Environment):
    """The secret is the seed modulo `top`; each wrong guess costs 0.25."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, top=10, **_):
        self.secret = seed % top
        return Hint(text=f"0 to {top - 1}", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **_):
        if action.guess == 99:
            raise RuntimeError("this guess breaks the server")
        if action.guess == self.secret:
            return Hint(text="yes", done=True, reward=1.0)
        return Hint(text="higher" if action.guess < self.secret else "lower", done=False, reward=-0.25)

    @property
    def state(self):
        return State(episode_id="", step_count=0)


class Step(Action):
    x: int = Field(ge=0, le=3)
    way: Literal["left", "right"]


class Grid(Guessing):
    """Ends at 3. At 1 it makes a mistake, which the server reports like an action that is wrong."""

    def step(self, action, timeout_s=None, **_):
        if action.x == 1:
            Step(x=99, way="left")
        return Hint(text=f"{action.way} {action.x}", done=action.x == 3, reward=1.0)


@contextmanager
def serve(environment, action):
    app = create_fastapi_app(environment, action, Hint, max_concurrent_envs=32)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def url():
    with serve(Guessing, Guess) as address:
        yield address


def test_an_episode_is_a_session_of_the_server(url):
    ask = Scripted(["I say 5", "no idea", "8 or 9", "7"])
    assert play(f"openenv:{url}", {"seed": 17}, ask) == 0.0
    assert ask.asked == ["0 to 9", "higher", "Your reply has no valid action. Reply with a number.", "lower"]
    assert ask.scores == [-0.25, 0, -0.25, 1.0]


def test_options_for_reset_go_to_the_server(url):
    ask = Scripted(["2"])
    play(f"openenv:{url}", {"seed": 17, "prompt": "Guess."}, ask, reset={"top": 3})
    assert ask.asked == ["Guess.\n0 to 2"]
    play(f"openenv:{url}", {"seed": 17}, Scripted(["4"]), reset={"seed": 14})


def test_an_action_that_the_server_refuses_costs_a_turn_and_no_step():
    good, mistake, end = (json.dumps({"x": x, "way": "left"}) for x in (2, 1, 3))
    replies = [good, '{"x": 9, "way": "left"}', '{"way": "left"}', '{"x": 2, "way": "up"}', '{"x":' * 2000, end]
    with serve(Grid, Step) as address:
        ask = Scripted(replies)
        play(f"openenv:{address}", {"seed": 1}, ask)
        assert ask.scores == [1, 0, 0, 0, 0, 1]
        assert ask.asked[2:] == ["Your reply has no valid action. Reply with a JSON object that has x, way."] * 4
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            play(f"openenv:{address}", {"seed": 1}, Scripted([mistake]))


def test_many_sessions_at_once_do_not_mix(url):
    async def together():
        playing = load_environment(f"openenv:{url}", {})
        models = [Scripted([str(9 - i), str(i)]) for i in range(8)]
        await asyncio.gather(*(playing({"seed": i}, model) for i, model in enumerate(models)))
        return [model.scores for model in models]

    assert asyncio.run(together()) == [[-0.25, 1.0]] * 8


def test_what_breaks_in_the_server_is_a_failure_and_not_a_score(url):
    with pytest.raises(RuntimeError, match="this guess breaks the server"):
        play(f"openenv:{url}", {"seed": 1}, Scripted(["99"]))
    with pytest.raises(EpisodeOver):
        play(f"openenv:{url}", {"seed": 1}, Scripted(["5"]))


def test_what_cannot_be_played_is_refused_at_the_start(url):
    with pytest.raises(ConfigError, match=r"openenv:echo is not the address of a server"):
        load_environment("openenv:echo", {})
    with pytest.raises(ConfigError, match=r"no OpenEnv server answers there.*Start it first"):
        load_environment("openenv:http://127.0.0.1:9", {})
    with pytest.raises(ConfigError, match=r"episode.options.field: an OpenEnv episode has the options action"):
        load_environment(f"openenv:{url}", {"field": "x"})
    assert environment_name(f"openenv:{url}") == "openenv"


TEXT, WHOLE, REAL = {"type": "string"}, {"type": "integer"}, {"type": "number"}


@pytest.mark.parametrize(
    ("fields", "required", "field", "reply", "action"),
    [
        ({"message": TEXT}, ["message"], "", "Hi, 3 times", {"message": "Hi, 3 times"}),
        ({"message": TEXT, "metadata": {}}, [], "", "Hi", {"message": "Hi"}),
        ({"move": WHOLE}, ["move"], "", "2.5", None),
        ({"force": REAL}, ["force"], "", "first 1, then -2.5", {"force": -2.5}),
        ({"force": REAL}, ["force"], "", "9" * 400, None),
        ({"code": TEXT, "timeout": REAL}, ["code"], "", "print(1)", {"code": "print(1)"}),
        ({"code": TEXT, "timeout": REAL}, ["code"], "timeout", "3", {"timeout": 3.0}),
        (
            {"x": WHOLE, "y": WHOLE},
            ["x", "y"],
            "",
            'Not {"x": 0}, {x}: {"x": 1, "y": {"z": 2}}!',
            {"x": 1, "y": {"z": 2}},
        ),
        ({"x": WHOLE, "y": WHOLE}, ["x", "y"], "", "1 2", None),
    ],
)
def test_the_schema_says_what_a_reply_means(fields, required, field, reply, action):
    assert ActionReader({"properties": fields, "required": required}, field)(reply) == action


def test_an_observation_is_its_only_text_or_json():
    assert describe({"text": "hello", "reward": 1.0, "done": False, "metadata": {}}, "") == "hello"
    assert describe({"text": "hello", "board": [0, 1]}, "") == '{"text": "hello", "board": [0, 1]}'
    assert describe({"text": "hello", "board": [0, 1]}, "text") == "hello"
    with pytest.raises(ValueError, match="has no `image`; it has text"):
        describe({"text": "hello"}, "image")
