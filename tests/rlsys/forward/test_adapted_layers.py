"""A layer with an adapter computes x (W + s B A)ᵀ with rounded weights, and its targets are found by name."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2Config

from rlsys.errors import ConfigError
from rlsys.forward import lora

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN = Qwen2Config(vocab_size=32, num_key_value_heads=1, tie_word_embeddings=False, **SIZES)
MIXTRAL = MixtralConfig(vocab_size=32, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, **SIZES)


def make(config=QWEN, targets=("all-linear",), format=torch.float32, **options):
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, **options)
    layers = lora.add_adapters(lm, rank=3, alpha=6.0, targets=list(targets), format=format, seed=1)
    for layer in layers.values():
        nn.init.normal_(layer.lora_B)
    return lm, layers


@pytest.mark.parametrize("format", [torch.float32, torch.bfloat16], ids=str)
def test_output_and_gradients_are_those_of_the_formula(format):
    _, layers = make(format=format)
    layer = layers["model.layers.0.self_attn.q_proj"]  # it has a bias
    x = torch.randn(2, 5, 16, requires_grad=True)
    slope = torch.randn(2, 5, 16)
    (layer(x) * slope).sum().backward()

    w, a, b, bias = (t.detach().double() for t in (layer.weight, layer.lora_A, layer.lora_B, layer.bias))
    rounded = torch.stack([w[o] + 2 * sum(b[o, r] * a[r] for r in range(3)) for o in range(16)]).to(format).double()
    expected = x.detach().double() @ rounded.t() + bias
    assert (layer(x) - expected).abs().max() < (1e-5 if format == torch.float32 else 1e-1)
    outer = sum(
        torch.outer(g, v) for g, v in zip(slope.view(-1, 16).double(), x.detach().view(-1, 16).double(), strict=True)
    )
    for actual, wanted in ((layer.lora_B.grad, 2 * outer @ a.t()), (layer.lora_A.grad, 2 * b.t() @ outer)):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        x.grad.double(), slope.double() @ rounded, rtol=1e-5, atol=1e-2 if format != torch.float32 else 1e-5
    )
    assert layer.weight.grad is None
    assert layer.bias.grad is None


def test_gradients_of_a_model_are_those_of_peft():
    lm, layers = make()
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    torch.manual_seed(0)
    settings = LoraConfig(r=3, lora_alpha=6, target_modules=kinds, task_type="CAUSAL_LM")
    beside = get_peft_model(AutoModelForCausalLM.from_config(QWEN), settings)
    theirs = {name: beside.get_submodule(f"base_model.model.{name}") for name in layers}
    for name, layer in layers.items():
        theirs[name].lora_A["default"].weight.data.copy_(layer.lora_A.data)
        theirs[name].lora_B["default"].weight.data.copy_(layer.lora_B.data)
    tokens, slope = torch.randint(32, (4, 12)), torch.randn(4, 12, 32)
    for model in (lm, beside):
        (torch.log_softmax(model(tokens).logits, -1) * slope / 48).sum().backward()
    for name, layer in layers.items():
        for matrix in ("lora_A", "lora_B"):
            expected = getattr(theirs[name], matrix)["default"].weight.grad
            assert expected.abs().max() > 1e-3
            torch.testing.assert_close(getattr(layer, matrix).grad, expected, rtol=1e-5, atol=1e-5)


def test_the_merged_weight_is_rounded_to_the_engines_format_and_is_what_the_layer_computes_with():
    _, layers = make(format=torch.bfloat16)
    layer = layers["model.layers.1.mlp.down_proj"]
    merged = layer.merged()
    assert torch.equal(merged, merged.bfloat16().float())
    assert not torch.equal(merged, layer.weight)
    x = torch.randn(7, 32)
    assert torch.equal(layer(x), nn.functional.linear(x, merged))


def test_a_new_adapter_changes_nothing_and_only_adapters_learn():
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(QWEN)
    ids = torch.arange(9)[None]
    expected = plain(ids).logits
    lora.add_adapters(plain, rank=3, alpha=6.0, targets=["all-linear"], format=torch.float32, seed=1)
    assert torch.equal(plain(ids).logits, expected)
    plain(ids).logits.square().mean().backward()
    learned = {n for n, p in plain.named_parameters() if p.grad is not None}
    assert learned == set(lora.trained_parameters(plain))
    assert len(learned) == 2 * 7 * 2
    bound = 16**-0.5  # of PEFT's kaiming_uniform_(a=√5), which is ±1/√inputs
    a = plain.get_submodule("model.layers.0.mlp.up_proj").lora_A
    assert 0.9 * bound < a.abs().max() <= bound


def test_without_adapters_a_model_computes_as_before():
    lm, _ = make()
    plain = AutoModelForCausalLM.from_config(QWEN)
    plain.load_state_dict({n: t for n, t in lm.state_dict().items() if not lora.is_adapter(n)})
    ids = torch.arange(9)[None]
    with lora.without_adapters(lm):
        assert torch.equal(lm(ids).logits, plain(ids).logits)
    assert not torch.equal(lm(ids).logits, plain(ids).logits)


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (["q_proj"], {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"}),
        (["layers.1.mlp.up_proj"], {"model.layers.1.mlp.up_proj"}),
    ],
)
def test_targets_are_the_last_parts_of_names(targets, layers):
    assert set(make(targets=targets)[1]) == layers


@pytest.mark.parametrize("targets", [["proj"], ["q_proj", "wq"], ["lm_head"], ["embed_tokens"], []])
def test_a_target_that_matches_nothing_is_refused_with_what_there_is(targets):
    with pytest.raises(ConfigError, match=r"matches no linear layer of Qwen2ForCausalLM .* it has q_proj, k_proj"):
        make(targets=targets)


@pytest.mark.parametrize("target", ["all-linear", "experts", "gate_up_proj"])
def test_experts_are_refused_by_name(target):
    with pytest.raises(ConfigError, match=r"experts in tensors such as model\.layers\.0\.mlp\.experts\.down_proj"):
        make(MIXTRAL, targets=[target])
    assert make(MIXTRAL, targets=["q_proj"])[1]
