"""Reads the configuration of a LoRA adapter that PEFT or a checkpoint of ours has written. The weights are in the same folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.errors import ConfigError

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model.json"
# Fields of PEFT's LoraConfig that may have any value: they name things, choose layers, which the tensors show anyway, or say
# how training began or dropped inputs.
FREE_FIELDS = frozenset(
    [
        "peft_type",
        "peft_version",
        "task_type",
        "ensure_weight_tying",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "runtime_config",
        "r",
        "lora_alpha",
        "lora_dropout",
        "init_lora_weights",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
    ]
)
UNUSED: tuple[object, ...] = (
    None,
    False,
    "none",
    "",
    [],
    {},
)  # as the value of any other field: its variant of LoRA is not used
# How A and B may have begun. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA also change the base, on which the adapter then learns.
PLAIN_STARTS = (None, True, False, "true", "false", "gaussian", "orthogonal", "eva", "mica")


@dataclass(frozen=True)
class AdapterConfig:
    """`AdapterConfig(rank=8, alpha=16.0, targets=["q_proj", "v_proj"])`"""

    rank: int
    alpha: float
    targets: list[str]


def is_adapter_directory(folder: str | Path) -> bool:
    return (Path(folder) / CONFIG).is_file()


def read_adapter_config(folder: str | Path) -> AdapterConfig:
    """Raises `ConfigError` if the directory holds no adapter, or one of a kind that cannot be merged as W + s B A."""
    file = Path(folder).expanduser() / CONFIG
    if not file.is_file():
        raise ConfigError(f"model.adapter: {file} does not exist. Give the directory of a PEFT adapter.")
    try:
        settings = json.loads(file.read_text())
        rank, alpha, targets = int(settings["r"]), float(settings["lora_alpha"]), settings["target_modules"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"model.adapter: {file} has no r, lora_alpha and target_modules; it is no LoRA adapter."
        ) from None
    if problem := find_variant(settings):
        raise ConfigError(
            f"model.adapter: {file} has {problem}, and rlsys trains plain LoRA only. Merge the adapter into its model with "
            "peft, and give that as model.path."
        )
    return AdapterConfig(rank, alpha, [targets] if isinstance(targets, str) else sorted(targets or []))


def find_variant(settings: dict[str, Any]) -> str:
    """Returns the field, with its value, by which an adapter is not W + s B A on the weights W that its base has."""
    start = settings.get("init_lora_weights")
    if (start.lower() if isinstance(start, str) else start) not in PLAIN_STARTS:
        return f"init_lora_weights: {start!r}, which changes the base model's weights"
    if (kind := settings.get("peft_type", "LORA")) != "LORA":
        return f"peft_type: {kind!r}"
    used = [name for name, value in settings.items() if name not in FREE_FIELDS and value not in UNUSED]
    return f"{used[0]}: {settings[used[0]]!r}" if used else ""
