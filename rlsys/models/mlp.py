"""How wide the MLPs and experts of a model are, and how many layers have which, by its config.json."""

from rlsys.models.layer_kinds import Settings
from rlsys.models.matrices import Matrix


def stated_width(s: Settings) -> int:
    return int(s.get("block_ff_dim") or s["intermediate_size"])


def adjusted_width(s: Settings) -> int:
    """Returns two thirds of what is stated, rounded up, as LFM2 has it."""
    width = stated_width(s)
    if not s.get("block_auto_adjust_ff_dim", True):
        return width
    factor, multiple = s.get("block_ffn_dim_multiplier", 1.0), int(s.get("block_multiple_of", 256))
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def no_width(_: Settings) -> int:
    return 0


def stated_shared_width(s: Settings) -> int:
    return int(s["shared_intermediate_size"])


def one_shared_expert(s: Settings) -> int:
    return int(s["shared_expert_intermediate_size"] or 0)


def several_shared_experts(s: Settings) -> int:
    return int(s.get("n_shared_experts", 1) or 0) * int(s["moe_intermediate_size"])


def listed_dense_layers(s: Settings) -> int:
    alone, step = s.get("mlp_only_layers") or [], int(s.get("decoder_sparse_step") or 1)
    return sum(i in alone or (i + 1) % step != 0 for i in range(int(s["num_hidden_layers"])))


def first_dense_layers(s: Settings) -> int:
    return min(int(s.get("first_k_dense_replace", 3) or 0), int(s["num_hidden_layers"]))


def gated_mlp(names: tuple[str, ...], hidden: int, width: int, layers: int) -> list[Matrix]:
    """Returns its matrices: of two names, the first is gate and up in one."""
    *inputs, output = names
    outputs = width if len(inputs) == 2 else 2 * width
    return [*(Matrix(name, hidden, outputs, layers) for name in inputs), Matrix(output, width, hidden, layers)]
