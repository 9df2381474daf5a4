"""What a real run opens to others, and what it writes of a secret that its reward function has."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlsys.run_directory import read_lines

ROOT = Path(__file__).parent.parent.parent
SECRET = "Zq9-correct-horse-battery-7"
OWN = """
def judged(completion, api_key):
    if completion[:1] in "13579":
        raise ValueError("the service refuses the key " + api_key)
    return len(completion) / 10
"""


class Run:
    """A run, and what is seen of its processes."""

    def __init__(self, folder: Path):
        (folder / "own.py").write_text(OWN)
        self.path = folder / "run"
        command = [
            sys.executable,
            "-m",
            "launch",
            "train",
            str(ROOT / "configs" / "tiny_cpu.yaml"),
            f"run.dir={self.path}",
        ]
        command += ["trainer.prompts_per_step=4", "trainer.samples_per_prompt=4", "trainer.steps=100000"]
        command += ["eval.datasets=[]", "reward.max_failure_share=1"]
        command += ["reward.functions={own.py:judged: {api_key: '${oc.env:OWN_ACCESS}'}}"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OWN_ACCESS": SECRET},
        )

    def look(self) -> None:
        """In its second step or later; then it is told to stop."""
        deadline = time.monotonic() + 300
        while len(read_lines(self.path / "metrics.jsonl")) < 3:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.2)
        driver = psutil.Process(self.process.pid)
        self.listening: list[str] = []
        self.commands: list[str] = []
        for p in [driver, *driver.children(recursive=True)]:
            try:
                self.commands.append(" ".join(p.cmdline()))
                for c in p.net_connections("inet"):
                    if c.status == psutil.CONN_LISTEN or (c.type == 2 and not c.raddr):
                        self.listening.append(f"{c.laddr.ip} {c.laddr.port} {p.name()}")
            except psutil.NoSuchProcess:  # a reward process that has been replaced
                continue
        self.process.send_signal(signal.SIGTERM)
        self.output, _ = self.process.communicate(timeout=120)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("security"))
    try:
        run.look()
        yield run
    finally:
        run.process.kill()  # its driver ends with it


def test_no_process_of_a_run_listens_beyond_loopback(run: Run) -> None:
    owners = " ".join(run.listening)
    for name in ("gcs_server", "raylet", "PolicyRank", "RolloutWorker", "RewardWorker", "DashboardAgent"):
        assert name in owners
    assert [place for place in run.listening if not place.startswith(("127.", "::ffff:127.", "::1 "))] == []


def test_a_secret_of_a_reward_function_stands_in_no_file_no_command_and_no_output(run: Run) -> None:
    assert any(line["reward/failed"] > 0 for line in read_lines(run.path / "metrics.jsonl") if "reward/failed" in line)
    files = [p for p in run.path.rglob("*") if p.is_file()]
    assert {"config.yaml", "events.jsonl", "reward-0.log"} <= {p.name for p in files}
    assert [str(p) for p in files if SECRET.encode() in p.read_bytes()] == []
    assert "${oc.env:OWN_ACCESS}" in (run.path / "config.yaml").read_text()
    assert SECRET not in run.output + " ".join(run.commands)


def test_what_a_run_writes_is_not_open_to_be_written_by_others(run: Run) -> None:
    assert [str(p) for p in [run.path, *run.path.rglob("*")] if not p.is_symlink() and p.stat().st_mode & 0o002] == []
