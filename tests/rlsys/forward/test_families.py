"""Packs against transformers' own forward pass of each sequence alone, for tiny random models of many families."""

from pathlib import Path

import pytest
import torch
from families import FAMILIES, MASKED_WINDOW, REFUSED, build_family, make_batch, make_packed, one_pack
from transformers import AttentionInterface, PreTrainedModel

from rlsys.forward.attention import (
    PACKED_ATTENTION,
    packed_attention,
)
from rlsys.forward.layout import build_layout
from rlsys.forward.logit_transform import UNCHANGED
from rlsys.forward.mixers import find_mixers, refuse_inconsistent, run_probe
from rlsys.models.config_json import context_from_config
from rlsys.models.support import model_problem
from rlsys.types import Batch

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "rlsys" / "models" / "README.md"


def logprobs_alone(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Log-probs of all completions, each sequence through the untouched model."""
    parts = []
    for sample, group in zip(batch.samples, batch.groups, strict=True):
        prompt, completion = batch.prompts[group].tokens, sample.tokens.tolist()
        logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
        log_p = logits[len(prompt) - 1 : -1].log_softmax(-1)
        parts.append(log_p.gather(-1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(parts)


def gradients(model: torch.nn.Module, logprobs: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in FAMILIES),
        ("qwen2_moe", MASKED_WINDOW | {"sliding_window": 22}),  # no sequence is longer
        ("llama4_text", {"attention_chunk_size": 22}),
    ],
)
def test_packed_sequences_are_computed_as_if_each_were_alone(family, options):
    model = build_family(family, **options)
    model.set_attn_implementation("eager")
    expected = logprobs_alone(model, make_batch())
    expected_gradient = gradients(model, expected)
    packed = make_packed(model)
    for share_prompts in (False, True):
        logprobs, _ = packed(one_pack(share_prompts))
        assert (logprobs - expected).abs().mean() < 5e-6
        gradient = gradients(model, logprobs)
        assert (gradient - expected_gradient).norm() < 1e-4 * expected_gradient.norm()


@pytest.mark.parametrize("family", ["lfm2", "nemotron_h", "qwen3_5_text"])
def test_mixers_that_run_as_often_as_on_another_rank_compute_the_same(family):
    packed, pack = make_packed(build_family(family)), one_pack(share_prompts=False)
    logprobs = packed(pack)[0]
    slopes = gradients(packed.lm, logprobs)
    runs = []
    for module in packed.decoder.modules():
        if type(module).__name__ in packed.decoder.packs.mixers:
            module.out_proj.register_forward_hook(lambda *_: runs.append(1))
    packed.decoder.packs.largest_on_ranks = lambda number: number + 3
    again = packed(pack)[0]
    assert len(runs) == len(packed.decoder.packs.layout.blocks) + 3
    torch.testing.assert_close(again, logprobs, rtol=0, atol=0)
    torch.testing.assert_close(gradients(packed.lm, again), slopes, rtol=1e-6, atol=1e-6)


def test_modules_that_treat_each_token_by_itself_are_no_mixers():
    """A mixture of experts computes tokens in batches that depend on the other tokens, but mixes nothing."""
    for family in ("llama", "qwen3_moe", "gpt_oss", "deepseek_v3"):
        model = build_family(family)
        model.set_attn_implementation(PACKED_ATTENTION)
        assert find_mixers(model.get_decoder()) == set()


def test_a_module_that_hands_on_little_of_a_sequence_is_a_mixer():
    """Such as one whose output holds its input, beside which what it mixes is small."""
    decoder = build_family("llama").get_decoder()
    decoder.set_attn_implementation(PACKED_ATTENTION)
    decoder.layers[0].mlp.forward = lambda hidden: hidden + 1e-3 * hidden.cumsum(1)
    assert find_mixers(decoder) == {type(decoder.layers[0].mlp)}


def test_a_mixer_whose_tokens_see_later_ones_is_refused():
    decoder = build_family("lfm2").get_decoder()
    decoder.set_attn_implementation(PACKED_ATTENTION)
    mixer = type(decoder.layers[0].conv)
    forward = mixer.forward

    def look_both_ways(self, hidden_states, **_):
        return forward(self, hidden_states) + forward(self, hidden_states.flip(1)).flip(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixer, "forward", look_both_ways)
        with pytest.raises(ValueError, match="Lfm2ShortConv is not causal"):
            find_mixers(decoder)
    assert find_mixers(decoder) == {mixer}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_whose_results_depend_on_training_or_on_other_sequences_is_refused(dtype):
    decoder = build_family("llama").to(dtype).get_decoder()
    decoder.set_attn_implementation(PACKED_ATTENTION)
    refuse_inconsistent(decoder)
    norm = decoder.layers[0].input_layernorm
    dropout = norm.register_forward_hook(lambda m, _, y: torch.nn.functional.dropout(y, 0.1, training=m.training))
    with pytest.raises(ValueError, match="LlamaModel computes something else while it is trained"):
        refuse_inconsistent(decoder)
    dropout.remove()
    norm.register_forward_hook(lambda m, _, y: y * torch.arange(y.shape[1])[:, None])
    with pytest.raises(ValueError, match="LlamaModel computes a sequence otherwise if another one comes before"):
        refuse_inconsistent(decoder)


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen2_moe", MASKED_WINDOW | {"sliding_window": 6}), ("llama4_text", {})],
)
def test_a_sequence_beyond_a_window_that_is_only_a_mask_is_refused(family, options):
    with pytest.raises(ValueError, match="longer than the window of 6 tokens"):
        make_packed(build_family(family, **options))(one_pack(share_prompts=False))


def test_queries_that_are_scaled_by_their_place_in_a_pack_are_refused():
    options = {"attention_chunk_size": 512, "no_rope_layers": [1, 0], "floor_scale": 20}
    with pytest.raises(ValueError, match="Llama4TextAttention scales queries from token 20 of a pack on"):
        make_packed(build_family("llama4_text", **options))(one_pack(share_prompts=False))


def test_an_argument_that_is_not_computed_is_refused_by_name_and_model():
    module, x = torch.nn.Identity(), torch.zeros(1, 1, 4, 2)
    layout = build_layout([4], [-1])
    packed_attention(module, x, x, x, None, layout=layout, position_ids=x, is_causal=True)
    with pytest.raises(ValueError, match="Identity hands attention `position_bias`"):
        packed_attention(module, x, x, x, None, layout=layout, position_bias=x)
    with pytest.raises(ValueError, match="Identity hands attention `attention_mask`"):
        packed_attention(module, x, x, x, x, layout=layout)
    with pytest.raises(ValueError, match="Identity hands attention `is_causal`"):
        packed_attention(module, x, x, x, None, layout=layout, is_causal=False)


def table_rows() -> list[tuple[list[str], str, str, str]]:
    rows = [row.strip("|").split("|") for row in PAGE.read_text().splitlines() if row.startswith("|`")]
    return [([name.strip(" `") for name in names.split(",")], *columns) for names, *columns in rows]


def test_the_page_names_exactly_the_families_that_are_tested():
    trained = {name for names, _, trained, _ in table_rows() for name in names if trained.startswith("yes")}
    refused = {name for names, _, trained, _ in table_rows() for name in names if trained.startswith("refused")}
    assert trained == set(FAMILIES)
    assert refused == set(REFUSED)


# What the page calls the modules that a family's probe finds.
MIXERS = {"Mamba": ("mamba", "mixer"), "linear attention": ("delta", "lightning"), "short convolutions": ("shortconv",)}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_says_how_a_family_mixes_tokens_and_whether_engines_run_it(family):
    [(_, mixes, trained, engines)] = [row for row in table_rows() if family in row[0]]
    model = build_family(family)
    config, decoder = model.config.to_dict(), make_packed(model).decoder
    kinds = {
        word for kind in decoder.packs.mixers for word, parts in MIXERS.items() if any(p in kind.lower() for p in parts)
    }
    assert {word for word in MIXERS if word in mixes} == kinds
    assert bool(kinds) == bool(decoder.packs.mixers)
    attends, handed = record_attention(decoder)
    assert attends == ("attention" in mixes.replace("linear attention", ""))
    assert ("soft cap" in mixes) == ("softcap" in handed)
    assert ("sinks" in mixes) == ("s_aux" in handed)
    assert ("latent" in mixes) == bool(not decoder.packs.mixers and config.get("kv_lora_rank"))
    assert ("experts" in mixes) == (
        not decoder.packs.mixers and any("expert" in name for name, _ in model.named_modules())
    )
    if not decoder.packs.mixers:
        assert ("logits" in mixes) == (model.get_output_embeddings().transform != UNCHANGED)
    assert ("up to the window" in trained) == (0 < context_from_config(config) < 128)
    answers = [not model_problem({"model_type": family}, "cpu", verify=verify) for verify in (True, False)]
    assert engines == {(True, True): "yes", (False, True): "`sync.verify=false`", (False, False): "no"}[tuple(answers)]


def record_attention(decoder):
    """Whether layers call attention, and what some of them hand to it."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        mapping = AttentionInterface._global_mapping
        patch.setitem(
            mapping, PACKED_ATTENTION, lambda *a, **options: (calls.append(options), packed_attention(*a, **options))[1]
        )
        run_probe(decoder)
    given = {n: o for call in calls for n, o in call.items() if n in ("softcap", "s_aux", "sliding_window")}
    return bool(calls), {name: option for name, option in given.items() if option is not None}


def test_a_decoder_and_its_modules_share_one_context_and_get_nothing_else():
    model = build_family("gemma3_text")
    before = {module: set(vars(module)) for module in model.modules()}
    packed = make_packed(model)
    packed(one_pack(share_prompts=True))
    head = model.get_output_embeddings()
    assert {module for module in model.modules() if vars(module).keys() != before[module]} == {
        *packed.decoder.modules(),
        head,
    }
    assert all(vars(module).keys() - before[module] == {"packs"} for module in packed.decoder.modules())
    assert {id(module.packs) for module in packed.decoder.modules()} == {id(packed.decoder.packs)}
