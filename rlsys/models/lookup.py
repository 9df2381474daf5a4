"""Finds the shape of the model at `model.path`: in its config.json, or in the table of well-known models."""

import contextlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlsys.batching.balance import DEFAULT_PAIRS_PER_TOKEN
from rlsys.config.cache import hub_cache
from rlsys.errors import ConfigError
from rlsys.models.config_json import ModelLimits, limits_from_config, parse_config
from rlsys.models.flops import FlopCounter
from rlsys.models.known_shapes import look_up_shape
from rlsys.models.shapes import ModelShape
from rlsys.models.support import architecture_problem, model_problem

Value = TypeVar("Value")


def model_shape(path: str, file: str | Path = "") -> tuple[ModelShape, str]:
    """Returns the shape of the model at `model.path`, and where it was found. `file` is a config.json to read instead."""
    if file:
        return _read_config_file(path, Path(file).expanduser()), str(file)
    if (shape_and_source := find_model_shape(path)) is not None:
        return shape_and_source
    raise ConfigError(
        f"model.path: {path} is not on this machine, and its shape is not in the table of well-known models. "
        f"Give its config.json with --model-config FILE, or download it: hf download {path} config.json"
    )


def find_model_shape(path: str) -> tuple[ModelShape, str] | None:
    """Returns the shape and where it was found; None for a model that is neither on this machine nor in the table."""
    if (file := find_config_file(path)) is not None:
        return _read_config_file(path, file), str(file)
    if (shape := look_up_shape(path)) is not None:
        return shape, "the table of well-known models"
    return None


def known_model_shape(path: str) -> ModelShape | None:
    """Returns the shape; None also for a model whose architecture is not known."""
    with contextlib.suppress(ConfigError):
        if (shape_and_source := find_model_shape(path)) is not None:
            return shape_and_source[0]
    return None


def known_flop_counter(settings: dict[str, Any]) -> FlopCounter | None:
    """Counts the work of a model with this config.json; None for an architecture that is not known."""
    with contextlib.suppress(ConfigError):
        return parse_config("the model", settings).flop_counter
    return None


def limits_of_model(path: str) -> ModelLimits:
    """Reads the model's config.json, if it is on this machine."""
    return read_from_config(path, limits_from_config, ModelLimits())


def problem_of_model(path: str, device: str, verify: bool) -> str:
    """Returns why the model cannot be trained, by its config.json; empty if nothing is known. `verify`: sync.verify."""
    return read_from_config(path, partial(model_problem, device=device, verify=verify), "")


def architecture_problem_of_model(path: str) -> str:
    return read_from_config(path, architecture_problem, "")


def read_from_config(path: str, read: Callable[[dict[str, Any]], Value], unknown: Value) -> Value:
    """Returns what the model's config.json says; `unknown` if it is not on this machine, or cannot be read."""
    if (file := find_config_file(path)) is None:
        return unknown
    try:
        return read(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        return unknown


def pairs_per_token(path: str) -> float:
    """Returns how many pairs of query and key are as much work as one token's linear layers in the model at `model.path`."""
    try:
        counter = model_shape(path)[0].flop_counter
    except ConfigError:
        return DEFAULT_PAIRS_PER_TOKEN
    return counter.flops_per_token / (counter.flops_per_pair + counter.flops_per_pair_in_window)


def _read_config_file(name: str, file: Path) -> ModelShape:
    try:
        return parse_config(name, json.loads(file.read_text()))
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not the config.json of a language model: {type(error).__name__} {error}"
        ) from None


def find_config_file(path: str) -> Path | None:
    """Returns the config.json of a model directory, or of a hub name that was downloaded before."""
    file = Path(path).expanduser() / "config.json"
    return file if file.is_file() else find_cached_config(path)


def find_cached_config(name: str) -> Path | None:
    """Returns the newest config.json of a hub name in the local cache."""
    folder, _ = hub_cache()
    snapshots = folder / f"models--{name.replace('/', '--')}" / "snapshots"
    files = sorted(snapshots.glob("*/config.json"), key=lambda p: p.stat().st_mtime)
    return files[-1] if files else None
