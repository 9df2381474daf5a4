"""What policy.lora changes in the estimates: how many parameters are trained, and the weights that a layer merges."""

from launch.tools.estimates.memory import WIDTH
from rlsys.config.schema import Config
from rlsys.models.matrices import Matrix
from rlsys.models.shapes import ModelShape


def adapted_matrices(c: Config, model: ModelShape) -> list[Matrix]:
    targets = {target.rpartition(".")[2] for target in c.policy.lora.targets}
    return [matrix for matrix in model.linear_layers if matrix.name in targets or "all-linear" in targets]


def trained_parameters(c: Config, model: ModelShape) -> float:
    """Returns the parameters that the optimizer changes: those of the adapters, or all."""
    rank = c.policy.lora.rank
    if not rank:
        return float(model.parameters)
    return float(rank * sum(m.layers * (m.inputs + m.outputs) for m in adapted_matrices(c, model)))


def adapter_parameters(c: Config, model: ModelShape) -> float:
    return trained_parameters(c, model) if c.policy.lora.rank else 0.0


def sync_bytes(c: Config, model: ModelShape) -> float:
    """Returns what a sync sends: all weights in the engines' dtype."""
    return float(WIDTH[c.rollout.dtype] * model.parameters)


def sync_tensors(model: ModelShape) -> int:
    """Returns how many tensors a sync sends. Each expert has its own."""
    norms = model.layers * (model.facts.layer_norms + 2 * model.has_qk_norm) + 1
    biases = model.attention_layers * (3 * model.qkv_bias + model.output_bias)
    experts = model.expert_layers * (3 * model.experts + 1)
    return sum(matrix.layers for matrix in model.linear_layers) + norms + biases + experts + 2 - model.tied


def largest_trained(c: Config, model: ModelShape) -> float:
    """Returns how many elements the largest tensor has that the optimizer changes."""
    rank = c.policy.lora.rank
    if not rank:
        return float(model.largest_tensor)
    return float(rank * max((max(m.inputs, m.outputs) for m in adapted_matrices(c, model)), default=0))


def merge_bytes(c: Config, model: ModelShape) -> float:
    """Returns what a layer holds while it merges: W + s B A in float32, and its rounded copy."""
    if not c.policy.lora.rank:
        return 0.0
    return 8.0 * max((matrix.size for matrix in adapted_matrices(c, model)), default=0)


def saved_state_bytes(c: Config) -> int:
    """Returns the bytes that a checkpoint holds for each trained parameter, besides `model/`.

    Adam's two moments, and fp32 weights where `model/` does not have them.
    """
    return 12 if c.policy.dtype == "bfloat16" or c.policy.lora.rank else 8
