"""The longest sequences of a plan."""

from dataclasses import replace

import pytest

from launch.tools.estimates.devices import parse_cluster
from launch.tools.estimates.memory import SequenceLengths
from launch.tools.fitting.fit import Fit, check_fit
from launch.tools.plan.longest import MEMORY, largest, longest_sequences
from launch.tools.plan.suggestions import with_settings
from rlsys.config.loading import load_config
from rlsys.models.known_shapes import look_up_shape

SEVEN = look_up_shape("Qwen/Qwen2.5-Math-7B")


def plan(tokens: int, **settings: object) -> Fit:
    """A plan for sequences of so many tokens, each alone in its pack."""
    settings = {f"policy.{name}": value for name, value in settings.items()} | {"policy.tokens_per_pack": tokens}
    config = with_settings(load_config("configs/dapo_7b_gpu.yaml"), settings)
    return check_fit(config, SEVEN, SequenceLengths(1024, tokens - 1024), 1500, parse_cluster("8xH100"))


@pytest.mark.parametrize(("name", "checkpointing", "offloading"), [(n, i > 0, i > 1) for i, n in enumerate(MEMORY)])
def test_a_longer_sequence_would_not_fit(name: str, checkpointing: bool, offloading: bool) -> None:
    for sharing, lengths in longest_sequences(plan(4096), {}):
        options = {"gradient_checkpointing": checkpointing, "offload": ["activations"] * offloading}
        fit, more = (plan(n, sequence_parallel=sharing, **options) for n in (lengths[name], lengths[name] + 1024))
        assert all(gpu.needed <= gpu.capacity for gpu in fit.gpus)
        assert any(gpu.needed > gpu.capacity for gpu in more.gpus) or max(more.host_bytes) > more.nodes[0].memory


def test_every_option_makes_room_and_only_numbers_that_divide_ranks_and_heads_are_tried() -> None:
    rows = longest_sequences(plan(4096), {})
    assert [row.sharing for row in rows] == [1, 2, 4], "28 heads are not divided by 8"
    for row in rows:
        assert list(row.tokens.values()) == sorted(set(row.tokens.values()))
    for name in MEMORY:
        one, two, _ = (row.tokens[name] for row in rows)
        assert 1.9 < two / one < 2.6
    fit = plan(4096)
    three = replace(fit, config=with_settings(fit.config, {"policy.ranks": 3}))
    assert [row.sharing for row in longest_sequences(three, {})] == [1]


@pytest.mark.parametrize("limit", [0, 1, 5, 4095, 4096, 9999])
def test_the_largest_number_is_found(limit: int) -> None:
    assert largest(lambda n: n <= limit, 4096) == min(limit, 4096)
