"""The command that a private Ray starts workers by."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from command_lines import command_of

from workers.start import worker_command
from workers.start.worker_command import ray_setup_script

WORKER = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('PLACE'), 'ray' in sys.modules, sys.flags.isolated]))"


def start_worker(
    tmp_path: Path, runtime: dict[str, object], *arguments: str, script: str = worker_command.__file__
) -> list[object]:
    """Returns what the worker sees: its arguments, $PLACE, whether Ray is imported, and whether Python is isolated."""
    worker = tmp_path / "a worker.py"
    worker.write_text(WORKER)
    command = [sys.executable, script, f"--serialized-runtime-env-context={json.dumps(runtime)}", "--language=PYTHON"]
    environment = os.environ | {"WHERE": "here", "PLACE": "unset"}
    done = subprocess.run(
        [*command, str(worker), *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    reports: list[object] = json.loads(done.stdout.splitlines()[-1])
    return reports


@pytest.mark.parametrize("script", [worker_command.__file__, ray_setup_script()])
def test_a_worker_gets_its_environment_and_arguments_as_from_rays_script(tmp_path: Path, script: str) -> None:
    empty = {"command_prefix": [], "override_worker_entrypoint": None, "java_jars": []}
    runtime = empty | {
        "env_vars": {"PLACE": "${WHERE} and ${NOWHERE_AT_ALL}."},
        "py_executable": f"{sys.executable} -I",
    }
    words = ["--node-ip-address=127.0.0.1", "two words", "it's; $HOME"]
    assert start_worker(tmp_path, runtime, *words, script=script) == [words, "here and .", False, 1]
    assert start_worker(tmp_path, {}, "--x=1", script=script) == [["--x=1"], "unset", False, 0]


def test_an_unknown_runtime_environment_is_left_to_rays_script(tmp_path: Path) -> None:
    assert start_worker(tmp_path, {"command_prefix": ["PLACE=prefixed", "&&", "export", "PLACE", "&&"]}) == [
        [],
        "prefixed",
        False,
        0,
    ]


def test_a_private_ray_starts_workers_by_the_command_and_no_unused_process(ray: object) -> None:
    processes = [" ".join(command_of(process)) for process in psutil.Process().children(recursive=True)]
    [raylet] = [words for words in processes if "--python_worker_command" in words]
    assert f"--python_worker_command={sys.executable} {worker_command.__file__} " in raylet
    assert not [words for words in processes if "autoscaler" in words or "log_monitor" in words]
