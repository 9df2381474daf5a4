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


def command(runtime: dict[str, object], arguments: list[str]) -> list[str]:
    """`exec python default_worker.py …`, by way of a shell, as `py_executable` is written for one."""
    words = ["exec", str(runtime["py_executable"]), *map(shlex.quote, arguments)]
    return ["bash", "-c", " ".join(words)]


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
    words = command({"py_executable": sys.executable} | runtime, rest)
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
