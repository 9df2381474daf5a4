"""Sequence parallelism in threads: log-probs and gradients are those of each sequence alone, by transformers' own attention."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, VOCABULARY, build_family

from rlsys.batching.packing import empty_pack, pack
from rlsys.errors import ConfigError
from rlsys.forward.attention import PACKED_ATTENTION
from rlsys.forward.context import split_sequences
from rlsys.forward.logprobs import PackedLogprobs
from rlsys.forward.mixers import fold_mixers
from rlsys.forward.sequence_parallel import SequenceGroup
from rlsys.types import Batch, Columns, Pack, Prompt, Sample

MIXERS = {
    "zamba2": "Zamba2MambaMixer",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "lfm2": "Lfm2ShortConv",
    "falcon_h1": "FalconH1Mixer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "jamba": "JambaMambaMixer",
    "bamba": "BambaMixer",
    "minimax": "MiniMaxLightningAttention",
    "lfm2_moe": "Lfm2MoeShortConv",
    "mamba2": "Mamba2Mixer",
    "kimi_linear": "KimiLinear",
}


@dataclass
class Threads:
    """Ranks that are threads, and exchange through a list."""

    ranks: int
    slots: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots, self.barrier = [None] * self.ranks, threading.Barrier(self.ranks, timeout=60)

    def swap(self, rank: int, x: Any) -> list[Any]:
        """What every rank brought."""
        self.slots[rank] = x
        self.barrier.wait()
        brought = list(self.slots)
        self.barrier.wait()
        return brought

    def group(self, rank: int) -> SequenceGroup:
        class Exchange(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return torch.stack([other[rank] for other in self.swap(rank, x)])

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return torch.stack([other[rank] for other in self.swap(rank, grad)])

        def add_up(x: torch.Tensor) -> None:
            x.copy_(sum(self.swap(rank, x.clone())))

        return SequenceGroup(rank, self.ranks, Exchange.apply, add_up)

    def run(self, compute: Any) -> list[Any]:
        with ThreadPoolExecutor(self.ranks) as pool:
            return list(pool.map(compute, range(self.ranks)))


def batch() -> Batch:
    """Two prompts with three completions, one of them a single token, and two."""
    rng = np.random.default_rng(0)
    prompts = [Prompt(f"p{i}", "", "", rng.integers(3, VOCABULARY, n).tolist(), {}) for i, n in enumerate((9, 4))]
    samples = [
        Sample(f"p{g}", i, "", rng.integers(3, VOCABULARY, n).astype(np.int32), np.zeros(n, np.float32), "stop", 0)
        for i, (g, n) in enumerate([(0, 7), (0, 1), (0, 5), (1, 11), (1, 6)])
    ]
    return Batch(prompts, samples, np.array([0, 0, 0, 1, 1]), np.zeros(5, np.float32), [{}] * 5)


def alone(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of all completions, sequence by sequence."""
    model.set_attn_implementation("eager")
    logprobs, entropies = [], []
    for group, sample in zip(batch.groups, batch.samples, strict=True):
        prompt, completion = batch.prompts[group].tokens, sample.tokens.tolist()
        logits = model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
        log_p = logits.log_softmax(-1)
        logprobs.append(log_p[range(len(completion)), completion])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def loss(logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    """A loss in which every token's gradient depends on other tokens."""
    weights = torch.linspace(-1, 1, len(logprobs))
    return (weights * logprobs).sum() ** 2 / 100 + (weights.flip(0) * entropies).sum()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def split(name: str, ranks: int, packs: list[Pack], **options: Any) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """Log-probs of each rank, and its gradient."""
    threads, model = Threads(ranks), build_family(name, **options)
    model.set_attn_implementation(PACKED_ATTENTION)
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def compute(rank: int) -> Any:
        fold_mixers(models[rank].get_decoder())
        packed = PackedLogprobs(models[rank])
        split_sequences(packed.decoder, threads.group(rank))
        results = [packed(p) for p in packs]
        loss(*(torch.cat(column) for column in zip(*results, strict=True))).backward()
        return results, gradients(models[rank])

    return threads.run(compute)


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [(name, 2, {}) for name in FAMILIES if name not in MIXERS]
    + [
        ("llama", 4, {}),  # each head of keys for two ranks
        ("qwen3", 4, {"num_key_value_heads": 1}),
        ("gpt_oss", 4, {}),
        ("gemma3_text", 3, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}),
    ],
)
def test_ranks_that_share_a_pack_compute_what_each_sequence_alone_has(
    name: str, ranks: int, options: dict[str, Any]
) -> None:
    model, whole = build_family(name, **options), batch()
    expected = alone(model, whole)
    loss(*expected).backward()
    [[together]] = pack(whole, range(5), ranks=1, tokens_per_pack=1000)
    computed = split(name, ranks, [together], **options)
    for results, _ in computed:
        for actual, wanted in zip(results[0], expected, strict=True):
            torch.testing.assert_close(actual.detach(), wanted.detach(), atol=2e-5, rtol=2e-5)
    for parameter, wanted in gradients(model).items():
        total = sum(gradient[parameter] for _, gradient in computed)
        assert (total - wanted).norm() <= 1e-5 * max(wanted.norm(), 1e-2), parameter
    assert all((own["model.embed_tokens.weight"]).any() for _, own in computed[:1]), "no gradient, nothing was compared"


def test_a_pack_of_fewer_tokens_than_ranks_and_an_empty_one_add_nothing_wrong() -> None:
    whole = batch()
    [[together]] = pack(whole, range(5), ranks=1, tokens_per_pack=1000)
    plain, padded = (split("llama", 4, packs) for packs in ([together], [together, empty_pack(Columns())]))
    assert len(together.tokens) % 4, "the last share is padded"
    for parameter in plain[0][1]:
        torch.testing.assert_close(*(sum(gradient[parameter] for _, gradient in side) for side in (plain, padded)))


@pytest.mark.parametrize("name", MIXERS)
def test_a_model_that_hands_state_from_token_to_token_is_refused_by_name(name: str) -> None:
    decoder = build_family(name)
    decoder.set_attn_implementation(PACKED_ATTENTION)
    fold_mixers(decoder.get_decoder())
    with pytest.raises(ConfigError, match=rf"policy.sequence_parallel \(2\): \w+ has .*{MIXERS[name]}.*Use 1"):
        split_sequences(decoder.get_decoder(), SequenceGroup(0, 2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "possible"),
    [(7, 7, 2, "1, 7"), (14, 2, 4, "1, 2, 14"), (8, 4, 3, "1, 2, 4, 8"), (12, 4, 6, "1, 2, 4, 12")],
)
def test_heads_that_do_not_divide_are_refused_with_the_numbers_that_would_do(
    heads: int, kv_heads: int, ranks: int, possible: str
) -> None:
    model = build_family("qwen3", num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=168)
    model.set_attn_implementation(PACKED_ATTENTION)
    packed = PackedLogprobs(model)
    fold_mixers(packed.decoder)
    split_sequences(packed.decoder, SequenceGroup(0, ranks))
    [[together]] = pack(batch(), range(5), ranks=1, tokens_per_pack=1000)
    with pytest.raises(
        ConfigError, match=rf"\({ranks}\) does not divide Qwen3Attention: {heads} .*It may be {possible}\."
    ):
        packed(together)
