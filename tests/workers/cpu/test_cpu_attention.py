"""vLLM's attention on this CPU: whether a sequence has a result of its own, and how it is found out."""

from collections.abc import Iterator

import pytest
import torch

from workers.cpu.attention import MAX_TOKENS, AttentionProbe, deterministic_up_to
from workers.rollout.engine_settings import CPU_ENVIRONMENT

SPLIT = "VLLM_CPU_ATTN_SPLIT_KV"


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def model() -> torch.nn.Module:
    """Of one attention, of four heads with two of keys."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    found = torch.nn.Module()
    found.impl = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)  # what makes it asks for an engine around it
    found.impl.num_heads, found.impl.num_kv_heads, found.impl.head_size = 4, 2, 64
    return found


def test_short_sequences_have_a_result_of_their_own(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPLIT, CPU_ENVIRONMENT[SPLIT])
    for heads, size in ((1, 32), (7, 64), (1, 128)):
        for tokens in (1, 30, 64, 128):
            assert not AttentionProbe(heads, size, torch.float32, 32).depends_on_history(tokens), (heads, size, tokens)


def test_it_is_seen_where_a_sequence_is_cut_by_what_is_beside_it(
    model: torch.nn.Module, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own setting, with which an engine of two threads would cut sequences so."""
    monkeypatch.setenv(SPLIT, "1")
    if threads == 2:
        assert AttentionProbe(2, 64, torch.float32, 32).depends_on_history(2048)
        assert deterministic_up_to(model, torch.float32, 32, 2048) < 2048
    monkeypatch.setenv(SPLIT, CPU_ENVIRONMENT[SPLIT])
    assert deterministic_up_to(model, torch.float32, 32, 200) == 200
    longest = deterministic_up_to(model, torch.float32, 32, 10 * MAX_TOKENS)
    assert longest == 10 * MAX_TOKENS or AttentionProbe(2, 64, torch.float32, 32).depends_on_history(
        min(2 * longest, MAX_TOKENS)
    )
