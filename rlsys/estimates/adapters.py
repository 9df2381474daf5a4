"""What policy.lora changes in the estimates: how many parameters are trained, and the weights that a layer merges."""

from rlsys.config.schema import Config
from rlsys.estimates.memory import WIDTH
from rlsys.models.shapes import ModelShape


def layer_matrices(model: ModelShape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a layer's linear layers by name. Experts have no adapters."""
    h, i = model.hidden, model.intermediate
    matrices = {
        "q_proj": (h, model.query_width),
        "k_proj": (h, model.key_width),
        "v_proj": (h, model.key_width),
        "o_proj": (model.query_width, h),
    }
    return matrices if model.experts else matrices | {"gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h)}


def adapted_matrices(c: Config, model: ModelShape) -> list[tuple[int, int]]:
    targets = {target.rpartition(".")[2] for target in c.policy.lora.targets}
    return [size for name, size in layer_matrices(model).items() if name in targets or "all-linear" in targets]


def trained_parameters(c: Config, model: ModelShape) -> float:
    """The parameters that the optimizer changes: those of the adapters, or all."""
    rank = c.policy.lora.rank
    if not rank:
        return float(model.parameters)
    return float(model.layers * rank * sum(inputs + outputs for inputs, outputs in adapted_matrices(c, model)))


def adapter_parameters(c: Config, model: ModelShape) -> float:
    return trained_parameters(c, model) if c.policy.lora.rank else 0.0


def sync_bytes(c: Config, model: ModelShape) -> float:
    """What a sync sends: the adapters in the policy's dtype, or all weights in the engines'."""
    if c.sync.what == "adapter":
        return WIDTH[c.policy.dtype] * trained_parameters(c, model)
    return float(WIDTH[c.rollout.dtype] * model.parameters)


def largest_trained(c: Config, model: ModelShape) -> float:
    """Elements of the largest tensor that the optimizer changes."""
    rank = c.policy.lora.rank
    if not rank:
        return float(model.largest_tensor)
    return float(rank * max((max(size) for size in adapted_matrices(c, model)), default=0))


def merge_bytes(c: Config, model: ModelShape) -> float:
    """What a layer holds while it merges: W + s B A in float32, and its rounded copy."""
    if not c.policy.lora.rank:
        return 0.0
    return 8.0 * max((inputs * outputs for inputs, outputs in adapted_matrices(c, model)), default=0)


def saved_state_bytes(c: Config) -> int:
    """Bytes that a checkpoint holds for each trained parameter, besides `model/`.

    Adam's two moments, and fp32 weights where `model/` does not have them.
    """
    return 12 if c.policy.dtype == "bfloat16" or c.policy.lora.rank else 8
