"""The command by which a private Ray starts a worker."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from workers.supervision import worker_command
from workers.supervision.worker_command import rays_own

SAYS = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('PLACE'), 'ray' in sys.modules, sys.flags.isolated]))"


def started(
    tmp_path: Path, runtime: dict[str, object], *arguments: str, script: str = worker_command.__file__
) -> list[object]:
    """What the worker finds: its arguments, $PLACE, whether Ray is there already, and whether Python is isolated."""
    worker = tmp_path / "a worker.py"
    worker.write_text(SAYS)
    command = [sys.executable, script, f"--serialized-runtime-env-context={json.dumps(runtime)}", "--language=PYTHON"]
    environment = os.environ | {"WHERE": "here", "PLACE": "unset"}
    ended = subprocess.run(
        [*command, str(worker), *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    found: list[object] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("script", [worker_command.__file__, rays_own()])
def test_a_worker_gets_its_environment_and_arguments_as_from_rays_own_script(tmp_path: Path, script: str) -> None:
    nothing = {"command_prefix": [], "override_worker_entrypoint": None, "java_jars": []}
    runtime = nothing | {
        "env_vars": {"PLACE": "${WHERE} and ${NOWHERE_AT_ALL}."},
        "py_executable": f"{sys.executable} -I",
    }
    words = ["--node-ip-address=127.0.0.1", "two words", "it's; $HOME"]
    assert started(tmp_path, runtime, *words, script=script) == [words, "here and .", False, 1]
    assert started(tmp_path, {}, "--x=1", script=script) == [["--x=1"], "unset", False, 0]


def test_what_the_command_does_not_know_is_left_to_rays_own_script(tmp_path: Path) -> None:
    assert started(tmp_path, {"command_prefix": ["PLACE=prefixed", "&&", "export", "PLACE", "&&"]}) == [
        [],
        "prefixed",
        False,
        0,
    ]


def test_a_private_ray_starts_workers_by_the_command_and_nothing_that_a_run_has_no_use_for(ray: object) -> None:
    processes = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True) if p.is_running()]
    [raylet] = [words for words in processes if "--python_worker_command" in words]
    assert f"--python_worker_command={sys.executable} {worker_command.__file__} " in raylet
    assert not [words for words in processes if "autoscaler" in words or "log_monitor" in words]
