"""Runs that are looked at, or disturbed, and what must be equal to the undisturbed one all the same."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from rlsys.tasks import zigzag as tiny_task

ROOT = Path(__file__).parent.parent.parent
CONFIG = ROOT / "configs" / "tiny_cpu.yaml"
SHARED_MEMORY = Path("/dev/shm")
ENVIRONMENT, TEMPORARY = dict(os.environ), tempfile.gettempdir()  # before tests start a Ray in this process
GAME = Path(__file__).parent / "own_game.py"
PASSING = re.compile(r"time/|tokens_per_second")  # seconds, which no two runs share
STEPS = ["trainer.steps=10", "checkpoint.every=3", "eval.every=5", "trainer.prompts_per_step=8"]
LIGHT = [
    "rollout.engines=1",
    "policy.ranks=1",
    "reward.workers=1",
]  # starting processes is most of what these tests cost
EPISODES = [
    *[f"episode={{play: '{GAME}:play', window: 64, max_turns: 5}}", "reward.functions={}"],
    *["rollout.max_new_tokens=6", "trainer.samples_per_prompt=4", "policy.lr=1e-4"],
]


def few_held_out(folder: Path) -> str:
    """Returns an option: evaluate a few prompts only."""
    few = folder / "few.jsonl"
    few.write_text("".join(json.dumps({"prompt": r["prompt"]}) + "\n" for r in tiny_task.rows("zigzag_heldout")[:8]))
    return f"eval.datasets={few}"


class Run:
    """`rlsys train` in a process group of its own, and its run directory."""

    def __init__(self, path: Path, *overrides: str, config: Path = CONFIG, environment: dict[str, str] | None = None):
        self.path, self.environment = path, (environment or ENVIRONMENT) | {"PYTHONPATH": str(ROOT)}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.output = path.with_suffix(".txt")
        self.command = [sys.executable, "-m", "launch", "train", str(config), f"run.dir={path}", *overrides]

    def start(self) -> "Run":
        with self.output.open("a") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
            )
        return self

    def wait(self, timeout_s: float = 400) -> int:
        return self.process.wait(timeout_s)

    def text(self) -> str:
        return self.output.read_text()

    def until(self, condition: Callable[[], Any], timeout_s: float = 300, every_s: float = 0.02) -> Any:
        """Waits for something to be there, while the run goes on."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, psutil.Error, ValueError):
                if value := condition():
                    return value
            assert self.process.poll() is None, f"the run ended early:\n{self.text()}"
            time.sleep(every_s)
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
        assert process.create_time() == place["created"]
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
def running(path: Path, *overrides: str, **more: Any) -> Iterator[Run]:
    run = Run(path, *overrides, **more).start()
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.end()


class Apart:
    """Runs with a temporary directory of their own, by which all of their processes, who inherit it, are known."""

    def __init__(self, temporary: Path):
        self.temporary, self.before = temporary, set(SHARED_MEMORY.iterdir())
        self.environment = ENVIRONMENT | {"TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1"}

    def left(self, patience_s: float = 10) -> list[str]:
        """Processes, shared memory and temporary files that have not gone by then."""
        deadline = time.monotonic() + patience_s
        while (remaining := self.there()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return remaining

    def there(self) -> list[str]:
        processes = list(psutil.process_iter())
        own = [p for p in processes if belongs(p, self.temporary)]
        shared = set(SHARED_MEMORY.iterdir()) - self.before
        if shared:  # tests beside this one have theirs in use
            shared -= {Path(file) for p in processes if p not in own for file in mapped_files(p)}
        files = [*self.temporary.iterdir(), *shared]
        return [f"process {p.pid} {p.name()}" for p in own] + [str(file) for file in files]


@contextlib.contextmanager
def apart() -> Iterator[Apart]:
    temporary = Path(tempfile.mkdtemp(prefix="t-", dir=TEMPORARY))
    try:
        yield Apart(temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def tidy() -> Iterator[dict[str, str]]:
    """The environment of runs of which nothing may be left in the end."""
    with apart() as place:
        yield place.environment
        assert not (left := place.left()), left


def belongs(process: psutil.Process, temporary: Path) -> bool:
    try:
        inherited = process.environ().get("TMPDIR", "").startswith(str(temporary))
        return inherited and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def mapped_files(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error, OSError):
        return [region.path for region in process.memory_maps()]
    return []


def read(file: Path) -> list[dict[str, Any]]:
    records = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def outcome(path: Path) -> dict[str, Any]:
    """What must be equal: every figure but seconds, every sample, and the newest weights."""
    lines = [{k: v for k, v in line.items() if not PASSING.match(k)} for line in read(path / "metrics.jsonl")]
    samples = {p.name: digest(p) for p in sorted((path / "samples").glob("*.parquet"))}
    newest = max(path.glob("checkpoints/step-*"))
    weights = {p.name: digest(p) for p in (newest / "model").glob("*.safetensors")}  # a model's, or an adapter
    assert weights
    return {"lines": lines, "samples": samples, "weights": weights}


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def require_equal(one: Path, other: Path) -> None:
    a, b = outcome(one), outcome(other)
    assert [line["step"] for line in a["lines"]] == [line["step"] for line in b["lines"]]
    for x, y in zip(a["lines"], b["lines"], strict=True):
        assert x == y, f"step {x['step']}: {sorted(k for k in x.keys() | y.keys() if x.get(k) != y.get(k))}"
    assert a["samples"] == b["samples"]
    assert a["weights"] == b["weights"]
