"""What the models that only score hold in memory: the reference, and models that judge rewards."""

from dataclasses import replace
from typing import Any

from launch.tools.estimates.activations import MALLOC, pass_memory, transient_bytes, worst_case_pack
from launch.tools.estimates.memory import (
    CUDA_CONTEXT,
    MIB,
    MOMENTS,
    WIDTH,
    Parts,
    ProcessMemory,
    SequenceLengths,
    add_parts,
    import_mib,
)
from rlsys.config.schema import Config
from rlsys.models.shapes import ModelShape

REWARD_MODEL_IMPORT_MIB = 510  # MiB of a reward model's actor and of its process, which imports transformers


def reference_memory(c: Config, model: ModelShape, lengths: SequenceLengths) -> ProcessMemory:
    t, ranks, width = c.trainer, c.reference.ranks, WIDTH[c.policy.dtype]
    tokens, scored = worst_case_pack(c, model, lengths, t.prompts_per_step * t.samples_per_prompt, ranks)
    split = c.reference.place == "split"
    weights: Parts = {"weights": width * float(model.parameters) / (ranks if split else 1)}
    gathered: Parts = {"weights": width * float(model.largest_tensor) * split}
    work = add_parts(gathered, pass_memory(c, model, tokens, scored, lengths, training=False).largest)
    imports: Parts = {"fixed": import_mib(c, "reference") * MIB}
    load = add_parts(weights, gathered, imports)
    if c.cluster.device == "gpu" and c.reference.place != "cpu":
        cuda: Parts = {"fixed": CUDA_CONTEXT}
        scoring = add_parts(weights, work, cuda)
        resting = cuda if c.reference.place == "offload" else add_parts(weights, cuda)
        device = dict.fromkeys(MOMENTS[1:], resting) | {"score": scoring}
        return ProcessMemory("reference", ranks, {"load": load}, device)
    return ProcessMemory("reference", ranks, host={"score": add_parts(weights, work, imports), "load": load})


def reward_model_memory(options: dict[str, Any], model: ModelShape | None, lengths: SequenceLengths) -> ProcessMemory:
    """Estimates a reward model, which scores while samples arrive. A model of unknown shape counts with its imports only."""
    on_gpu = bool(options.get("gpus"))
    imports: Parts = {"fixed": float(REWARD_MODEL_IMPORT_MIB * MIB)}
    weights: Parts = {}
    work: Parts = {}
    if model:
        width, batch = WIDTH[options.get("dtype", "float32")], options.get("batch", 16)
        limits = (options.get("max_tokens"), model.context, lengths.prompt + lengths.completion)
        longest = min(tokens for tokens in limits if tokens)
        weights = {"weights": float(width * replace(model, tied=True).parameters)}  # a score instead of logits
        mask = batch * longest**2 * (1.0 + width * on_gpu)  # of a padded batch; on a GPU also as an additive mask
        padded = transient_bytes(width, model, batch * longest, False) * (1.0 if on_gpu else MALLOC)
        work = {"activations": padded + mask}
    load = add_parts(weights, imports)
    if on_gpu:
        generate = add_parts(weights, work, {"fixed": CUDA_CONTEXT})
        return ProcessMemory("reward", 1, {"load": load, "always": imports}, {"generate": generate}, 1)
    return ProcessMemory("reward", 1, {"load": load, "generate": add_parts(weights, work, imports)})
