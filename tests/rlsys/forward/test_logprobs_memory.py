"""The peak memory of a forward and backward pass, measured by torch's profiler."""

from collections.abc import Callable

import torch
from fakes import make_batch
from torch.profiler import ProfilerActivity, profile

from rlsys.batching.packing import pack
from rlsys.forward.attention import PACKED_ATTENTION
from rlsys.forward.logprob_head import ChunkedLogprobs
from rlsys.forward.logprobs import PackedLogprobs
from rlsys.tasks import zigzag

MB = 2**20


def peak(work: Callable[[], None]) -> float:
    """MiB allocated at the peak, beyond what was allocated before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    now = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most / MB


def head(count: int, vocabulary: int, chunk: int) -> float:
    hidden = torch.randn(count, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    targets = torch.arange(count) % vocabulary

    def work() -> None:
        logprobs, entropies = ChunkedLogprobs.apply(hidden, weight, targets, 1.0, chunk)
        (logprobs.sum() + entropies.sum()).backward()

    return peak(work)


def test_log_probs_never_hold_all_logits_at_once():
    logits = 1024 * 4096 * 4 / MB  # 16 MiB
    assert head(1024, 4096, chunk=1024) > 2 * logits, "the peak is measured at all"
    chunked = head(1024, 4096, chunk=32)
    assert chunked < logits / 4
    assert head(4096, 4096, chunk=32) - chunked < 1, "four times the tokens: only per-token data grows"
    assert head(1024, 16384, chunk=8) - chunked < 2, (
        "four times the vocabulary, a quarter of the chunk: only the gradient of the weight grows"
    )


def test_gradient_checkpointing_lowers_the_peak():
    batch = make_batch([0.0] * 40, [0] * 40, [40] * 40)
    [[p]] = pack(batch, range(40), ranks=1, tokens_per_pack=4096)

    def peak_of_pass(checkpointing: bool) -> float:
        lm = zigzag.build_model(0).train()
        lm.set_attn_implementation(PACKED_ATTENTION)
        if checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        model = PackedLogprobs(lm)
        return peak(lambda: model(p)[0].sum().backward())

    assert peak_of_pass(True) < 0.8 * peak_of_pass(False)
