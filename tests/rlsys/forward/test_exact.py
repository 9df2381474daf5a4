"""Results that do not depend on the rest of the batch, compared bit for bit."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import make_batch
from transformers import LlamaConfig, LlamaForCausalLM

from rlsys.batching.packing import empty_pack, pack, unpack
from rlsys.forward import attention, exact
from rlsys.forward.logprobs import PackedLogprobs
from rlsys.types import Columns, Pack


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("inner", "outer"), [(128, 384), (128, 13), (256, 1000), (896, 1152), (1536, 256)])
def test_a_linear_layer_gives_the_same_row_alone_and_among_others(inner: int, outer: int) -> None:
    weight, bias, rows = random(outer, inner), random(outer, seed=1), random(700, inner, seed=2)
    whole = exact.linear(rows, weight, bias)
    torch.testing.assert_close(whole, F.linear(rows, weight, bias))
    for count in (1, 2, 15, 16, 17, 100, 256, 257, 513):
        assert torch.equal(exact.linear(rows[-count:], weight, bias), whole[-count:]), count
    assert not exact.depends_on_batch(weight, bias)
    assert exact.linear(rows.view(7, 100, inner), weight).shape == (7, 100, outer)


def test_a_library_that_sums_differently_for_fewer_rows_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = F.linear

    def fickle(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, weight, bias) * (1 + 1e-6 * (len(x) < 64))

    monkeypatch.setattr(F, "linear", fickle)
    assert exact.depends_on_batch(random(64, 128))


@pytest.mark.parametrize("size", [32, 64, 80])
@pytest.mark.parametrize("length", [5, 33, 200])
def test_attention_is_the_same_in_prefill_and_in_decoding_among_others(size: int, length: int) -> None:
    padded = -(-length // exact.KEY_BLOCK) * exact.KEY_BLOCK
    query, key, value = random(1, length, size), random(1, padded, size, seed=1), random(1, padded, size, seed=2)
    whole = exact.attend(query, key, value, torch.arange(1, length + 1)[None], 0.2)
    expected = F.scaled_dot_product_attention(query, key[:, :length], value[:, :length], is_causal=True, scale=0.2)
    torch.testing.assert_close(whole, expected)
    for i in range(length):
        needed = -(-(i + 1) // exact.KEY_BLOCK) * exact.KEY_BLOCK
        alone = exact.attend(query[:, i : i + 1], key[:, :needed], value[:, :needed], torch.tensor([[i + 1]]), 0.2)
        assert torch.equal(alone[:, 0], whole[:, i])
    positions = torch.arange(length).repeat(3)
    many = exact.attend(
        query[0, positions][:, None],
        key.expand(len(positions), -1, -1),
        value.expand(len(positions), -1, -1),
        positions[:, None] + 1,
        0.2,
    )
    assert torch.equal(many[:, 0], whole[0, positions])


def scorer(kind: str) -> PackedLogprobs:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    lm = LlamaForCausalLM._from_config(config, attn_implementation=kind)
    if kind == attention.EXACT_PACKED_ATTENTION:
        exact.use_exact_linear(lm)
    return PackedLogprobs(lm, temperature=0.7, chunk=30)


def packed(sequences: list[np.ndarray]) -> Pack:
    """Every token but the first is a target."""
    lengths = [len(s) - 1 for s in sequences]
    total = sum(lengths)
    starts, zeros = (np.cumsum(lengths) - lengths).tolist(), np.zeros(total, np.float32)
    return Pack(
        tokens=np.concatenate([s[:-1] for s in sequences]),
        lengths=lengths,
        parent=[-1] * len(lengths),
        targets=np.concatenate([s[1:] for s in sequences]),
        samples=list(range(len(sequences))),
        target_counts=lengths,
        turn_counts=lengths,
        first_logit=starts,
        next_logits=[start + 1 for start in starts],
        rollout=zeros,
        weights=zeros,
        columns=Columns(),
    )


def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 50, n) for n in (3, 40, 9, 70, 12, 11, 10, 9)]


def test_log_probs_do_not_depend_on_the_pack() -> None:
    model = scorer(attention.EXACT_PACKED_ATTENTION)
    with torch.no_grad():
        together = model(packed(sequences()))[0]
        alone = torch.cat([model(packed([s]))[0] for s in sequences()])
        backwards = torch.cat([model(packed(sequences()[i::-1]))[0][-len(sequences()[0]) + 1 :] for i in range(1, 8)])
        plain = scorer(attention.PACKED_ATTENTION)(packed(sequences()))[0]
    assert torch.equal(together, alone)
    assert torch.equal(backwards, together[: len(sequences()[0]) - 1].repeat(7))
    torch.testing.assert_close(together, plain, atol=1e-5, rtol=1e-5)


def test_gradients_equal_those_of_ordinary_arithmetic() -> None:
    gradients = []
    for kind in (attention.EXACT_PACKED_ATTENTION, attention.PACKED_ATTENTION):
        model = scorer(kind)
        logprobs, entropies = model(packed(sequences()))
        (logprobs.sum() - 0.1 * entropies.sum()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-4, rtol=1e-4)


def test_an_empty_pack_has_a_backward_pass() -> None:
    model = scorer(attention.EXACT_PACKED_ATTENTION)
    logprobs, _ = model(empty_pack(Columns()))
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert not any(p.grad is None or p.grad.any() for p in model.parameters())


def test_sharing_a_prompt_changes_no_bit() -> None:
    """The engine scores each completion alone, the trainer all completions of a prompt together, with equal results."""
    batch = make_batch([0.0] * 8, [0, 0, 0, 1, 1, 1, 1, 2], [30, 1, 4, 70, 65, 2, 40, 5], [40, 9, 33])
    model, result = scorer(attention.EXACT_PACKED_ATTENTION), []
    for share in (True, False):
        packs = pack(batch, range(8), ranks=1, tokens_per_pack=1000, share_prompts=share)
        assert [len(p.parent) for rank_packs in packs for p in rank_packs] == [9 if share else 8]
        with torch.no_grad():
            result.append(unpack(packs, [[model(p)[0].numpy() for p in rank_packs] for rank_packs in packs], 8))
    assert np.array_equal(*result)
