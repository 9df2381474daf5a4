"""Chooses gradient checkpointing for the GPUs that a run has, as `rlsys plan` does for those that it is told."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from launch.tools.estimates.memory import SequenceLengths
from launch.tools.fitting.fit import Fit, check_fit
from launch.tools.fitting.formatting import format_gib
from launch.tools.fitting.nodes import make_node
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.models.config_json import parse_config
from rlsys.models.lookup import model_shape
from rlsys.models.shapes import ModelShape
from rlsys.runs.progress import Note


def with_checkpointing_chosen(config: Config, nodes: Sequence[dict[str, Any]], note: Note) -> Config:
    """Chooses by the nodes of `ray.nodes()`. Where the model's shape or the GPUs are not known, layers are computed again."""
    if config.policy.gradient_checkpointing is not None:
        return config
    try:
        fit = estimate_fit(config, nodes)
        recompute, reason = fit.config.policy.gradient_checkpointing, describe_fullest(fit)
    except ConfigError as error:
        recompute, reason = True, f"what a GPU would hold without it is not known ({error})"
    note(f"policy.gradient_checkpointing is {str(recompute).lower()}: {reason}")
    return replace(config, policy=replace(config.policy, gradient_checkpointing=recompute))


def estimate_fit(config: Config, nodes: Sequence[dict[str, Any]]) -> Fit:
    r = config.rollout
    prompt = r.max_prompt_tokens or max(config.policy.tokens_per_pack - r.max_new_tokens, 1)
    lengths = SequenceLengths(prompt, r.max_new_tokens)
    found = [make_node(n["NodeManagerAddress"], n["Resources"], n["Resources"]) for n in nodes if n["Alive"]]
    return check_fit(config, find_shape(config), lengths, r.max_new_tokens, found)


def describe_fullest(fit: Fit) -> str:
    if fit.tightest is None:
        return "there is no GPU to keep activations on"
    held, capacity = format_gib(fit.tightest.needed), format_gib(fit.tightest.capacity)
    return f"a GPU then holds at most {held} of {capacity} GiB by estimate"


def find_shape(config: Config) -> ModelShape:
    """Reads config.json from the hub if it is not on this machine. Raises `ConfigError` for an unknown architecture."""
    try:
        return model_shape(config.model.path)[0]
    except ConfigError:
        from transformers import AutoConfig

        try:
            settings = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
        except Exception as error:
            raise ConfigError(f"{config.model.path}: {' '.join(str(error).split())[:200]}") from None
        return parse_config(config.model.path, settings.to_dict())
