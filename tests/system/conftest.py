"""What whole runs share: an environment that nothing may be left of, and runs that several tests look at."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from killing import ROOT, STEPS, Run, running, tidy
from looking import Seen, look


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    with tidy() as environment:
        yield environment


@pytest.fixture
def rlsys(environment: dict[str, str]) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """`rlsys("eval", run)`, to its end."""
    return lambda *words: subprocess.run(
        [sys.executable, "-m", "launch", *words], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps, left alone."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    with tidy() as environment:
        run = Run(path, *STEPS, "checkpoint.keep_last=10", environment=environment).start()
        assert run.wait() == 0, run.text()
    return path


@pytest.fixture(scope="session")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A run whose reward function does its worst, and knows a secret; it is over."""
    options = ["trainer.steps=9", "policy.warmup_updates=0", "policy.lr_schedule=constant"]
    options += ["eval.every=0", "reward.timeout_s=1"]
    options.append(f"reward.functions={{{ROOT}/tests/system/traps.py:trap: {{api_key: '${{oc.env:OWN_ACCESS}}'}}}}")
    path, secret = tmp_path_factory.mktemp("trapped") / "run", {"OWN_ACCESS": "Zq9-correct-horse-battery-7"}
    with tidy() as environment, running(path, *options, environment=environment | secret) as run:
        run.until_step(2)
        observed = look(run)
        assert run.wait() == 0, run.text()
    return observed
