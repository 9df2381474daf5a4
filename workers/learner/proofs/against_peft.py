"""Compares an adapter that is loaded with what the library peft makes of its files, if peft is installed.

`adapter_proof` shows that policy and engines compute with W + s B A. This shows that peft would, too: an option of the
adapter that changes W, s or the product would make all of ours wrong alike.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlsys.errors import ConfigError
from rlsys.forward.lora import adapted_layers, merge
from workers.learner.files.partitioning import gathered

TOLERANCE = 1e-4  # as a share of the largest element; a real fault is about as large as that element


def compare_with_peft(lm: Any, folder: Path) -> None:
    """Raises `ConfigError` if peft merges one of the layers to another weight. It sees one layer of each name."""
    if find_spec("peft") is None:
        return
    gaps = {}
    for name, layer in {name.rpartition(".")[2]: (name, layer) for name, layer in adapted_layers(lm).items()}.values():
        with gathered(layer.weight, layer.lora_A, layer.lora_B):
            weight, a, b = (
                p.detach().to("cpu", torch.float32, copy=True) for p in (layer.weight, layer.lora_A, layer.lora_B)
            )
        ours = merge(weight, a, b, layer.scale, torch.float32)
        theirs = merge_by_peft(folder, name, weight.clone(), a, b)
        gaps[name] = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))
    worst = max(gaps, key=lambda name: gaps[name])
    if not gaps[worst] <= TOLERANCE:
        raise ConfigError(
            f"model.adapter: with {folder}, peft computes other weights of {worst} than rlsys: they differ by up to "
            f"{gaps[worst]:.2g} of the largest. It is no plain LoRA. Merge the adapter into its model with peft, and give "
            "that as model.path."
        )


def merge_by_peft(folder: Path, name: str, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Has peft merge an adapter into a model of one layer, whose name is the whole model's.  [out, in] -> [out, in]"""
    from peft import LoraConfig, inject_adapter_in_model

    settings: Any = LoraConfig.from_pretrained(str(folder))
    settings.target_modules = {name}  # `all-linear` needs the whole model
    model = nn.Module()
    *parents, last = name.split(".")
    parent = model
    for part in parents:
        parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    parent.add_module(last, layer)
    inject_adapter_in_model(settings, model)
    adapted: Any = model.get_submodule(name)
    adapted.lora_A["default"].weight.data, adapted.lora_B["default"].weight.data = a, b
    adapted.merge()
    return adapted.get_base_layer().weight.detach()
