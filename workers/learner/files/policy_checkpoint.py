"""The policy's part of a checkpoint. Each rank writes its own share.

model/       a Hugging Face model directory; with policy.lora the directory of a PEFT adapter, from rank 0
optimizer/   part-00000-of-00002.safetensors, …: Adam's state, and the fp32 weights if `model/` does not hold them,
             because it is in bfloat16, or transformers stores the tensors in another form, or it is an adapter
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlsys.config.schema import Config
from rlsys.forward.lora import adapted_layers, trained_parameters
from rlsys.models.adapters import WEIGHTS
from workers.learner.files.adapter_files import peft_name, require_base, require_kind, write_adapter_files
from workers.learner.files.loading import with_randomness
from workers.learner.files.model_shards import MAX_FILE, num_bytes, saved_tensors, split_into_files, write_index
from workers.learner.files.partitioning import gathered
from workers.learner.files.tensor_files import TensorFiles
from workers.learner.files.zero_state import MOMENTS, WEIGHT, ZeroState
from workers.sync.disk_format import to_disk_format


def copy_state(state: ZeroState, lm: Any, dtype: str) -> dict[str, dict[str, Any]]:
    """Copies this rank's share of the state to host memory. Returns tensors by file and name."""
    parameters, adapters = trained_parameters(lm), bool(adapted_layers(lm))
    model_holds_fp32 = dtype == "float32" and not lm._weight_conversions and not adapters
    files = {
        f"optimizer/{state.shard_file()}": state.owned_tensors(
            parameters, MOMENTS if model_holds_fp32 else (WEIGHT, *MOMENTS)
        )
    }
    if not adapters:
        return files | {f"model/{file}": tensors for file, tensors in copy_weights(state, lm, disk_format=True).items()}
    weights = gather_weights(state, lm)
    if state.rank == 0:
        files[f"model/{WEIGHTS}"] = {peft_name(name): tensor for name, tensor in weights.items()}
    return files


def copy_weights(state: ZeroState, lm: Any, *, disk_format: bool) -> dict[str, dict[str, Any]]:
    """Copies the weights that this rank writes to host memory, by file: every n-th of the files.

    `disk_format`: all that the model's files hold, as transformers stores it; else what is trained, by parameter.
    """
    tensors, files = saved_tensors(lm) if disk_format else trained_parameters(lm), {}
    for number, (file, names) in enumerate(model_files(tensors, state).items()):
        copies: dict[str, Any] = {}
        for name in names:
            with gathered(tensors[name]):
                if number % state.ranks == state.rank:
                    weight = tensors[name].detach().to("cpu", copy=True)
                    copies |= to_disk_format(lm, name, weight) if disk_format else {name: weight}
        if copies:
            files[file] = copies
    return files


def model_files(tensors: Mapping[str, Any], state: ZeroState) -> dict[str, list[str]]:
    """Deals tensors to files of at most 5 GB. With ZeRO 3, each rank gets one at least, so that none holds all."""
    limit = MAX_FILE
    if state.stage == 3:
        limit = min(limit, -(-sum(map(num_bytes, tensors.values())) // state.ranks))
    return split_into_files(tensors, limit)


def gather_weights(state: ZeroState, lm: Any) -> dict[str, Any]:
    """Copies all weights that are trained to the host memory of rank 0. Returns nothing on other ranks."""
    weights = {}
    for name, parameter in trained_parameters(lm).items():
        with gathered(parameter):
            if state.rank == 0:
                weights[name] = parameter.detach().to("cpu", copy=True)
    return weights


def write_model_files(state: ZeroState, lm: Any, source: str, config: Config, fingerprint: str, folder: Path) -> None:
    """Writes all of `model/` except the weights. `fingerprint`: of the base of adapters."""
    from transformers import AutoConfig, AutoTokenizer

    if config.policy.lora.rank:
        write_adapter_files(lm, config.policy.lora, source, fingerprint, folder)
    else:
        authors = AutoConfig.from_pretrained(source, trust_remote_code=config.model.trust_remote_code)
        write_model_settings(lm, authors, folder)
        tensors = saved_tensors(lm)
        write_index(lm, tensors, model_files(tensors, state), folder)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=config.model.trust_remote_code)
    tokenizer.save_pretrained(folder)


def write_model_settings(lm: Any, authors: Any, folder: Path) -> None:
    """Writes config.json, with the rates of dropout that its authors gave the model, and generation_config.json."""
    # The generation config stays as the model's authors wrote it. transformers refuses to write some that it can read.
    generation_config, lm.generation_config = lm.generation_config, type(lm.generation_config)()
    with TemporaryDirectory() as written:  # `save_pretrained` would delete the files with weights
        lm.save_pretrained(written, state_dict={})
        for file in Path(written).iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, folder)
    lm.generation_config = generation_config
    generation_config.to_json_file(folder / "generation_config.json")
    file = folder / "config.json"
    settings = with_randomness(json.loads(file.read_text()), authors.to_dict())
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def load_state(state: ZeroState, lm: Any, source: str, fingerprint: str, folder: Path) -> None:
    """Restores the state from the files of any number of ranks and any ZeRO stage."""
    require_kind(folder, bool(adapted_layers(lm)))
    require_base(folder / "model", fingerprint, source)
    optimizer = TensorFiles(sorted((folder / "optimizer").glob("*.safetensors")))
    has_weights = any(name.startswith(f"{WEIGHT}/") for name in optimizer.file_by_tensor)
    model = None if has_weights else TensorFiles(sorted((folder / "model").glob("*.safetensors")))
    state.restore(trained_parameters(lm), optimizer, model)
