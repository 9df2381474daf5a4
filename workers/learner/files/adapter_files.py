"""Adapters in PEFT's format: adapter_config.json, adapter_model.safetensors, and base_model.json with a fingerprint of the base."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from rlsys.config.schema import Config, LoraConfig
from rlsys.errors import ConfigError
from rlsys.forward.lora import ALL_LINEAR, adapted_layers, is_adapter
from rlsys.models.adapters import BASE, CONFIG, WEIGHTS, is_adapter_directory, read_adapter_config
from workers.learner.files.partitioning import gathered
from workers.learner.files.tensor_files import TensorFiles, tensor_bytes

PREFIX = "base_model.model."  # PEFT's wrappers


def peft_name(parameter: str) -> str:
    """ "model.layers.0.mlp.up_proj.lora_A" -> "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight" """
    return f"{PREFIX}{parameter}.weight"


def base_fingerprint(lm: Any, read: Callable[[str, Tensor], Tensor] = lambda _, parameter: parameter) -> str:
    """Returns a hash of all weights but the adapters', rounded to bfloat16: it is the same in float32 and in bfloat16.

    With ZeRO 3 all ranks take part. `read`: returns the values of a parameter that is only described, by its name.
    """
    digest = xxhash.xxh3_128()
    for name, parameter in lm.named_parameters():
        if not is_adapter(name):
            with gathered(parameter):
                digest.update(f"{name} {list(parameter.shape)}".encode())
                digest.update(tensor_bytes(read(name, parameter).detach().to("cpu", torch.bfloat16)))
    return digest.hexdigest()


def write_adapter_files(lm: Any, lora: LoraConfig, source: str, fingerprint: str, folder: Path) -> None:
    """Writes all of an adapter's directory but the weights."""
    layers = list(adapted_layers(lm))
    targets = sorted({n.rpartition(".")[2] for n in layers}) if ALL_LINEAR in lora.targets else sorted(lora.targets)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    (folder / BASE).write_text(json.dumps({"path": source, "fingerprint": fingerprint}, indent=2) + "\n")


def load_adapter(lm: Any, config: Config) -> None:
    """Loads the weights of model.adapter into the model's adapters, which have been made for its rank."""
    folder = Path(config.model.adapter).expanduser()
    read_adapter_config(folder)
    require_base(folder, base_fingerprint(lm), config.model.path)
    fill_adapters(lm, folder)


def fill_adapters(lm: Any, folder: Path) -> None:
    """Copies an adapter's tensors into the model."""
    try:
        files = TensorFiles([folder / WEIGHTS])
    except ValueError:
        raise ConfigError(f"{folder / WEIGHTS} is missing or damaged. Give the directory of a PEFT adapter.") from None
    wanted = {peft_name(name): p for name, p in lm.named_parameters() if is_adapter(name)}
    require_layers(folder, wanted, files.file_by_tensor)
    with torch.no_grad():
        for name, parameter in wanted.items():
            tensor = files.read(name)
            if tensor.shape != parameter.shape:
                raise ConfigError(
                    f"{folder}: {name} is {list(tensor.shape)}, and the model needs {list(parameter.shape)}. "
                    "It is an adapter of another base or rank."
                )
            parameter.copy_(tensor)


def require_layers(folder: Path, wanted: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Raises `ConfigError` unless the adapter adapts exactly the layers that policy.lora.targets names."""
    for more, less, who in ((actual, wanted, "the adapter adapts"), (wanted, actual, "policy.lora.targets names")):
        if names := sorted(more.keys() - less.keys()):
            raise ConfigError(
                f"{folder}: only {who} {names[0].removeprefix(PREFIX)}, and {len(names) - 1} more. Use an adapter of this "
                "base, and policy.lora.targets as in its adapter_config.json."
            )


def require_base(folder: Path, fingerprint: str, model: str) -> None:
    """Raises `ConfigError` if the adapter was trained on another base. An adapter that PEFT wrote does not name its base."""
    file = folder / BASE
    if file.is_file() and (saved := json.loads(file.read_text()))["fingerprint"] != fingerprint:
        raise ConfigError(
            f"{folder} is an adapter of another base, {saved['path']}: its weights have fingerprint "
            f"{saved['fingerprint'][:8]}, and those of {model} have {fingerprint[:8]}. Use the same model.path."
        )


def require_kind(folder: Path, adapters: bool) -> None:
    """Raises `ConfigError` for a checkpoint of adapters where all weights are trained, and the other way round."""
    saved = is_adapter_directory(folder / "model")
    if saved != adapters:
        raise ConfigError(
            f"{folder} is a checkpoint of {'LoRA adapters' if saved else 'all weights'}, and policy.lora "
            f"{'trains adapters' if adapters else 'is off'}. Set policy.lora as in the run that wrote it."
        )
