"""The policy's part of a checkpoint. Each rank writes its own share.

model/       a Hugging Face model directory, from rank 0
optimizer/   part-00000-of-00002.safetensors, …: Adam's state, and the fp32 weights if `model/` does not hold them,
             because it is in bfloat16, or transformers stores the tensors in another form
"""

from pathlib import Path
from typing import Any

from workers.learner.tensor_files import TensorFiles
from workers.learner.zero import ZeroEngine
from workers.learner.zero_state import MOMENTS, WEIGHT


def copy_state(zero: ZeroEngine, lm: Any, dtype: str) -> dict[str, dict[str, Any]]:
    """Copies this rank's share of the state to host memory. Returns tensors by file and name."""
    from transformers.core_model_loading import revert_weight_conversion

    parameters = dict(lm.named_parameters())
    model_holds_fp32 = dtype == "float32" and not lm._weight_conversions
    files = {
        f"optimizer/{zero.shard_file()}": zero.state.owned_tensors(
            parameters, MOMENTS if model_holds_fp32 else (WEIGHT, *MOMENTS)
        )
    }
    weights = gather_weights(zero, lm)
    if zero.rank == 0:
        files["model/model.safetensors"] = revert_weight_conversion(lm, weights) if lm._weight_conversions else weights
    return files


def gather_weights(zero: ZeroEngine, lm: Any) -> dict[str, Any]:
    """Copies all weights to the host memory of rank 0. Returns nothing on other ranks."""
    weights = {}
    for name, parameter in lm.named_parameters():
        with zero.gathered(parameter):
            if zero.rank == 0:
                weights[name] = parameter.detach().to("cpu", copy=True)
    return weights


def write_model_files(lm: Any, source: str, trust_remote_code: bool, folder: Path) -> None:
    """Writes all of a Hugging Face model directory except the weights."""
    from transformers import AutoTokenizer

    # The generation config stays as the model's authors wrote it. transformers reads some that it refuses to write.
    generation_config, lm.generation_config = lm.generation_config, type(lm.generation_config)()
    lm.save_pretrained(folder, state_dict={})
    lm.generation_config = generation_config
    generation_config.to_json_file(folder / "generation_config.json")
    AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code).save_pretrained(folder)


def load_state(zero: ZeroEngine, lm: Any, folder: Path) -> None:
    """Restores the state from the files of any number of ranks and any ZeRO stage."""
    optimizer = TensorFiles(sorted((folder / "optimizer").glob("*.safetensors")))
    has_weights = any(name.startswith(f"{WEIGHT}/") for name in optimizer.file_by_tensor)
    model = None if has_weights else TensorFiles([folder / "model" / "model.safetensors"])
    zero.state.restore(dict(lm.named_parameters()), optimizer, model)
