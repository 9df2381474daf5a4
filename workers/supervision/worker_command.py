"""What a private Ray runs to start a worker: it puts the environment in place and becomes the worker.

Ray's own script does the same and imports Ray for it, as the worker then does once more. What this one does not know it leaves to that.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import sys


def expanded(text: str) -> str:
    """`${HOME}/x` with what the environment says; nothing where it says nothing."""
    return re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(text))


def rays_own() -> str:
    found = importlib.util.find_spec("ray")
    assert found is not None
    assert found.submodule_search_locations
    return os.path.join(found.submodule_search_locations[0], "_private", "workers", "setup_worker.py")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, rest = parser.parse_known_args()
    runtime = {name: value for name, value in json.loads(known.serialized_runtime_env_context).items() if value}
    if known.language != "PYTHON" or set(runtime) - {"env_vars", "py_executable"}:
        os.execv(sys.executable, [sys.executable, rays_own(), *sys.argv[1:]])
    for name, value in runtime.get("env_vars", {}).items():
        os.environ[name] = expanded(value)
    words = ["exec", runtime.get("py_executable", sys.executable), *map(shlex.quote, rest)]
    os.execvp("bash", ["bash", "-c", " ".join(words)])  # `py_executable` is written for a shell


if __name__ == "__main__":
    main()
