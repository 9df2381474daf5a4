"""Deals a model's tensors to safetensors files of at most 5 GB, and lists which file holds which tensor."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.forward.lora import is_adapter
from rlsys.models.weight_files import INDEX, SINGLE
from workers.sync.disk_format import to_disk_format

MAX_FILE = 5 * 10**9  # bytes


def saved_tensors(lm: Any) -> dict[str, Tensor]:
    """Returns the model's parameters without adapters, tied ones once, and the buffers that belong into files."""
    saved = lm.state_dict().keys()
    buffers = {name: buffer for name, buffer in lm.named_buffers() if name in saved}
    return {name: p for name, p in lm.named_parameters() if not is_adapter(name)} | buffers


def num_bytes(tensor: Any) -> int:
    """Of a whole tensor, of which ZeRO 3 may hold a part."""
    return int(getattr(tensor, "ds_numel", tensor.numel())) * int(tensor.element_size())


def split_into_files(tensors: Mapping[str, Any], limit: int) -> dict[str, list[str]]:
    """Returns names of tensors by file. A file is larger than the limit only if it holds a single tensor.

    One file is "model.safetensors", several are "model-00001-of-00002.safetensors" and so on, as the tools of the hub
    expect it.
    """
    groups: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        size = num_bytes(tensor)
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def describe_stored(lm: Any, name: str, tensor: Any) -> dict[str, Tensor]:
    """Returns what a tensor becomes in files, by name, without values."""
    shape = getattr(tensor, "ds_shape", tensor.shape)
    return dict(to_disk_format(lm, name, torch.empty(shape, dtype=tensor.dtype, device="meta")))


def file_index(lm: Any, tensors: Mapping[str, Any], files: Mapping[str, list[str]]) -> dict[str, Any]:
    file_by_tensor: dict[str, str] = {}
    total = 0
    for file, names in files.items():
        for name in names:
            stored = describe_stored(lm, name, tensors[name])
            file_by_tensor |= dict.fromkeys(stored, file)
            total += sum(tensor.nbytes for tensor in stored.values())
    return {"metadata": {"total_size": total}, "weight_map": file_by_tensor}


def write_index(lm: Any, tensors: Mapping[str, Any], files: Mapping[str, list[str]], folder: Path) -> None:
    """Writes the index, which a model in one file does not have."""
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps(file_index(lm, tensors, files), indent=2) + "\n")
