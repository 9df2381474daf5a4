"""The command by which a private Ray starts a worker: it sets the environment and becomes the worker.

Ray's own script does the same, but imports Ray for it, which the worker then imports once more. Runtime environments
that this command does not know are left to Ray's script.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import sys


def expand_variables(text: str) -> str:
    """Replaces `${HOME}` by its value in the environment, and an unset variable by nothing."""
    return re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(text))


def ray_setup_script() -> str:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.submodule_search_locations
    return os.path.join(spec.submodule_search_locations[0], "_private", "workers", "setup_worker.py")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    options, worker_arguments = parser.parse_known_args()
    context = json.loads(options.serialized_runtime_env_context)
    runtime = {name: value for name, value in context.items() if value}
    if options.language != "PYTHON" or set(runtime) - {"env_vars", "py_executable"}:
        os.execv(sys.executable, [sys.executable, ray_setup_script(), *sys.argv[1:]])
    for name, value in runtime.get("env_vars", {}).items():
        os.environ[name] = expand_variables(value)
    words = ["exec", runtime.get("py_executable", sys.executable), *map(shlex.quote, worker_arguments)]
    os.execvp("bash", ["bash", "-c", " ".join(words)])  # `py_executable` is written for a shell


if __name__ == "__main__":
    main()
