"""What to rescore, and with which functions: the arguments of `rlsys rescore`."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.tools.targets import find_run
from rlsys import checks
from rlsys.config import loading, shorthand
from rlsys.config.schema import Config, RewardFunction
from rlsys.config.secrets import closed_environment, find_secrets
from rlsys.errors import ConfigError
from rlsys.rewards.check import find_problems

FILE_NAME = re.compile(r"(step|eval)-(\d+)")


def parse_rewards(rewards: tuple[str, ...]) -> dict[str, RewardFunction]:
    """Parses reward functions of the command line.

    ("exact", "mine.py:f=0.5") gives what {exact: 1.0, mine.py:f: 0.5} gives in YAML.
    """
    entries: dict[str, Any] = {}
    for text in rewards:
        name, equals, value = text.partition("=")
        try:
            entries[name] = loading.parse_value(value) if equals else None
        except ValueError:
            raise ConfigError(f"--reward {name}: what follows {name}= is neither a weight nor a mapping.") from None
    if secrets := find_secrets("reward.functions", entries):
        raise ConfigError(secrets)
    try:
        functions = shorthand.parse_functions("--reward", entries)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if problems := find_problems("--reward", functions):
        raise ConfigError(problems)
    return functions


def load_settings(target: str, functions: dict[str, RewardFunction], overrides: tuple[str, ...]) -> Config:
    """The run's configuration, with these functions for every data set. Its data and model need not exist any more."""
    from omegaconf import DictConfig, OmegaConf

    run = find_run(target)
    tree = OmegaConf.load(run / "config.yaml") if run else OmegaConf.create({})
    assert isinstance(tree, DictConfig)
    with closed_environment():  # the run may be somebody else's
        config = loading.build_config(tree, list(overrides), str(run / "config.yaml") if run else "defaults")
    config = replace(
        config,
        reward=replace(config.reward, functions=functions),
        data=replace(config.data, train={}),
        eval=replace(config.eval, datasets={}),
    )
    if problems := [p for p in checks.check(config) if p.startswith(("reward.", "cluster.start_timeout_s "))]:
        raise ConfigError(problems)
    return config


def find_sample_files(target: str, steps: str | None) -> list[Path]:
    """The sample files of a run, training steps first, or the one file that is the target."""
    path = Path(target).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{target} does not exist. Give a run, or a .parquet file of samples.")
    low, high = parse_steps(steps)
    matches = [(FILE_NAME.fullmatch(file.stem), file) for file in (path / "samples").glob("*.parquet")]
    numbered = sorted((match[1] == "eval", int(match[2]), file) for match, file in matches if match)
    if not numbered:
        raise ConfigError(f"{target} holds no samples: no samples/*.parquet.")
    if not (files := [file for _, step, file in numbered if low <= step <= high]):
        last = max(step for _, step, _ in numbered)
        raise ConfigError(f"--steps {steps}: {target} has no samples of these steps; its last step is {last}.")
    return files


def parse_steps(steps: str | None) -> tuple[float, float]:
    """ "10-20" -> 10, 20    "10" -> 10, 10    "10-" -> 10, inf    None -> 0, inf"""
    if steps is None:
        return 0, float("inf")
    if not (match := re.fullmatch(r"(\d*)(-?)(\d*)", steps)) or not steps.strip("-"):
        raise ConfigError(f"--steps is {steps}; it must be a step such as 40, or steps such as 10-40, 10- or -40.")
    low, dash, high = match.groups()
    return int(low or 0), (int(high) if high else float("inf")) if dash else int(low)
