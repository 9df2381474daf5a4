"""The reward pool on real processes: whatever a user's function does, there is a verdict and the pool goes on."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlsys.config.schema import Config
from rlsys.errors import ConfigError, WorkerLost
from rlsys.types import Prompt, Sample, Verdict
from workers.fleet.process_registry import read_process_info
from workers.fleet.watchdog import Watchdog
from workers.reward.pool import RewardPool, RewardWorker, ray_options, worker_numbers

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
def notes() -> list[str]:
    """What the pool puts on the screen."""
    return []


@pytest.fixture
def pool(
    spawn: Callable[..., Any], tiny: Callable[..., Config], tmp_path: Path, notes: list[str]
) -> Callable[..., RewardPool]:
    def start(source: str = TRAPS, *overrides: str) -> RewardPool:
        (tmp_path / "traps.py").write_text(source)
        functions = f"reward.functions={tmp_path}/traps.py:trap"
        config = tiny(functions, "reward.timeout_s=1.5", "reward.workers=1", *overrides)
        watchdog = Watchdog(tmp_path, config.watchdog.stall_s, note=notes.append)
        pool = RewardPool(
            config,
            lambda name: spawn(RewardWorker, config, *worker_numbers(name), ray_options=ray_options(config)),
            watchdog,
        )
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
    verdicts = judge(pool(TRAPS, "reward.memory_mb=2048", "reward.workers=2"), mixed, tmp_path)
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
        "memory",
        "timeout",
    ]
    assert all(v.score is None and v.detail for v in verdicts[::2])
    assert "SIGSEGV" in verdicts[2].detail
    assert "no such answer" in verdicts[8].detail
    assert not runs(int((tmp_path / "child").read_text())), "what it started is killed with it"


def test_the_process_ends_with_its_actor(pool: Callable[..., RewardPool], tmp_path: Path, ray: Any) -> None:
    source = "import os\ndef trap(completion):\n    return os.getpid()\n"
    started = pool(source)
    pid = int(judge(started, ["who?"], tmp_path)[0].score or 0)
    assert runs(pid)
    ray.kill(started.workers.actors["reward-0"])
    deadline = time.monotonic() + 10
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not runs(pid)


@pytest.mark.long
@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_worker_is_replaced_and_each_sample_judged_once(
    pool: Callable[..., RewardPool], tmp_path: Path, notes: list[str], how: signal.Signals, seen: bool
) -> None:
    """Also where its host does not see the run directory, in which the ids of processes are."""
    source = "import os, time\ndef trap(completion):\n    time.sleep(0.2)\n    return float(len(completion))\n"
    started = pool(source, "watchdog.stall_s=3", "reward.timeout_s=2", "reward.workers=2")
    samples = [Sample("p", i, "x" * i, np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", 0) for i in range(30)]
    prompt = Prompt("p", "s", "", [1], {"folder": str(tmp_path)})
    verdicts = started.judge(samples, {"p": prompt})
    time.sleep(1)
    info = read_process_info("reward-0", tmp_path)
    assert info
    if not seen:
        (tmp_path / "reward-0.pid").unlink()
    os.kill(info.pid, how)
    began = time.monotonic()
    assert [v.score for v in verdicts.result()] == list(range(30))
    if how == signal.SIGSTOP:
        assert any(
            "judging samples: reward-0 stalled: no answer for 3 s, pending samples of 1" in text for text in notes
        ), notes
        assert time.monotonic() - began < 90
    assert read_process_info("reward-0", tmp_path) != info, "another process took its place"


@pytest.mark.long
def test_a_worker_that_never_answers_ends_the_wait_after_three_times(
    pool: Callable[..., RewardPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = pool("def trap(completion):\n    return 1.0\n", "watchdog.stall_s=0.3", "reward.timeout_s=0.1")
    started.config = replace(started.config, cluster=replace(started.config.cluster, start_timeout_s=0.3))
    events: list[str] = []
    monkeypatch.setattr(started.watchdog, "event", lambda kind, **facts: events.append(kind))
    monkeypatch.setattr(started.watchdog.cluster, "ask", lambda *arguments, **receive: None)
    began = time.monotonic()
    with pytest.raises(WorkerLost, match="judging samples: reward-0 stalled"):
        judge(started, ["x"], tmp_path)
    assert time.monotonic() - began < 30
    assert events == ["stall", "replaced", "stall", "replaced", "stall"]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import nothing_of_that_name\nfrom user import trap\n", "No module named 'nothing_of_that_name'"),
        ("def other(completion):\n    return 1\n", "has no function `trap`. Functions there: other"),
        ("raise SystemExit(5)\ndef trap(completion):\n    return 1\n", "SystemExit"),
        ("import os\nos._exit(7)\ndef trap(completion):\n    return 1\n", "exit code 7"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused_with_its_reason(
    pool: Callable[..., RewardPool], source: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        pool(source)


def test_async_functions_wait_together_and_one_that_hangs_harms_no_other(
    pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    source = """
import asyncio, os
async def trap(completion):
    await asyncio.sleep(1000 if completion == "hang" else 0.3)
    return os.getpid()
"""
    started = pool(source)
    began = time.monotonic()
    verdicts = judge(started, ["hang"] + ["ok"] * 40, tmp_path)
    assert time.monotonic() - began < 5
    assert verdicts[0].failure == "timeout"
    assert len({v.score for v in verdicts[1:]}) == 1, "one process judged them all"


def test_an_async_function_that_blocks_is_killed_and_others_are_judged(
    pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    source = """
import os
import signal
import time
async def trap(completion):
    if completion == "hang":
        time.sleep(1000)
    return len(completion)
"""
    verdicts = judge(pool(source), ["ok", "hang", "ok", "good"], tmp_path)
    assert [(v.score, v.failure) for v in verdicts] == [(2, ""), (None, "timeout"), (2, ""), (4, "")]


def test_in_a_batch_only_the_samples_that_fail_fail(pool: Callable[..., RewardPool], tmp_path: Path) -> None:
    source = """
import ctypes, time
def trap(completions, folder):
    assert folder == [folder[0]] * len(completions)
    if "hang" in completions:
        time.sleep(1000)
    if "segfault" in completions:
        ctypes.string_at(0)
    if "lost" in completions:
        return [1.0] * (len(completions) - 1)
    return [{"length": len(c), "answer": c} for c in completions]
"""
    verdicts = judge(pool(source), ["ok", "hang", "good", "segfault", "lost", "fine"], tmp_path)
    assert [(v.score, v.failure, v.answer) for v in verdicts] == [
        (2, "", "ok"),
        (None, "timeout", None),
        (4, "", "good"),
        (None, "crash", None),
        (None, "invalid", None),
        (4, "", "fine"),
    ]


def test_a_process_in_which_threads_pile_up_is_replaced(pool: Callable[..., RewardPool], tmp_path: Path) -> None:
    source = """
import os, threading, time
def trap(completion):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    return os.getpid()
"""
    verdicts = judge(pool(source), ["ok"] * 150, tmp_path)
    assert not any(v.failure for v in verdicts)
    assert len({v.score for v in verdicts}) == 5


@pytest.mark.long
def test_a_slow_import_is_waited_for_once_and_not_after_a_kill(pool: Callable[..., RewardPool], tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    started = pool(f"""
import time
time.sleep(3)
with open({str(imported)!r}, "a") as file:
    file.write(".")
def trap(completion):
    if completion == "hang":
        time.sleep(1000)
    return 1.0
""")
    processes, began = 0, time.monotonic()
    while time.monotonic() - began < 5:  # the processes that stand by come up
        if imported.stat().st_size > processes:
            processes, began = imported.stat().st_size, time.monotonic()
        time.sleep(0.1)
    began = time.monotonic()
    verdicts = judge(started, ["hang", "ok"], tmp_path)
    assert [v.failure for v in verdicts] == ["timeout", ""]
    assert time.monotonic() - began < 4, "the deadline is 1.5 s, and another import would take 3 s more"


def test_a_data_set_may_have_reward_functions_of_its_own(pool: Callable[..., RewardPool], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def own(completion):\n    return -len(completion)\n")
    started = pool(
        "def trap(completion):\n    return len(completion)\n",
        f"eval.datasets={{held: {{path: 'builtin:zigzag_heldout', reward: '{tmp_path}/own.py:own'}}}}",
    )
    none = np.zeros(0)
    samples = [Sample(uid, 0, "four", none, none, "stop", 0) for uid in ("p", "q")]
    prompts = {"p": Prompt("p", "made", "?", [2], {}), "q": Prompt("q", "made", "?", [2], {}, rewards="held")}
    assert [v.score for v in started.judge(samples, prompts).result()] == [4, -4]


def seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def judge_one_by_one(pool: RewardPool, count: int) -> None:
    """Judges so many samples at the same time, each by a call of its own."""
    none, prompts = np.zeros(0), {"p": Prompt("p", "m", "?", [2], {})}
    parts = [pool.judge([Sample("p", i, "ok", none, none, "stop", 0)], prompts) for i in range(count)]
    assert [part.result()[0].score for part in parts] == [1.0] * count


@pytest.mark.long
def test_verdicts_cost_little_more_than_empty_calls_of_ray(
    pool: Callable[..., RewardPool], start_worker: Callable[[str], Any], ray: Any, tmp_path: Path
) -> None:
    """Pool and empty calls of an actor take turns, so a busy machine slows both alike."""
    started, actor = pool("def trap(completion):\n    return 1.0\n", "reward.workers=2"), start_worker("bare-0")
    judge(started, ["warm"] * 500, tmp_path)
    alone, bare = [], []
    for _ in range(50):
        alone.append(seconds(lambda: judge(started, ["one"], tmp_path)))
        bare.append(seconds(lambda: ray.get(actor.echo.remote(1))))
    ratios = []
    for _ in range(4):
        many = seconds(lambda: judge_one_by_one(started, 2000))
        ratios.append(many / seconds(lambda: ray.get([actor.echo.remote(1) for _ in range(2000)])))
    print(f"one verdict: {np.median(alone) / np.median(bare):.2f} empty calls; 2,000 verdicts: {ratios} of 2,000 calls")
    assert np.median(alone) < 4 * np.median(bare), "a verdict is two messages: to the actor, and to its process"
    assert min(ratios) < 2.5, "samples travel in lists"
