"""`reasoning_gym:TASK`: the tasks of the package reasoning_gym, with its own score as the reward.

    data:
      train:
        reasoning_gym:chain_sum: {size: 2000, seed: 1, max_terms: 3}

Everything but the fields of a data set is an option of the task. A row holds the task, its options and its number. From
these the score makes the question again, because not every question survives JSON.
"""

import functools
import json
from typing import Any

from rlsys.config.shorthand import GYM
from rlsys.errors import ConfigError

FIELD = "reasoning_gym"  # of a row: [task, options as JSON, number]
DEFAULTS = {"size": 2000, "seed": 0}


def rows(task: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The questions of a task. Raises `ConfigError` if they cannot be made."""
    settings = json.dumps(DEFAULTS | options, sort_keys=True)
    dataset = make_dataset(task, settings)
    questions = [(i, dataset[i]) for i in range(len(dataset))]
    return [
        {"prompt": q["question"], "answer": q["answer"], "source": task, FIELD: [task, settings, i]}
        for i, q in questions
    ]


def check(task: str, options: dict[str, Any]) -> None:
    """Raises `ConfigError` for a task or an option that the package does not have."""
    make_dataset(task, json.dumps(DEFAULTS | options, sort_keys=True))


@functools.lru_cache(maxsize=64)
def make_dataset(task: str, settings: str) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(f"{GYM}{task} needs the package reasoning_gym: pip install 'rlsys[gym]' ({error}).") from None
    if task not in DATASETS:
        raise ConfigError(f"{GYM}{task} does not exist; tasks: {', '.join(sorted(DATASETS))}.")
    options = json.loads(settings)
    try:
        if task == "composite":
            options["datasets"] = [
                DatasetSpec(**{"weight": 1.0, "config": {}} | d) for d in options.get("datasets", [])
            ]
        return reasoning_gym.create_dataset(task, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{GYM}{task}: {error or 'its options do not fit each other'}.") from None
