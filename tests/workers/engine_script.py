"""Scripts with an engine of vLLM, each in a process of its own: a process has one engine in its life."""

import json
import os
import subprocess
import sys
from typing import Any

from workers.rollout.engine_settings import CPU_ENVIRONMENT


def run_script(script: str, given: Any, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
    """Runs it in the environment of CPU engines; it reads `given` from its input, as JSON."""
    return subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(given),
        env={**os.environ, **CPU_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def read_results(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a script printed in lines such as `result ["name", value]`, by name."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    assert lines, done.stderr[-3000:]
    return dict(json.loads(line.removeprefix("result ")) for line in lines)
