"""Frozen engines on real processes: reward functions ask them, and whichever is killed, the verdicts are the same."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.models import find_model
from rlsys.config.schema import Config
from rlsys.types import Prompt, Sample, Verdict
from workers.fleet.process_registry import read_process_info
from workers.fleet.watchdog import Watchdog
from workers.frozen.engine import FrozenEngine
from workers.frozen.engines import FrozenEngines
from workers.reward.pool import RewardPool, RewardWorker, ray_options, worker_numbers
from workers.rollout.engine_settings import CPU_ENVIRONMENT

pytestmark = pytest.mark.long

# The score is the answers' digits. An answer is greedy, another one sampled, and a chain of answers asks for each other.
SOURCE = """
async def digits(prompt, completion, folder, ask):
    greedy = await ask("judge", prompt, max_tokens=10)
    sampled = await ask("judge", prompt + completion, max_tokens=10, temperature=1.0)
    other = await ask("judge", prompt + completion, max_tokens=10, temperature=1.0, seed=len(sampled))
    with open(f"{folder}/answered", "a") as file:
        file.write("x")
    return {"greedy": number(greedy), "sampled": number(sampled), "other": number(other)}


def number(text):
    return float("".join(c for c in text if c.isdigit()) or -1)
"""
PROMPT = "152804>"
SAMPLES = 240


class Judged:
    """A pool of reward workers and the engines of the model `judge`."""

    def __init__(self, config: Config, spawn: Callable[..., Any], folder: Path):
        self.folder, self.events = folder, list[dict[str, Any]]()
        watchdog = Watchdog(folder, event=lambda kind, **facts: self.events.append({"event": kind, **facts}))

        def engine(name: str) -> Any:
            return spawn(FrozenEngine, config, "judge", int(name[-1]), environment=CPU_ENVIRONMENT)

        def worker(name: str) -> Any:
            return spawn(RewardWorker, config, *worker_numbers(name), ray_options=ray_options(config))

        self.engines, self.pool = FrozenEngines(config, engine, watchdog), RewardPool(config, worker, watchdog)
        self.pool.start()
        self.engines.start({"judge": find_model(config.models["judge"].path, config, print)})

    def judge(self) -> "Future[list[Verdict]]":
        (self.folder / "answered").write_text("")
        samples = [Sample("p", i, str(i), np.zeros(0), np.zeros(0), "stop", 0) for i in range(SAMPLES)]
        return self.pool.judge(samples, {"p": Prompt("p", "made", PROMPT, [2], {"folder": str(self.folder)})})

    def answered(self) -> int:
        return (self.folder / "answered").stat().st_size

    def kill(self, name: str) -> None:
        info = read_process_info(name, self.folder)
        assert info
        os.kill(info.pid, signal.SIGKILL)

    def replaced(self) -> list[str]:
        return [event["worker"] for event in self.events if event["event"] == "replaced"]


@pytest.fixture
def judged(spawn: Callable[..., Any], tiny: Callable[..., Config], tmp_path: Path) -> Callable[..., Judged]:
    def start(*overrides: str) -> Judged:
        (tmp_path / "asking.py").write_text(SOURCE)
        functions = f"reward.functions={tmp_path}/asking.py:digits"
        config = tiny("models={judge: {path: 'builtin:tiny'}}", functions, *overrides)
        return Judged(config, spawn, tmp_path)

    return start


def test_verdicts_are_the_same_when_engines_are_killed_in_the_middle(judged: Callable[..., Judged]) -> None:
    """Twice, the second time the replacement itself: what was asked waits, and is asked again."""
    run = judged()
    undisturbed = run.judge().result()
    assert not any(v.failure for v in undisturbed), next(v for v in undisturbed if v.failure)
    assert len({v.components["digits/greedy"] for v in undisturbed}) == 1
    assert len({v.components["digits/sampled"] for v in undisturbed}) > 10
    verdicts = run.judge()
    for kills, share in ((1, 0.1), (2, 0.5)):
        while run.answered() < share * SAMPLES:
            time.sleep(0.005)
        run.kill("model-judge-0")
        assert run.answered() < SAMPLES, "too late"
        deadline = time.monotonic() + 120
        while len(run.replaced()) < kills:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert verdicts.result() == undisturbed
    assert run.replaced() == ["model-judge-0"] * 2


def test_another_engine_of_the_model_answers_meanwhile(judged: Callable[..., Judged]) -> None:
    run = judged("models.judge.engines=2")
    undisturbed = run.judge().result()
    verdicts = run.judge()
    while run.answered() < SAMPLES // 10:
        time.sleep(0.005)
    run.kill("model-judge-1")
    assert verdicts.result() == undisturbed
