"""Reward processes without Ray: a function that harms its process harms no other sample, and leaves nothing behind."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_lines import command_of

from rlsys.config.schema import RewardFunction
from rlsys.errors import ConfigError
from rlsys.rewards.settings import RewardSettings
from rlsys.types import Verdict
from workers.processes.forkserver import FORKSERVER
from workers.reward import runner as runner_module
from workers.reward.local import local_rewards
from workers.reward.runner import RewardRunner
from workers.reward.sample_queue import JudgeResult, RewardItem


def settings(folder: Path, source: str, **changes: Any) -> RewardSettings:
    (folder / "own.py").write_text(source)
    limits = {"timeout_s": 1.5, "memory_mb": 1024, "batch": 8, "concurrency": 16, "start_timeout_s": 20.0} | changes
    return RewardSettings({"": {"own": RewardFunction(function=f"{folder}/own.py:own")}}, **limits)


def judge(folder: Path, source: str, rows: list[Any], **changes: Any) -> list[Verdict]:
    with local_rewards([settings(folder, source, **changes)]) as rewards:
        items = [RewardItem("", row if isinstance(row, dict) else {"completion": row}) for row in rows]
        return rewards.judge(items).future.result(timeout=60)


def outcomes(results: Sequence[JudgeResult]) -> list[Any]:
    return [a if isinstance(a, RewardItem) else a.failure or a.score for a in results]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    FORKSERVER.start()  # its end of the connection stays
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert not [p for p in psutil.Process().children(recursive=True) if "workers.reward.process" in command_of(p)]
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_process_that_hangs_while_large_rows_are_sent_blocks_no_other(tmp_path: Path) -> None:
    source = """
import asyncio, re
async def own(completion, row):
    if completion == "hang":
        re.match("(a+)+$", "a" * 40 + "b")  # no other thread of the process runs meanwhile
    await asyncio.sleep(0.05)
    return 1.0
"""
    rows = [{"completion": "hang" if i == 3 else "ok", "row": "x" * 300_000} for i in range(40)]
    assert outcomes(judge(tmp_path, source, rows)) == [1.0] * 3 + ["timeout"] + [1.0] * 36


def test_a_forked_child_that_returns_gives_no_second_verdict(tmp_path: Path) -> None:
    source = """
import os, time
def own(completion):
    if completion == "fork" and os.fork() == 0:
        time.sleep(0.2)
        return 2.0
    time.sleep(0.4 * (completion == "slow"))
    return 1.0
"""
    assert outcomes(judge(tmp_path, source, ["fork", "slow", "ok", "slow"])) == [1.0] * 4


def test_a_process_that_ends_has_crashed_even_if_its_child_runs_on(tmp_path: Path) -> None:
    source = """
import os, time
def own(completion):
    if completion == "fork" and os.fork() == 0:
        time.sleep(1000)
    if completion == "shell":
        os.system("sleep 1000 &")
    if completion != "ok":
        os._exit(3)
    return 1.0
"""
    assert outcomes(judge(tmp_path, source, ["fork", "ok", "shell", "ok"])) == ["crash", 1.0, "crash", 1.0]


@pytest.mark.parametrize(("moment", "kills"), [("import", 1), ("judge", 1), ("judge", 4)])
def test_a_process_that_somebody_kills_costs_no_verdict(tmp_path: Path, moment: str, kills: int) -> None:
    source = f"""
import os, signal
def killed_at(moment):
    for kill in range({kills}):
        if moment == "{moment}" and not os.path.exists(f"{tmp_path}/killed{{kill}}"):
            open(f"{tmp_path}/killed{{kill}}", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
killed_at("import")
def own(completion):
    killed_at("judge")
    return 1.0
"""
    assert outcomes(judge(tmp_path, source, ["a", "b", "c"])) == [1.0] * 3
    assert len([*tmp_path.glob("killed*")]) == kills


def test_one_that_kills_its_process_each_time_fails(tmp_path: Path) -> None:
    source = """
import os, signal
def own(completion):
    if completion == "b":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
"""
    assert outcomes(judge(tmp_path, source, ["a", "b", "c"])) == [1.0, "crash", 1.0]


def test_a_child_in_a_session_of_its_own_is_killed_with_its_process(tmp_path: Path) -> None:
    source = f"""
import subprocess, time
def own(completion):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open("{tmp_path}/child", "w").write(str(child.pid))
    time.sleep(1000)
"""
    assert outcomes(judge(tmp_path, source, ["hang"])) == ["timeout"]
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_an_alarm_that_is_left_set_does_not_go_off_in_another_sample(tmp_path: Path) -> None:
    source = """
import signal, time
def late(*_):
    raise TimeoutError
def own(completion):
    if completion == "alarm":
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        time.sleep(0.1)
    return 1.0
"""
    assert outcomes(judge(tmp_path, source, ["alarm", "ok", "ok", "ok", "ok"])) == [1.0] * 5


def test_memory_full_of_small_objects_fails_as_memory(tmp_path: Path) -> None:
    source = """
def own(completion):
    found = None
    while completion == "full":
        found = [found]
    return 1.0
"""
    verdicts = judge(tmp_path, source, ["full", "ok", "full", "ok"], memory_mb=300, timeout_s=20.0)
    assert outcomes(verdicts) == ["memory", 1.0, "memory", 1.0]


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_row_that_cannot_cross_to_the_process_fails_alone(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"completion": "ok", "odd": odd} for odd in (1, lambda: 1, Unreadable(), "\ud800\0", "x" * 5_000_000)
    ]
    verdicts = judge(tmp_path, "def own(completion):\n    return 1.0\n", rows)
    assert outcomes(verdicts) == [1.0, "exception", "exception", 1.0, 1.0]
    assert "cannot be sent" in verdicts[1].detail
    assert "cannot be read" in verdicts[2].detail


def test_an_import_that_fails_after_it_has_worked_is_tried_again(tmp_path: Path) -> None:
    source = f"""
import os
starts = len([name for name in os.listdir("{tmp_path}") if name.startswith("start")])
open(f"{tmp_path}/start{{os.getpid()}}", "w").close()
if starts == 1:
    raise RuntimeError("busy")
if starts == 2:
    os._exit(3)
def own(completion):
    if completion == "crash":
        os._exit(1)
    return 1.0
"""
    assert outcomes(judge(tmp_path, source, ["ok", "crash", "ok", "crash", "ok"])) == [1.0, "crash", 1.0, "crash", 1.0]


def test_an_import_that_works_only_once_ends_with_its_error(tmp_path: Path) -> None:
    source = f"""
import os
if os.path.exists("{tmp_path}/once"):
    raise RuntimeError("only once")
open("{tmp_path}/once", "w").close()
def own(completion):
    os._exit(1)
"""
    with pytest.raises(ConfigError, match="only once"):
        judge(tmp_path, source, ["crash", "ok"])


def test_a_spare_process_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    source = f"""
import os, time
if os.path.exists("{tmp_path}/once"):
    time.sleep(1000)
open("{tmp_path}/once", "w").close()
def own(completion):
    time.sleep(0.5)
    return 1.0
"""
    busy = time.process_time()
    assert outcomes(judge(tmp_path, source, ["ok"] * 13, start_timeout_s=5.0)) == [1.0] * 13  # 6.5 s
    assert time.process_time() - busy < 0.5


def test_a_long_list_of_slow_samples_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "SILENCE_LIMIT_S", 0.3)
    source = "import time\ndef own(completion):\n    time.sleep(0.2)\n    return 1.0\n"
    runner = RewardRunner(settings(tmp_path, source))
    try:
        runner.ready.result(timeout=20)
        assert outcomes(runner.judge([RewardItem("", {"completion": "ok"})] * 6)) == [1.0] * 6
    finally:
        runner.close()
