"""The policy's part of a checkpoint. Each rank writes its own share.

model/       a Hugging Face model directory; with policy.lora the directory of a PEFT adapter, from rank 0
optimizer/   part-00000-of-00002.safetensors, …: Adam's state, and the fp32 weights if `model/` does not hold them,
             because it is in bfloat16, or transformers stores the tensors in another form, or it is an adapter
"""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlsys.config.schema import Config
from rlsys.models.adapters import WEIGHTS
from rlsys.models.weight_files import INDEX, SINGLE
from rlsys.packs.lora import adapted_layers, trained_parameters
from workers.learner.adapter_files import peft_name, require_base, require_kind, write_adapter_files
from workers.learner.tensor_files import TensorFiles
from workers.learner.zero import ZeroEngine
from workers.learner.zero_state import MOMENTS, WEIGHT
from workers.sync.disk_format import to_disk_format

MAX_FILE = 5 * 10**9  # bytes


def copy_state(zero: ZeroEngine, lm: Any, dtype: str) -> dict[str, dict[str, Any]]:
    """Copies this rank's share of the state to host memory. Returns tensors by file and name."""
    parameters, adapters = trained_parameters(lm), bool(adapted_layers(lm))
    model_holds_fp32 = dtype == "float32" and not lm._weight_conversions and not adapters
    files = {
        f"optimizer/{zero.shard_file()}": zero.state.owned_tensors(
            parameters, MOMENTS if model_holds_fp32 else (WEIGHT, *MOMENTS)
        )
    }
    if not adapters:
        return files | copy_model(zero, lm)
    weights = gather_weights(zero, lm)
    if zero.rank == 0:
        files[f"model/{WEIGHTS}"] = {peft_name(name): tensor for name, tensor in weights.items()}
    return files


def copy_model(zero: ZeroEngine, lm: Any) -> dict[str, dict[str, Any]]:
    """Copies the weights that this rank writes into `model/` to host memory: every n-th of the model's files."""
    parameters, files = trained_parameters(lm), {}
    for number, (file, names) in enumerate(model_files(lm, zero).items()):
        tensors: dict[str, Any] = {}
        for name in names:
            with zero.gathered(parameters[name]):
                if number % zero.ranks == zero.rank:
                    tensors |= to_disk_format(lm, name, parameters[name].detach().to("cpu", copy=True))
        if tensors:
            files[f"model/{file}"] = tensors
    return files


def model_files(lm: Any, zero: ZeroEngine) -> dict[str, list[str]]:
    """Deals the parameters to files of at most 5 GB. With ZeRO 3, each rank gets one at least, so that none holds all.

    One file is "model.safetensors", several are "model-00001-of-00002.safetensors" and so on, as the tools of the hub
    expect it.
    """
    parameters = trained_parameters(lm)
    sizes = {n: getattr(p, "ds_numel", p.numel()) * p.element_size() for n, p in parameters.items()}
    limit = min(MAX_FILE, -(-sum(sizes.values()) // zero.ranks)) if zero.settings.zero_stage == 3 else MAX_FILE
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def file_index(lm: Any, zero: ZeroEngine) -> dict[str, Any]:
    """The index of `model/`: which file holds which tensor."""
    import torch

    parameters, file_by_tensor, total = trained_parameters(lm), {}, 0
    for file, names in model_files(lm, zero).items():
        for name in names:
            shape = getattr(parameters[name], "ds_shape", parameters[name].shape)
            described = torch.empty(shape, dtype=parameters[name].dtype, device="meta")
            for stored, tensor in to_disk_format(lm, name, described):
                file_by_tensor[stored] = file
                total += tensor.nbytes
    return {"metadata": {"total_size": total}, "weight_map": file_by_tensor}


def gather_weights(zero: ZeroEngine, lm: Any) -> dict[str, Any]:
    """Copies all weights that are trained to the host memory of rank 0. Returns nothing on other ranks."""
    weights = {}
    for name, parameter in trained_parameters(lm).items():
        with zero.gathered(parameter):
            if zero.rank == 0:
                weights[name] = parameter.detach().to("cpu", copy=True)
    return weights


def write_model_files(zero: ZeroEngine, lm: Any, source: str, config: Config, fingerprint: str, folder: Path) -> None:
    """Writes all of `model/` except the weights. `fingerprint`: of the base of adapters."""
    from transformers import AutoTokenizer

    if config.policy.lora.rank:
        write_adapter_files(lm, config.policy.lora, source, fingerprint, folder)
    else:
        write_model_settings(lm, folder)
        index = file_index(lm, zero)
        if len(set(index["weight_map"].values())) > 1:
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=config.model.trust_remote_code)
    tokenizer.save_pretrained(folder)


def write_model_settings(lm: Any, folder: Path) -> None:
    """Writes config.json and generation_config.json."""
    # The generation config stays as the model's authors wrote it. transformers reads some that it refuses to write.
    generation_config, lm.generation_config = lm.generation_config, type(lm.generation_config)()
    with TemporaryDirectory() as settings:  # `save_pretrained` would delete the files with weights
        lm.save_pretrained(settings, state_dict={})
        for file in Path(settings).iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, folder)
    lm.generation_config = generation_config
    generation_config.to_json_file(folder / "generation_config.json")


def load_state(zero: ZeroEngine, lm: Any, source: str, fingerprint: str, folder: Path) -> None:
    """Restores the state from the files of any number of ranks and any ZeRO stage."""
    require_kind(folder, bool(adapted_layers(lm)))
    require_base(folder / "model", fingerprint, source)
    optimizer = TensorFiles(sorted((folder / "optimizer").glob("*.safetensors")))
    has_weights = any(name.startswith(f"{WEIGHT}/") for name in optimizer.file_by_tensor)
    model = None if has_weights else TensorFiles(sorted((folder / "model").glob("*.safetensors")))
    zero.state.restore(trained_parameters(lm), optimizer, model)
