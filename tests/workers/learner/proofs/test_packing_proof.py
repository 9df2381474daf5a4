"""The packing proof finds what makes a pack differ from its sequences alone, and leaves the model as it was."""

from contextlib import nullcontext

import pytest
import torch
from families import FAMILIES, MASKED_WINDOW, build_family, make_packed, one_pack
from transformers import AttentionInterface

from rlsys.forward.attention import EXACT_PACKED_ATTENTION, PACKED_ATTENTION, packed_attention
from rlsys.forward.logprobs import PackedLogprobs
from rlsys.forward.mixers import fold_mixers
from workers.learner.proofs.packing import in_float32, prove_packing
from workers.learner.proofs.small_windows import computes_large_windows


@pytest.mark.parametrize(
    ("family", "kind"),
    [("lfm2", "Lfm2ShortConv"), ("falcon_h1", "FalconH1Mixer"), ("qwen3_5_text", "Qwen3_5GatedDeltaNet")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_proof_names_a_module_that_runs_on_into_the_next_sequence(family, kind, dtype):
    packed = make_packed(build_family(family).to(dtype), fold=False)
    with pytest.raises(ValueError, match=f"than each sequence alone.*{kind}"):
        prove(packed)
    fold_mixers(packed.lm.get_decoder())
    prove(packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_proof_finds_a_soft_cap_that_attention_drops(monkeypatch, dtype):
    packed = make_packed(build_family("gemma2", attn_logit_softcapping=5.0).to(dtype))
    prove(packed)
    functions = type(packed.lm).__module__
    monkeypatch.setitem(
        __import__(functions, fromlist=["x"]).ALL_ATTENTION_FUNCTIONS._global_mapping,
        PACKED_ATTENTION,
        lambda *arguments, softcap=None, **keywords: packed_attention(*arguments, **keywords),
    )
    with pytest.raises(ValueError, match="Gemma2Attention"):
        prove(packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [name for name, options in FAMILIES.items() if "sliding_window" in options])
def test_the_proof_finds_a_window_that_attention_drops_though_no_sequence_is_longer(family, dtype, monkeypatch):
    packed = make_packed(build_family(family, sliding_window=500).to(dtype))
    windows = [vars(module).get("sliding_window") for module in packed.modules()]
    random_state, expected = torch.get_rng_state(), packed(one_pack(share_prompts=True))[0]
    prove(packed)
    assert packed.lm.config.sliding_window == 500
    assert [vars(module).get("sliding_window") for module in packed.modules()] == windows
    assert torch.equal(packed(one_pack(share_prompts=True))[0], expected)
    assert torch.equal(torch.get_rng_state(), random_state)

    def without_window(*arguments, sliding_window=None, **keywords):
        return packed_attention(*arguments, sliding_window=sliding_window and 500, **keywords)

    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED_ATTENTION, without_window)
    with pytest.raises(ValueError, match=f"{type(packed.lm).__name__} with windows of 6 tokens computes a pack"):
        prove(packed)


@pytest.mark.parametrize("exact", [True, False])
def test_a_window_that_attention_refuses_is_not_proved_if_sequences_are_shorter(exact):
    family, options = ("gemma3_text", {}) if exact else ("qwen2_moe", MASKED_WINDOW)
    packed = make_packed(build_family(family, **options, sliding_window=500))
    packed.lm.set_attn_implementation(EXACT_PACKED_ATTENTION if exact else PACKED_ATTENTION)
    prove(packed)
    assert not computes_large_windows(packed.decoder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_proof_finds_logits_that_are_not_scaled(dtype):
    packed = make_packed(build_family("granite", logits_scaling=1.02).to(dtype))
    prove(packed)
    packed.lm.get_output_embeddings().transform = type(packed.lm.get_output_embeddings().transform)()
    with pytest.raises(ValueError, match="GraniteForCausalLM computes a pack"):
        prove(packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_proof_finds_positions_that_are_not_the_models_own(dtype):
    packed = make_packed(build_family("opt").to(dtype))
    prove(packed)

    def shift(module, arguments, keywords):
        positions = keywords.get("position_ids")
        return arguments, keywords if positions is None else keywords | {"position_ids": positions + 3}

    packed.decoder.register_forward_pre_hook(shift, with_kwargs=True)
    with pytest.raises(ValueError, match="OPTForCausalLM computes a pack"):
        prove(packed)


def test_a_model_that_was_proved_in_float32_is_as_before(monkeypatch):
    packed = make_packed(build_family("gemma2").bfloat16())
    before = {name: (p.data.data_ptr(), p.data.clone()) for name, p in packed.named_parameters()}
    expected = packed(one_pack(share_prompts=True))[0]
    seen = set()
    hook = packed.decoder.layers[0].mlp.register_forward_pre_hook(lambda _, x: seen.add(x[0].dtype))
    prove(packed)
    hook.remove()
    assert seen == {torch.bfloat16, torch.float32}
    for name, p in packed.named_parameters():
        address, value = before[name]
        assert (p.data.data_ptr(), p.dtype) == (address, torch.bfloat16)
        assert torch.equal(p.data, value)
    assert torch.equal(packed(one_pack(share_prompts=True))[0], expected)


def prove(packed: PackedLogprobs) -> None:
    """As a rank proves its model at its start."""
    decoder, head = packed.lm.get_decoder(), packed.lm.get_output_embeddings()
    compute, compute_alone = (lambda p: packed(p)[0]), (lambda p: packed(p, plain=True)[0])
    for dtype, precision in ((decoder.dtype, nullcontext()), (torch.float32, in_float32(decoder, head))):
        with precision:
            prove_packing(type(packed.lm).__name__, decoder, compute, compute_alone, dtype)
