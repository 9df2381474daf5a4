"""Writes the model that an adapter makes of its base: a Hugging Face directory with the weights that engines sampled with.

Host memory holds a few copies of one parameter, never the model: a parameter is read, merged and written before the next.
The experts of a layer are one parameter. Only a base without safetensors files is loaded whole.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils import logging

from rlsys.forward.lora import adapted_layers, add_adapters, merge
from rlsys.models.adapters import read_adapter_config
from workers.learner.files import model_shards
from workers.learner.files.adapter_files import base_fingerprint, fill_adapters, require_base
from workers.learner.files.host_memory import giving_back_large_blocks
from workers.learner.files.loading import load_complete
from workers.learner.files.model_files import DescribedTensor, ModelFiles, describing_files
from workers.learner.files.partitioning import tie_equal_weights
from workers.learner.files.tensor_files import stream_tensors
from workers.sync.disk_format import to_disk_format


def write_merged_model(
    adapter: Path, base: str, target: Path, dtype: str, format: str, trust_remote_code: bool = False
) -> None:
    """`dtype`: of the policy, and of the files. `format`: of the engines, to which merged weights are rounded."""
    logging.disable_progress_bar()
    with giving_back_large_blocks():
        files = describe_model(base, dtype, trust_remote_code)
        require_base(adapter, base_fingerprint(files.lm, files.read_whole), base)
        target.mkdir(parents=True, exist_ok=True)
        write_merged_weights(files, adapter, getattr(torch, format), target)
    AutoTokenizer.from_pretrained(base, trust_remote_code=trust_remote_code).save_pretrained(target)
    files.lm.generation_config.to_json_file(target / "generation_config.json")
    files.lm.config.save_pretrained(target)  # that of the model would import DeepSpeed


def describe_model(path: str, dtype: str, trust_remote_code: bool) -> ModelFiles:
    stored: dict[str, DescribedTensor] = {}
    with describing_files(stored):
        lm = load_complete(path, dtype, trust_remote_code)
    files = ModelFiles(lm, stored)
    tie_equal_weights(lm, files)
    return files


def write_merged_weights(files: ModelFiles, adapter: Path, format: torch.dtype, target: Path) -> None:
    lm, settings = files.lm, read_adapter_config(adapter)
    add_adapters(lm, rank=settings.rank, alpha=settings.alpha, targets=settings.targets, format=format, seed=0)
    fill_adapters(lm, adapter)
    tensors = model_shards.saved_tensors(lm)
    names_by_file = model_shards.split_into_files(tensors, model_shards.MAX_FILE)
    for file, names in names_by_file.items():
        chosen = {name: tensors[name] for name in names}
        described: dict[str, Tensor] = {}
        for name, tensor in chosen.items():
            described |= model_shards.describe_stored(lm, name, tensor)
        stream_tensors(target / file, described, merged_tensors(files, chosen))
    model_shards.write_index(lm, tensors, names_by_file, target)


def merged_tensors(files: ModelFiles, tensors: dict[str, Tensor]) -> Iterator[Tensor]:
    """Reads tensors one after the other, merges what has an adapter, and gives each the form that it has in files."""
    layers = {f"{name}.weight": layer for name, layer in adapted_layers(files.lm).items()}
    for name, tensor in tensors.items():
        weight = files.read_whole(name, tensor).detach()
        if layer := layers.get(name):
            weight = merge(weight, layer.lora_A.detach(), layer.lora_B.detach(), layer.scale, layer.format)
        for _, stored in to_disk_format(files.lm, name, weight):
            yield stored
