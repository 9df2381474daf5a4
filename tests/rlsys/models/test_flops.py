import pytest

from rlsys.estimates.devices import peak_flops
from rlsys.models.flops import FlopCounter
from rlsys.models.lookup import known_flop_counter

SMALL = FlopCounter(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocabulary=10)


def test_a_token_by_hand():
    q, k, v, o = 8 * 8, 8 * 4, 8 * 4, 8 * 8
    assert SMALL.flops_per_token == 2 * 2 * (q + k + v + o + 3 * 8 * 16)


def test_attention_sees_what_is_before_a_token_and_itself():
    pairs = 3 + 4  # tokens at positions 2 and 3
    assert SMALL.forward_flops(2, 4, 0) - 2 * SMALL.flops_per_token == 2 * 4 * 2 * 4 * pairs


def test_a_prompt_is_computed_once_for_its_group_and_the_last_token_never():
    flops = SMALL.group_flops(5, [3])
    assert flops == SMALL.forward_flops(0, 7, 3)
    assert SMALL.group_flops(5, [3, 3]) == 2 * flops - SMALL.forward_flops(0, 5, 1)


def test_the_count_equals_that_of_torch():
    """Except for attention, where torch counts all pairs of tokens, and we count those that are not masked."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    model, tokens = Qwen2ForCausalLM(config), 12
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(tokens)[None])
    shape = known_flop_counter(config.to_dict())
    pairs = 4 * shape.layers * shape.heads * shape.head_dim
    linear = shape.forward_flops(0, tokens, tokens) - pairs * tokens * (tokens + 1) / 2
    assert counter.get_total_flops() == linear + pairs * tokens**2


def test_only_active_experts_count():
    from transformers import Qwen3MoeConfig

    shape = known_flop_counter(
        Qwen3MoeConfig(
            hidden_size=64,
            num_attention_heads=4,
            head_dim=16,
            moe_intermediate_size=24,
            num_experts=8,
            num_experts_per_tok=2,
        ).to_dict()
    )
    assert shape.intermediate == 2 * 24


def test_a_shared_expert_counts():
    from transformers import Qwen2MoeConfig

    config = Qwen2MoeConfig(  # Qwen1.5-MoE-A2.7B
        moe_intermediate_size=1408, num_experts=60, num_experts_per_tok=4, shared_expert_intermediate_size=5632
    )
    assert known_flop_counter(config.to_dict()).intermediate == 4 * 1408 + 5632


def test_an_unknown_architecture_is_not_counted():
    from transformers import GPT2Config

    assert known_flop_counter(GPT2Config().to_dict()) is None


def test_peak_flops_are_found_by_part_of_a_device_name():
    assert peak_flops("NVIDIA H200", "bfloat16") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == pytest.approx(19.5e12)
    assert peak_flops("Some Card", "bfloat16") is None
