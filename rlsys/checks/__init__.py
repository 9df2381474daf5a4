"""Finds the problems of a configuration: each a sentence with the numbers and a way out. One function per section.

values     each option by itself: choices and ranges, which the schema states next to the option
methods    algorithm, correction, entropy, critic, reference
supervised what supervised training does not take
lora       policy.lora, model.adapter
training   trainer, policy, overlong, dynamic_sampling
sampling   rollout, pipeline
machines   cluster, sync, watchdog
model      model
rewards    reward
episodes   episode
data       data, eval
unused     options without effect, which are no error
notes      choices that are probably not meant, which are no error
"""

from itertools import chain
from pathlib import Path

from rlsys.checks.data import check_data, check_eval
from rlsys.checks.episodes import check_episode
from rlsys.checks.lora import check_lora
from rlsys.checks.machines import check_cluster, check_sync, check_watchdog
from rlsys.checks.methods import check_algorithm, check_correction, check_critic, check_entropy, check_reference
from rlsys.checks.model import check_model, check_model_fits
from rlsys.checks.rewards import check_reward
from rlsys.checks.sampling import check_pipeline, check_rollout
from rlsys.checks.supervised import check_supervised
from rlsys.checks.training import (
    check_dynamic_sampling,
    check_overlong,
    check_policy,
    check_schedule,
    check_sequence_parallel,
    check_trainer,
)
from rlsys.checks.values import check_values
from rlsys.config.loading import load_config
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.models.shapes import ModelShape
from rlsys.tracking.builtin import tracker_problems

SECTIONS = (
    *(check_values, check_algorithm, check_correction, check_trainer, check_dynamic_sampling, check_reference),
    *(check_entropy, check_critic, check_overlong, check_policy, check_schedule, check_rollout, check_pipeline),
    *(
        check_supervised,
        check_sequence_parallel,
        check_reward,
        check_episode,
        check_data,
        check_eval,
        check_cluster,
        check_sync,
        check_watchdog,
        check_model,
        check_lora,
    ),
)


def load_checked(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads a configuration as `config.loading.load_config` does. Raises `ConfigError` with all problems of `check`."""
    config = load_config(path, overrides)
    if problems := check(config):
        raise ConfigError(problems)
    return config


def check(config: Config, model: ModelShape | None = None) -> list[str]:
    """Returns all problems at once.

    `model` is the model's shape, where the caller knows it from elsewhere than a config.json.
    """
    problems = list(chain.from_iterable(check_section(config) for check_section in SECTIONS))
    return [*problems, *tracker_problems(config.tracking), *check_model_fits(config, config.model.path, model)]
