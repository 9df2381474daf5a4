"""Reads the configuration of a LoRA adapter that PEFT or a checkpoint of ours has written. The weights are beside it."""

import json
from dataclasses import dataclass
from pathlib import Path

from rlsys.config.schema import ConfigError

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model.json"
# Variants of LoRA that PEFT has: each with the values under which an adapter is without it.
VARIANTS: dict[str, tuple[object, ...]] = {
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
}


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
    used = [name for name, unused in VARIANTS.items() if settings.get(name) not in unused]
    if used:
        raise ConfigError(
            f"model.adapter: {file} has {used[0]}: {settings[used[0]]!r}, and rlsys trains plain LoRA only. Merge the adapter "
            "into its model with peft, and give that as model.path."
        )
    return AdapterConfig(rank, alpha, [targets] if isinstance(targets, str) else sorted(targets or []))
