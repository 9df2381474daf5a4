import pytest
from models.small_families import (
    FAMILIES,
    LATENT,
    LINEAR,
    LOCAL_MOE,
    MAMBA,
    build_without_weights,
    small_config,
)

from launch.tools.estimates.devices import peak_flops
from rlsys.models.config_json import parse_config
from rlsys.models.lookup import known_flop_counter
from rlsys.models.shapes import ModelShape

SMALL = ModelShape("small", "llama", 2, 8, 2, 1, 4, 16, 10, tied=True, context=64).flop_counter


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


@pytest.mark.parametrize("family", ["qwen2", "phi3", "olmo3", "deepseek_v3"])
def test_the_count_equals_that_of_torch(family):
    """Except for attention, where torch counts all pairs of tokens, and we count those that are not masked."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    more = LATENT | {"q_lora_rank": 10, "first_k_dense_replace": 4} if family == "deepseek_v3" else {}
    config = small_config(family, more)
    model, tokens = AutoModelForCausalLM.from_config(config, attn_implementation="eager"), 12
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(tokens)[None])
    count = known_flop_counter(config.to_dict())
    pair = count.flops_per_pair + count.flops_per_pair_in_window
    linear = count.forward_flops(0, tokens, tokens) - pair * tokens * (tokens + 1) / 2
    assert counter.get_total_flops() == linear + pair * tokens**2


@pytest.mark.parametrize(("family", "more"), FAMILIES)
def test_a_token_is_multiplied_with_the_matrices_that_it_passes(family, more):
    import torch

    config = small_config(family, more)
    model = build_without_weights(config)
    passed = 0.0
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        matrices = sum(p.numel() for n, p in parameters.items() if p.dim() > 1 and "bias" not in n)
        if "embed" in name or name == "lm_head" or isinstance(module, torch.nn.Conv1d):
            continue
        passed += matrices * (config.num_experts_per_tok / 6 if "expert" in name and "shared" not in name else 1)
    shape = parse_config("it", config.to_dict())
    beside = shape.mixer_layers * shape.mixer.flops if shape.mixer else 0
    assert shape.flop_counter.flops_per_token == pytest.approx(2 * passed + beside)


@pytest.mark.parametrize(
    ("family", "more", "flops"),
    [
        # A convolution over 2 x 16 keys and queries and 48 values; a state of 4 heads x 8 x 12 is read twice and changed.
        ("qwen3_5_text", LINEAR, 2 * 3 * (32 + 48) + 3 * 2 * 4 * 8 * 12),
        ("falcon_h1", MAMBA | {"mamba_d_ssm": 64}, 2 * 3 * (64 + 2 * 2 * 8) + 2 * 2 * 64 * 8),  # changed and read
        ("lfm2", {"full_attn_idxs": [1]}, 2 * 3 * 32 + 2 * 32),  # between two gates
    ],
)
def test_the_work_of_mixers_by_hand(family, more, flops):
    assert parse_config("it", small_config(family, more).to_dict()).mixer.flops == flops


def test_a_layer_with_a_window_sees_no_more_than_that():
    settings = small_config("gpt_oss", LOCAL_MOE | {"sliding_window": 5, "num_hidden_layers": 3}).to_dict()
    count = known_flop_counter(settings)
    full, windowed = 1, 2
    pairs = [full * (i + 1) + windowed * min(i + 1, 5) for i in range(20)]
    attention = count.forward_flops(3, 20, 0) - 17 * count.flops_per_token
    assert attention == 4 * 4 * 16 * sum(pairs[3:])


def test_an_unknown_architecture_is_not_counted():
    from transformers import GPT2Config

    assert known_flop_counter(GPT2Config().to_dict()) is None


def test_peak_flops_are_found_by_part_of_a_device_name():
    assert peak_flops("NVIDIA H200", "bfloat16") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == pytest.approx(19.5e12)
    assert peak_flops("Some Card", "bfloat16") is None
