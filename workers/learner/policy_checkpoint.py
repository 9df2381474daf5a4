"""The policy's part of a checkpoint. Each rank writes its own share.

model/       a Hugging Face model directory, from rank 0; with policy.lora the directory of a PEFT adapter
optimizer/   part-00000-of-00002.safetensors, …: Adam's state, and the fp32 weights if `model/` does not hold them,
             because it is in bfloat16, or transformers stores the tensors in another form, or it is an adapter
"""

from pathlib import Path
from typing import Any

from rlsys.config.schema import Config
from rlsys.models.adapters import WEIGHTS
from rlsys.packs.lora import adapted_layers, trained_parameters
from workers.learner.adapter_files import peft_name, require_base, require_kind, write_adapter_files
from workers.learner.tensor_files import TensorFiles
from workers.learner.zero import ZeroEngine
from workers.learner.zero_state import MOMENTS, WEIGHT


def copy_state(zero: ZeroEngine, lm: Any, dtype: str) -> dict[str, dict[str, Any]]:
    """Copies this rank's share of the state to host memory. Returns tensors by file and name."""
    from transformers.core_model_loading import revert_weight_conversion

    parameters, adapters = trained_parameters(lm), bool(adapted_layers(lm))
    model_holds_fp32 = dtype == "float32" and not lm._weight_conversions and not adapters
    files = {
        f"optimizer/{zero.shard_file()}": zero.state.owned_tensors(
            parameters, MOMENTS if model_holds_fp32 else (WEIGHT, *MOMENTS)
        )
    }
    weights = gather_weights(zero, lm)
    if zero.rank == 0 and adapters:
        files[f"model/{WEIGHTS}"] = {peft_name(name): tensor for name, tensor in weights.items()}
    elif zero.rank == 0:
        files["model/model.safetensors"] = revert_weight_conversion(lm, weights) if lm._weight_conversions else weights
    return files


def gather_weights(zero: ZeroEngine, lm: Any) -> dict[str, Any]:
    """Copies all weights that are trained to the host memory of rank 0. Returns nothing on other ranks."""
    weights = {}
    for name, parameter in trained_parameters(lm).items():
        with zero.gathered(parameter):
            if zero.rank == 0:
                weights[name] = parameter.detach().to("cpu", copy=True)
    return weights


def write_model_files(lm: Any, source: str, config: Config, fingerprint: str, folder: Path) -> None:
    """Writes all of `model/` except the weights. `fingerprint`: of the base of adapters."""
    from transformers import AutoTokenizer

    if config.policy.lora.rank:
        write_adapter_files(lm, config.policy.lora, source, fingerprint, folder)
    else:
        write_model_settings(lm, folder)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=config.model.trust_remote_code)
    tokenizer.save_pretrained(folder)


def write_model_settings(lm: Any, folder: Path) -> None:
    """Writes config.json and generation_config.json."""
    # The generation config stays as the model's authors wrote it. transformers reads some that it refuses to write.
    generation_config, lm.generation_config = lm.generation_config, type(lm.generation_config)()
    lm.save_pretrained(folder, state_dict={})
    lm.generation_config = generation_config
    generation_config.to_json_file(folder / "generation_config.json")


def load_state(zero: ZeroEngine, lm: Any, source: str, fingerprint: str, folder: Path) -> None:
    """Restores the state from the files of any number of ranks and any ZeRO stage."""
    require_kind(folder, bool(adapted_layers(lm)))
    require_base(folder / "model", fingerprint, source)
    optimizer = TensorFiles(sorted((folder / "optimizer").glob("*.safetensors")))
    has_weights = any(name.startswith(f"{WEIGHT}/") for name in optimizer.file_by_tensor)
    model = None if has_weights else TensorFiles([folder / "model" / "model.safetensors"])
    zero.state.restore(trained_parameters(lm), optimizer, model)
