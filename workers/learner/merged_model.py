"""Writes the model that an adapter makes of its base: a Hugging Face directory with the weights that engines sampled with."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from rlsys.models.adapters import read_adapter_config
from rlsys.packs.lora import add_adapters
from workers.learner.adapter_files import base_fingerprint, fill_adapters, require_base
from workers.learner.tensor_files import write_tensors


def write_merged_model(
    adapter: Path, base: str, target: Path, dtype: str, format: str, trust_remote_code: bool = False
) -> None:
    """`dtype`: of the policy, and of the files. `format`: of the engines, to which merged weights are rounded."""
    logging.disable_progress_bar()
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code)
    require_base(adapter, base_fingerprint(lm), base)
    merge_adapter(lm, adapter, getattr(torch, format))
    target.mkdir(parents=True, exist_ok=True)
    lm.config.save_pretrained(target)  # that of the model would import DeepSpeed
    lm.generation_config.to_json_file(target / "generation_config.json")
    weights = {name: parameter.detach() for name, parameter in lm.named_parameters()}
    write_tensors(
        target / "model.safetensors", revert_weight_conversion(lm, weights) if lm._weight_conversions else weights
    )
    AutoTokenizer.from_pretrained(base, trust_remote_code=trust_remote_code).save_pretrained(target)


def merge_adapter(lm: Any, adapter: Path, format: torch.dtype) -> None:
    """Turns layers with adapters into plain linear layers with the merged weights."""
    settings = read_adapter_config(adapter)
    layers = add_adapters(lm, rank=settings.rank, alpha=settings.alpha, targets=settings.targets, format=format, seed=0)
    fill_adapters(lm, adapter)
    for layer in layers.values():
        layer.weight.data = layer.merged()
        del layer.lora_A, layer.lora_B
        layer.__class__ = nn.Linear  # type: ignore[assignment]
