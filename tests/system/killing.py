"""Runs that are disturbed, and what must be equal to the undisturbed one all the same."""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent.parent
CONFIG = ROOT / "configs" / "tiny_cpu.yaml"
PASSING = re.compile(r"time/|tokens_per_second")  # seconds, which no two runs share


class Run:
    """`rlsys train` in a process group of its own, and its run directory."""

    def __init__(self, path: Path, *overrides: str):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.output = path.with_suffix(".txt")
        self.command = [sys.executable, "-m", "launch", "train", str(CONFIG), f"run.dir={path}", *overrides]

    def start(self) -> "Run":
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with self.output.open("a") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        return self

    def wait(self, timeout_s: float = 400) -> int:
        return self.process.wait(timeout_s)

    def text(self) -> str:
        return self.output.read_text()

    def until(self, seen: Callable[[], Any], timeout_s: float = 200) -> Any:
        """Waits for something to be there, while the run goes on."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, psutil.Error, ValueError):
                if found := seen():
                    return found
            assert self.process.poll() is None, f"the run ended early:\n{self.text()}"
            time.sleep(0.02)
        raise AssertionError(f"waited for {timeout_s} s:\n{self.text()}")

    def until_step(self, step: int) -> None:
        self.until(lambda: any(line["step"] >= step for line in self.lines()))

    def lines(self) -> list[dict[str, Any]]:
        return read(self.path / "metrics.jsonl")

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in read(self.path / "events.jsonl") if e["event"] == kind]

    def process_of(self, worker: str) -> psutil.Process:
        place = json.loads((self.path / "logs" / f"{worker}.pid").read_text())
        process = psutil.Process(place["pid"])
        assert process.create_time() == place["began"]
        return process

    def kill(self, worker: str, number: int = signal.SIGKILL) -> None:
        self.until(lambda: self.process_of(worker)).send_signal(number)

    def family(self) -> list[psutil.Process]:
        """Every process of the run, the command's own first."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def end(self) -> None:
        """Kills all of it, as losing the machine would."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self.family():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait(30)


@contextlib.contextmanager
def running(path: Path, *overrides: str) -> Iterator[Run]:
    run = Run(path, *overrides).start()
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.end()


def read(file: Path) -> list[dict[str, Any]]:
    found = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def outcome(path: Path) -> dict[str, Any]:
    """What must be equal: every figure but seconds, every sample, and the newest weights."""
    lines = [{k: v for k, v in line.items() if not PASSING.match(k)} for line in read(path / "metrics.jsonl")]
    samples = {p.name: digest(p) for p in sorted((path / "samples").glob("*.parquet"))}
    newest = max(path.glob("checkpoints/step-*"))
    return {"lines": lines, "samples": samples, "weights": digest(newest / "model" / "model.safetensors")}


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def require_equal(one: Path, other: Path) -> None:
    a, b = outcome(one), outcome(other)
    assert [line["step"] for line in a["lines"]] == [line["step"] for line in b["lines"]]
    for x, y in zip(a["lines"], b["lines"], strict=True):
        assert x == y, f"step {x['step']}: {sorted(k for k in x.keys() | y.keys() if x.get(k) != y.get(k))}"
    assert a["samples"] == b["samples"]
    assert a["weights"] == b["weights"]
