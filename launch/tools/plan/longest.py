"""The longest sequence that a plan's GPUs and main memory have room for, under each option that rations its activations.

A pack is then one sequence: policy.tokens_per_pack is as long as it.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from launch.tools.estimates.memory import SequenceLengths
from launch.tools.estimates.processes import memory_by_role
from launch.tools.fitting.fit import Fit, use_of_host, uses_of_gpus, with_known_transport
from launch.tools.plan.suggestions import with_settings
from rlsys.models.shapes import ModelShape, can_share_packs

SHARINGS = (1, 2, 4, 8)  # of policy.sequence_parallel
MEMORY = {  # whether layers are recomputed, and their inputs offloaded
    "no checkpointing": (False, False),
    "gradient_checkpointing": (True, False),
    "and offload activations": (True, True),
}
STEP, MOST = 1024, 4096  # lengths are multiples of 1024 tokens, and 4 million at most


class LongestSequences(NamedTuple):
    """`LongestSequences(sharing=2, tokens={"no checkpointing": 13312, …})`; 0: not even one of 1024 tokens fits."""

    sharing: int
    tokens: dict[str, int]


def longest_sequences(fit: Fit, other_models: Mapping[str, ModelShape]) -> list[LongestSequences]:
    ranks, model = fit.config.policy.ranks, fit.model
    possible = [k for k in SHARINGS if ranks % k == 0 and can_share_packs(model, k)]
    return [
        LongestSequences(
            k,
            {
                name: longest_sequence(fit, memory_settings(fit, *ways) | {"policy.sequence_parallel": k}, other_models)
                for name, ways in MEMORY.items()
            },
        )
        for k in possible
    ]


def memory_settings(fit: Fit, recompute: bool, offload: bool) -> dict[str, object]:
    others = [part for part in fit.config.policy.offload if part != "activations"]
    return {"policy.gradient_checkpointing": recompute, "policy.offload": others + ["activations"] * offload}


def longest_sequence(fit: Fit, settings: dict[str, object], other_models: Mapping[str, ModelShape]) -> int:
    return STEP * largest(lambda n: has_room(fit, settings, n * STEP, other_models), MOST)


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which it holds, if it holds for all smaller ones."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if holds(middle) else (least, middle - 1)
    return least


def has_room(fit: Fit, settings: dict[str, object], tokens: int, other_models: Mapping[str, ModelShape]) -> bool:
    config = with_settings(fit.config, settings | {"policy.tokens_per_pack": tokens})
    config, _ = with_known_transport(config, len(fit.nodes))
    prompt = min(fit.lengths.prompt, tokens // 2)
    lengths = SequenceLengths(prompt, tokens - prompt)
    gpu_bytes = min((use.capacity for use in fit.gpus), default=0.0)
    processes = memory_by_role(config, fit.model, lengths, gpu_bytes, other_models)
    host = (use_of_host(config, processes, fit.layout, n) for n in range(len(fit.nodes)))
    gpus = uses_of_gpus(processes, fit.layout, fit.nodes)
    return all(use.needed <= use.capacity for use in gpus) and all(
        not node.memory or needed <= node.memory for node, needed in zip(fit.nodes, host, strict=True)
    )
