"""`verifiers:TASKSET`: the tasks of an environment that is written with the package verifiers (its `verifiers.v1`).

    data:
      train:
        verifiers:my_taskset: {size: 1000, difficulty: hard}

`size` is the most tasks to take; all else is the taskset's own configuration. A row holds its task as the package
writes it, and the names to make it again.
"""

import functools
import json
from itertools import islice
from typing import Any

from rlsys.config.shorthand import VERIFIERS
from rlsys.errors import ConfigError

FIELD = "verifiers"  # of a row: [taskset, its configuration as JSON, the task as JSON]
SIZE = 1000


def rows(name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    settings = {k: v for k, v in options.items() if k != "size"}
    taskset = make_taskset(name, json.dumps(settings, sort_keys=True))
    try:
        tasks = list(islice(taskset, options.get("size", SIZE)))
    except Exception as error:  # its code loads them
        raise ConfigError(f"{VERIFIERS}{name}: loading its tasks raised {type(error).__name__}: {error}.") from error
    return [
        {
            "prompt": task.data.prompt_text,
            "source": name,
            FIELD: [name, json.dumps(settings, sort_keys=True), task.data.model_dump_json()],
        }
        for task in tasks
    ]


def check(name: str, options: dict[str, Any]) -> None:
    """Raises `ConfigError` for a taskset that is not installed, or options that it does not have."""
    size = options.get("size", SIZE)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"{VERIFIERS}{name}: size is {size!r}; it is a whole number of 1 or more.")
    make_taskset(name, json.dumps({k: v for k, v in options.items() if k != "size"}, sort_keys=True))


@functools.lru_cache(maxsize=16)
def make_taskset(name: str, settings: str) -> Any:
    try:
        from verifiers.v1.utils.loaders import load_taskset, taskset_config_type
    except ImportError as error:
        raise ConfigError(
            f"{VERIFIERS}{name} needs the package verifiers: pip install 'rlsys[verifiers]' ({error})."
        ) from None
    try:
        return load_taskset(taskset_config_type(name).model_validate({"id": name} | json.loads(settings)))
    except Exception as error:  # importing and configuring it runs its code
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"{VERIFIERS}{name}: {' '.join(reason)[:300].rstrip('.')}.") from None
