"""Reward functions that ask a frozen model, at a server whose answers the test makes up."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsys.config.schema import RewardFunction
from rlsys.errors import ConfigError
from rlsys.rewards import Judge
from rlsys.rewards.asking import LOGS, Answer, Ask, ModelError, ask_engine, engine_name, serve
from rlsys.types import Verdict

SOURCE = """
import asyncio

async def length(completion, ask):
    return len(await ask("judge", completion, max_tokens=5))

def plain(completion, ask):
    return len(asyncio.run(ask("judge", completion, max_tokens=5)))

async def batched(completions, ask):
    return [len(text) for text in await asyncio.gather(*(ask("judge", c, max_tokens=5) for c in completions))]
"""


async def repeat(question: dict[str, Any]) -> dict[str, Any]:
    return {"text": question["prompt"] * 2}


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., asyncio.Server]]:
    """`serving(answer, index)` starts an engine of the model `judge`."""
    monkeypatch.setenv(LOGS, str(tmp_path))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def start(answer: Answer = repeat, index: int = 0) -> asyncio.Server:
        file = tmp_path / f"{engine_name('judge', index)}.address"
        return asyncio.run_coroutine_threadsafe(serve("127.0.0.1", file, answer), loop).result()

    yield start
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def judge(tmp_path: Path, function: str, deadline_s: float = 20.0, engines: int = 1) -> Callable[..., Verdict]:
    (tmp_path / "asking.py").write_text(SOURCE)
    entry = RewardFunction(function=f"{tmp_path}/asking.py:{function}", deadline_s=deadline_s)
    return lambda completion: Judge({"f": entry}, ask=Ask({"judge": engines}))({"completion": completion})


@pytest.mark.parametrize("function", ["length", "plain", "batched"])
def test_functions_of_every_kind_ask(serving: Callable[..., Any], tmp_path: Path, function: str) -> None:
    serving()
    assert judge(tmp_path, function)("abc").score == 6


@pytest.mark.parametrize("function", ["length", "batched"])
def test_a_deadline_does_not_pass_while_no_engine_can_be_reached(
    serving: Callable[..., Any], tmp_path: Path, function: str
) -> None:
    timer = threading.Timer(3.0, serving)
    timer.start()
    began = time.monotonic()
    assert judge(tmp_path, function, deadline_s=1.0)("abc").score == 6
    assert time.monotonic() - began > 2.9
    timer.join()


def test_a_deadline_holds_while_an_engine_answers_too_slowly(serving: Callable[..., Any], tmp_path: Path) -> None:
    cancelled = threading.Event()

    async def slow(question: dict[str, Any]) -> dict[str, Any]:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return {}

    serving(slow)
    began = time.monotonic()
    assert judge(tmp_path, "length", deadline_s=1.0)("abc").failure == "timeout"
    assert time.monotonic() - began < 20
    assert cancelled.wait(20), "the engine goes on with a question that nobody waits for"


def test_a_question_whose_engine_dies_goes_to_another_one(serving: Callable[..., Any], tmp_path: Path) -> None:
    async def die(question: dict[str, Any]) -> dict[str, Any]:
        raise asyncio.CancelledError  # no answer: the connection ends

    serving(repeat, 1)
    serving(die, 0)
    for text in ("a", "bc", "def"):  # of both engines
        assert judge(tmp_path, "length", engines=2)(text).score == 2 * len(text)


def test_the_same_question_has_the_same_seed_and_another_seed_if_asked(serving: Callable[..., Any]) -> None:
    async def seed(question: dict[str, Any]) -> dict[str, Any]:
        return {"text": json.dumps([question["seed"], question["temperature"], question["max_tokens"]])}

    serving(seed)
    ask = Ask({"judge": 1})

    async def answers() -> list[str]:
        return [
            await ask("judge", "a"),
            await ask("judge", "a"),
            await ask("judge", "b"),
            await ask("judge", "a", seed=1),
        ]

    first, again, other, chosen = asyncio.run(answers())
    assert first == again
    assert json.loads(first)[1:] == [0.0, 512]
    assert json.loads(other)[0] != json.loads(first)[0]
    assert json.loads(chosen)[0] == 1


def test_what_an_engine_refuses_fails_the_sample_in_words(serving: Callable[..., Any], tmp_path: Path) -> None:
    async def refuse(question: dict[str, Any]) -> dict[str, Any]:
        return {"error": "the prompt has 9 tokens"}

    serving(refuse)
    verdict = judge(tmp_path, "length")("abc")
    assert verdict.failure == "exception"
    assert "judge: the prompt has 9 tokens" in verdict.detail


def test_an_engine_that_raises_says_so(serving: Callable[..., Any], tmp_path: Path) -> None:
    async def fail(question: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("no template")

    serving(fail)
    assert "KeyError: 'no template'" in judge(tmp_path, "length")("abc").detail


def test_nobody_is_answered_who_does_not_know_the_secret(serving: Callable[..., Any], tmp_path: Path) -> None:
    serving()
    file = tmp_path / "model-judge-0.address"
    assert file.stat().st_mode & 0o777 == 0o600
    address = json.loads(file.read_text())
    forged = tmp_path / "forged"
    forged.write_text(json.dumps(address | {"secret": "guessed"}))
    with pytest.raises(EOFError):
        asyncio.run(ask_engine(forged, {"prompt": "abc"}))


def test_an_unknown_model_is_named(serving: Callable[..., Any]) -> None:
    with pytest.raises(ModelError, match="there is no model `teacher`; `models` has judge"):
        asyncio.run(Ask({"judge": 1})("teacher", "abc"))


def test_without_engines_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOGS, raising=False)
    assert "run in `rlsys train` and `rlsys eval` only" in judge(tmp_path, "length")("abc").detail


def test_a_function_that_asks_needs_models(tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(SOURCE)
    entry = RewardFunction(function=f"{tmp_path}/asking.py:length")
    assert "names no model in `models`" in Judge({"f": entry})({"completion": "abc"}).detail
    with pytest.raises(ConfigError):
        Judge({"f": entry}).rewards[0].call([{"completion": "abc"}])
