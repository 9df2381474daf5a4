"""The reward pool on real processes: whatever a user's function does, there is a verdict and the pool goes on."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlsys.config import Config, ConfigError
from rlsys.types import Prompt, Sample, Verdict
from workers.reward import RewardPool, RewardWorker

TRAPS = """
import os, subprocess, sys, time

def trap(completion, folder):
    if completion == "hang":
        time.sleep(1000)
    if completion == "hang with a child":
        child = subprocess.Popen(["sleep", "1000"])
        open(f"{folder}/child", "w").write(str(child.pid))
        time.sleep(1000)
    if completion == "segfault":
        import ctypes
        ctypes.string_at(0)
    if completion == "exit":
        os._exit(0)
    if completion == "sys.exit":
        sys.exit(3)
    if completion == "raise":
        raise KeyError("no such answer")
    if completion == "text":
        return "good"
    if completion == "nan":
        return float("nan")
    if completion == "memory":
        return float(len(bytearray(8 << 30)))
    print("a user's print goes to the log")
    return float(len(completion))
"""


@pytest.fixture
def pool(spawn: Callable[..., Any], tiny: Callable[..., Config], tmp_path: Path) -> Callable[..., RewardPool]:
    def start(source: str = TRAPS, *overrides: str) -> RewardPool:
        (tmp_path / "traps.py").write_text(source)
        config = tiny(f"reward.functions={tmp_path}/traps.py:trap", "reward.timeout_s=1.5", *overrides)
        pool = RewardPool(config, [spawn(RewardWorker, config, i) for i in range(config.reward.workers)], tmp_path)
        pool.start()
        return pool

    return start


def judge(pool: RewardPool, completions: list[str], folder: Path) -> list[Verdict]:
    none = np.zeros(0)
    samples = [Sample("p", i, c, none, none, "stop", 0) for i, c in enumerate(completions)]
    return pool.judge(samples, {"p": Prompt("p", "made", "?", [2], {"folder": str(folder)})}).result()


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_every_trap_gets_a_verdict_and_the_others_their_score(pool: Callable[..., RewardPool], tmp_path: Path) -> None:
    traps = ["hang", "segfault", "exit", "sys.exit", "raise", "text", "nan", "memory", "hang with a child"]
    mixed = [word for trap in traps for word in (trap, "ok")]
    began = time.monotonic()
    verdicts = judge(pool(TRAPS, "reward.memory_mb=2048"), mixed, tmp_path)
    assert time.monotonic() - began < 30
    assert [v.score for v in verdicts[1::2]] == [2.0] * len(traps)
    assert [v.failure for v in verdicts[::2]] == [
        "timeout",
        "crash",
        "crash",
        "exception",
        "exception",
        "invalid",
        "invalid",
        "exception",
        "timeout",
    ]
    assert all(v.score is None and v.detail for v in verdicts[::2])
    assert "SIGSEGV" in verdicts[2].detail
    assert "no such answer" in verdicts[8].detail
    assert not runs(int((tmp_path / "child").read_text())), "what it started is killed with it"


def test_the_process_ends_with_its_actor(pool: Callable[..., RewardPool], tmp_path: Path, ray: Any) -> None:
    source = "import os\ndef trap(completion):\n    return os.getpid()\n"
    started = pool(source, "reward.workers=1")
    pid = int(judge(started, ["who?"], tmp_path)[0].score or 0)
    assert runs(pid)
    ray.kill(started.actors[0])
    deadline = time.monotonic() + 10
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not runs(pid)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import nothing_of_that_name\n", "No module named 'nothing_of_that_name'"),
        ("def other(completion):\n    return 1\n", "has no function `trap`. Functions there: other"),
        ("raise SystemExit(5)\n", "SystemExit"),
        ("import os\nos._exit(7)\n", "exit code 7"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused_with_its_reason(
    pool: Callable[..., RewardPool], source: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        pool(source)
