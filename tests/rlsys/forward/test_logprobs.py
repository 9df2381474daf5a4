import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlsys.batching.packing import empty_pack, pack, unpack
from rlsys.forward.attention import PACKED_ATTENTION
from rlsys.forward.decoder import run_decoder
from rlsys.forward.logit_transform import UNCHANGED, LogitTransform
from rlsys.forward.logprob_head import ChunkedLogprobs, LogprobHead
from rlsys.forward.logprobs import PackedLogprobs
from rlsys.tasks import zigzag
from rlsys.types import Columns, Observation


def packed(temperature: float = 1.0, chunk: int = 1024) -> PackedLogprobs:
    model = zigzag.build_model(0)
    model.set_attn_implementation(PACKED_ATTENTION)
    return PackedLogprobs(model, temperature=temperature, chunk=chunk)


@given(
    count=st.integers(0, 12),
    vocabulary=st.integers(2, 9),
    chunk=st.integers(1, 15),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    seed=st.integers(0, 100),
)
def test_any_chunk_gives_the_values_and_gradients_of_plain_log_softmax(count, vocabulary, chunk, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 5, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, 5, generator=generator, requires_grad=True)
    targets = torch.randint(0, vocabulary, (count,), generator=generator)
    upstream, downstream = torch.randn(2, count, generator=generator)

    logprobs, entropies = ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk)
    plain = (hidden @ weight.T / temperature).log_softmax(-1)
    picked, spread = plain.gather(-1, targets[:, None])[:, 0], -(plain.exp() * plain).sum(-1)
    torch.testing.assert_close(logprobs, picked)
    torch.testing.assert_close(entropies, spread)
    for ours, theirs in (
        (logprobs @ upstream, picked @ upstream),
        (entropies @ upstream, spread @ upstream),
        (logprobs @ upstream + entropies @ downstream, picked @ upstream + spread @ downstream),
    ):
        result = torch.autograd.grad(ours, (hidden, weight), retain_graph=True)
        expected = torch.autograd.grad(theirs, (hidden, weight), retain_graph=True)
        for a, b in zip(result, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("excluding", [False, True])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_changed_in_place_give_what_autograd_computes_in_double_precision(
    dtype, temperature, cap, excluding, with_entropy
):
    """The last of several chunks is smaller. The inputs stay as they are."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, 16, generator=generator).to(dtype) for n in (37, 5003)]
    hidden, weight = (x.clone().requires_grad_() for x in inputs)
    targets = torch.randint(3, 5003, (37,), generator=generator)
    early, ends = torch.arange(37) % 3 == 0, [0, 2]
    upstream, downstream = torch.randn(2, 37, generator=generator)

    excluded = (early, ends) if excluding else None
    options = temperature, 10, F.linear, True, excluded, LogitTransform(cap=cap)
    ours = ChunkedLogprobs.apply(hidden, weight, targets, *options)

    logits = F.linear(hidden, weight).double()
    logits = (cap * torch.tanh(logits / cap) if cap else logits) / temperature
    if excluding:
        logits = logits.index_put((early.nonzero(), torch.tensor([ends])), torch.tensor(-1e4).double())
    plain = torch.log_softmax(logits, -1)
    theirs = plain[torch.arange(37), targets], -(plain.exp() * plain).sum(-1)

    values, gradients = [], []
    for logprobs, entropies in (ours, theirs):
        loss = (logprobs * upstream).sum()
        if with_entropy:
            loss = loss + (entropies * downstream).sum()
        values.append(torch.stack([logprobs, entropies]).double())
        gradients.append([g.double() for g in torch.autograd.grad(loss, (hidden, weight))])
    torch.testing.assert_close(*values, atol=1e-5, rtol=1e-5)
    rounding = 1e-5 if dtype == torch.float32 else 2**-7
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=rounding * float(b.abs().max()), rtol=rounding)
    assert torch.equal(hidden, inputs[0])
    assert torch.equal(weight, inputs[1])


@pytest.mark.parametrize("share", [True, False])
def test_log_probs_of_own_tokens_are_those_of_the_whole_episode(share):
    batch = make_batch([0] * 4, [0, 0, 0, 1], lengths=[5, 6, 3, 4], prompt_lengths=[5, 3])

    def observe(*ats: int) -> tuple[Observation, ...]:
        return tuple(Observation(at, np.array([4, 7, 1][: 1 + at % 3], dtype=np.int32)) for at in ats)

    places = [observe(2, 4), observe(0, 3, 6), (), observe(1)]
    samples = [replace(s, observations=o) for s, o in zip(batch.samples, places, strict=True)]
    batch = replace(batch, samples=samples)
    packs = pack(batch, range(4), ranks=1, tokens_per_pack=1000, share_prompts=share)
    model = packed()
    with torch.no_grad():
        values = unpack(packs, [[model(p)[0].numpy() for p in rank] for rank in packs], 4)
        model.lm.set_attn_implementation("eager")
        plain = []
        for sample, group in zip(samples, batch.groups, strict=True):
            sequence, own = list(batch.prompts[group].tokens), []
            for i, token in enumerate([*sample.tokens.tolist(), None]):
                sequence += [t for o in sample.observations if o.at == i for t in o.tokens.tolist()]
                if token is not None:
                    own.append(len(sequence))
                    sequence.append(token)
            logits = model.lm(torch.tensor([sequence])).logits[0].log_softmax(-1)
            plain += [float(logits[at - 1, sequence[at]]) for at in own]
    np.testing.assert_allclose(values, plain, atol=1e-5)


def test_a_head_in_float32_rounds_no_logit_of_a_bfloat16_body():
    batch = make_batch([0] * 3, [0, 0, 1], lengths=[1, 6, 3], prompt_lengths=[5, 1])
    [[one]] = pack(batch, range(3), ranks=1, tokens_per_pack=1000)
    lm = zigzag.build_model(0).bfloat16()
    lm.set_attn_implementation(PACKED_ATTENTION)
    model = PackedLogprobs(lm, float32_head=True, chunk=4)
    head, targets = lm.get_output_embeddings(), torch.tensor(one.targets).long()
    hidden = run_decoder(lm.get_decoder(), one, torch.device("cpu")).hidden.detach()
    assert hidden.dtype == head.weight.dtype == torch.bfloat16
    weight = head.weight.detach().double().requires_grad_()
    plain = (hidden.double() @ weight.T).log_softmax(-1)
    expected = plain.gather(1, targets[:, None])[:, 0]

    logprobs, entropies = head(hidden, targets)
    assert (logprobs - expected).abs().max() < 1e-5
    assert (entropies + (plain.exp() * plain).sum(-1)).abs().max() < 1e-5
    assert torch.equal(model(one)[0], logprobs)
    [ours], [theirs] = (torch.autograd.grad(p.sum(), [w]) for p, w in ((logprobs, head.weight), (expected, weight)))
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), theirs, atol=1e-3, rtol=2**-8)
    head.in_float32 = False
    assert (head(hidden, targets)[0] - expected).abs().max() > 1e-3, "logits in bfloat16 are rounded"


def slopes_of(loss):
    """As `Objective.slopes`: the gradient of `loss(which, logprobs, entropies)` by the two."""

    def slopes(which, logprobs, entropies):
        with torch.enable_grad():
            outputs = logprobs.detach().requires_grad_(), entropies.detach().requires_grad_()
            return torch.autograd.grad(loss(which, *outputs), outputs, allow_unused=True)

    return slopes


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("excluding", [False, True])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_forward_pass_are_those_of_the_backward_pass_bit_for_bit(
    dtype, frozen, cap, excluding, with_entropy
):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, 16, generator=generator).to(dtype) for n in (37, 503)]
    targets = torch.randint(3, 503, (37,), generator=generator)
    upstream, downstream = torch.randn(2, 37, generator=generator)
    excluded = (torch.arange(37) % 3 == 0, [0, 2]) if excluding else None
    options = 0.7, 10, F.linear, True, excluded, LogitTransform(cap=cap)

    def loss(which, logprobs, entropies):
        values = (logprobs * upstream[which]).exp() + entropies * downstream[which] * with_entropy
        return values.sum()

    results = []
    for slopes in (None, slopes_of(loss)):
        hidden, weight = (x.clone().requires_grad_() for x in inputs)
        weight.requires_grad_(not frozen)
        logprobs, entropies = ChunkedLogprobs.apply(hidden, weight, targets, *options, slopes)
        loss(slice(None), logprobs, entropies).backward()
        results.append([logprobs, entropies, hidden.grad, *([] if frozen else [weight.grad])])
        assert frozen == (weight.grad is None)
    for twice, once in zip(*results, strict=True):
        assert once.dtype == twice.dtype
        assert torch.equal(once, twice)


def test_a_slope_that_is_not_the_losss_own_makes_the_gradient_not_a_number():
    """So that an update is skipped and the run stops, instead of training on something else."""
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    slopes = slopes_of(lambda which, logprobs, _: logprobs.sum())
    logprobs, _ = ChunkedLogprobs.apply(
        hidden, weight, torch.tensor([0, 1, 2, 3]), 1.0, 3, F.linear, True, None, UNCHANGED, slopes
    )
    (logprobs * torch.tensor([1.0, 1.0, 1.1, 1.0])).sum().backward()
    assert hidden.grad.isfinite().all(1).tolist() == [True, True, False, True]


def test_the_logits_of_an_update_are_computed_once():
    hidden, weight, calls = torch.randn(7, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True), []

    def counted(x, w):
        calls.append(len(x))
        return F.linear(x, w)

    for slopes, expected in (
        (None, [3, 3, 1, 3, 3, 1]),
        (slopes_of(lambda _, logprobs, __: logprobs.sum()), [3, 3, 1]),
    ):
        calls.clear()
        logprobs, _ = ChunkedLogprobs.apply(
            hidden, weight, torch.arange(7) % 6, 1.0, 3, counted, True, None, UNCHANGED, slopes
        )
        logprobs.sum().backward()
        assert calls == expected


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_excluded_tokens_have_no_share_of_the_distribution(chunk):
    """The same as a softmax over the other columns alone."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 5, generator=generator, requires_grad=True) for n in (7, 6))
    targets, early = torch.tensor([0, 2, 3, 1, 0, 5, 4]), torch.tensor([True, True, True, False, True, False, False])
    arguments = hidden, weight, targets, 0.7, chunk, F.linear, True, (early, [1, 4])
    logprobs, entropies = ChunkedLogprobs.apply(*arguments)
    kept, picked, spread = [0, 2, 3, 5], [], []
    for h, t, e in zip(hidden, targets.tolist(), early.tolist(), strict=True):
        columns = kept if e else list(range(6))
        plain = (weight[columns] @ h / 0.7).log_softmax(-1)
        picked.append(plain[columns.index(t)])
        spread.append(-(plain.exp() * plain).sum())
    picked, spread = torch.stack(picked), torch.stack(spread)
    torch.testing.assert_close(logprobs, picked)
    torch.testing.assert_close(entropies, spread)
    upstream, downstream = torch.randn(2, 7, generator=generator)
    result = torch.autograd.grad(logprobs @ upstream + entropies @ downstream, (hidden, weight))
    expected = torch.autograd.grad(picked @ upstream + spread @ downstream, (hidden, weight))
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_among_the_first_tokens_of_a_completion_the_end_has_no_probability():
    batch = make_batch([0] * 3, [0, 0, 1], lengths=[1, 6, 3], prompt_lengths=[5, 1])
    [packs] = pack(batch, range(3), ranks=1, tokens_per_pack=1000)
    lm = zigzag.build_model(0)
    lm.set_attn_implementation(PACKED_ATTENTION)
    model = PackedLogprobs(lm, temperature=0.7, min_new_tokens=2, end_ids=[1, 9])
    with torch.no_grad():
        values = [[model(p)[0].numpy() for p in packs]]
    plain = zigzag.build_model(0)
    for sample, group, result in zip(batch.samples, batch.groups, batch.split(unpack([packs], values, 3)), strict=True):
        prompt, expected = batch.prompts[group].tokens, []
        for i, token in enumerate(sample.tokens.tolist()):
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *sample.tokens[:i]]])
                p = (plain(input_ids=ids).logits[0, -1] / 0.7).softmax(-1)
            if i < 2:
                p[[1, 9]] = 0
            expected.append(math.log(p[token] / p.sum()) if p[token] else None)
        for ours, theirs in zip(result.tolist(), expected, strict=True):
            assert ours < -1e20 if theirs is None else ours == pytest.approx(theirs, abs=1e-5)


def test_two_logits_by_hand():
    """Logits 0 and log 3 are probabilities 1/4 and 3/4."""
    hidden, weight = torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [math.log(3)]])
    logprobs, entropies = ChunkedLogprobs.apply(hidden, weight, torch.tensor([0, 1]), 1.0, 1)
    assert logprobs.exp().tolist() == pytest.approx([0.25, 0.75])
    entropy = 0.25 * np.log(4) + 0.75 * np.log(4 / 3)
    assert entropies.tolist() == pytest.approx([entropy, entropy])


def test_temperature_flattens():
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [2.0]])
    cold, cold_entropy = ChunkedLogprobs.apply(hidden, weight, torch.tensor([0]), 1.0, 1)
    hot, hot_entropy = ChunkedLogprobs.apply(hidden, weight, torch.tensor([0]), 2.0, 1)
    assert hot.exp().item() == pytest.approx(1 / (1 + np.e))
    assert hot > cold
    assert hot_entropy > cold_entropy


def test_low_precision_weights_still_give_full_precision_log_probs():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(4, 8, generator=generator).bfloat16().requires_grad_() for _ in range(2))
    logprobs, _ = ChunkedLogprobs.apply(hidden, weight, torch.tensor([0, 1, 2, 3]), 1.0, 3)
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    # d logprob / d logits sums to 0 over the vocabulary, and so does the gradient over the rows of the weight
    assert weight.grad.float().sum(0).abs().max() < 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("budget", [12, 1000])
def test_a_pack_has_the_log_probs_of_its_completions(temperature, budget):
    batch = make_batch([0] * 4, [0, 0, 1, 1], lengths=[1, 6, 3, 4], prompt_lengths=[5, 1])
    packs = pack(batch, range(4), ranks=1, tokens_per_pack=budget)
    model = packed(temperature, chunk=2)
    with torch.no_grad():
        values = [[model(p)[0].numpy() for p in rank_packs] for rank_packs in packs]
    plain = zigzag.build_model(0)
    for sample, group, result in zip(batch.samples, batch.groups, batch.split(unpack(packs, values, 4)), strict=True):
        prompt = batch.prompts[group].tokens
        whole = torch.tensor([*prompt, *sample.tokens])
        with torch.no_grad():
            logprobs = (plain(input_ids=whole[None]).logits[0] / temperature).log_softmax(-1)
        expected = [logprobs[i - 1, whole[i]].item() for i in range(len(prompt), len(whole))]
        assert result.tolist() == pytest.approx(expected, abs=1e-5)


def grouped_heads() -> Any:
    """Two key/value heads shared by four query heads, in three layers."""
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=13,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
        )
    )


@pytest.mark.parametrize("build", [lambda: zigzag.build_model(0), grouped_heads], ids=["tiny", "grouped heads"])
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpointing", "reentrant"])
@settings(max_examples=6)
@given(
    completions=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=4),
    prompts=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    ranks=st.integers(1, 2),
    budget=st.sampled_from([1, 25, 60, 1000]),
)
def test_a_shared_prompt_gives_the_gradients_of_each_sequence_alone(
    build, checkpointing, completions, prompts, ranks, budget
):
    """Compares with plain transformers, without our packs, attention or head."""
    groups = [g for g, lengths in enumerate(completions) for _ in lengths]
    batch = make_batch(
        [0.0] * len(groups), groups, [n for lengths in completions for n in lengths], prompts[: len(completions)]
    )
    count = len(groups)
    weights = np.random.default_rng(0).normal(size=batch.lengths.sum()).astype(np.float32)
    plain = build()
    expected = []
    for sample, group in zip(batch.samples, batch.groups, strict=True):
        prompt = batch.prompts[group].tokens
        whole = torch.tensor([*prompt, *sample.tokens])
        log_p = plain(input_ids=whole[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected.append(log_p.gather(-1, whole[len(prompt) :, None])[:, 0])
    (torch.cat(expected) * torch.from_numpy(weights)).sum().backward()

    lm = build()
    lm.set_attn_implementation(PACKED_ATTENTION)
    if checkpointing is not None:
        lm.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        lm.train()
        lm.enable_input_require_grads()
    model = PackedLogprobs(lm, chunk=7)
    packs = pack(batch, range(count), ranks=ranks, tokens_per_pack=budget, weights=weights)
    result = []
    for rank_packs in packs:
        result.append([])
        for p in rank_packs:
            logprobs, _ = model(p)
            (logprobs * torch.from_numpy(p.weights)).sum().backward()
            result[-1].append(logprobs.detach().numpy())
    np.testing.assert_allclose(unpack(packs, result, count), torch.cat(expected).detach().numpy(), atol=1e-5)
    whole = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    for (name, ours), theirs in zip(lm.named_parameters(), plain.parameters(), strict=True):
        # With one key, attention has no choice: the gradient of the query is rounding error.
        gap = (ours.grad - theirs.grad).norm() / theirs.grad.norm().clamp(min=1e-2 * whole)
        assert gap < 1e-5, name


def test_without_gradients_there_are_no_entropies():
    batch = make_batch([0] * 2, [0, 0])
    [[p]] = pack(batch, range(2), ranks=1, tokens_per_pack=100)
    model = packed()
    logprobs, entropies = model(p)
    with torch.no_grad():
        scored, nothing = model(p)
    assert (entropies > 0).all()
    assert len(entropies) == 6
    assert torch.equal(scored, logprobs)
    assert len(nothing) == 0


def test_an_empty_pack_has_no_log_probs_but_a_backward_pass():
    model = packed()
    logprobs, entropies = model(empty_pack(Columns()))
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert all(w.grad is not None and not w.grad.any() for w in model.lm.model.layers.parameters())


def test_the_head_stays_tied_to_the_embeddings():
    model = packed()
    head = model.lm.get_output_embeddings()
    assert isinstance(head, LogprobHead)
    assert head.weight is model.lm.get_input_embeddings().weight


def test_a_head_with_a_bias_is_refused():
    lm = zigzag.build_model(0)
    lm.set_output_embeddings(nn.Linear(128, 13, bias=True))
    with pytest.raises(ValueError, match="without bias"):
        PackedLogprobs(lm)
