"""vLLM's attention on this CPU: whether the result for a sequence depends on how it was computed."""

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
    """A model with one attention layer: four heads, two key heads."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    module = torch.nn.Module()
    module.impl = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)  # its constructor needs an engine
    module.impl.num_heads, module.impl.num_kv_heads, module.impl.head_size = 4, 2, 64
    return module


def test_the_result_for_a_short_sequence_is_always_the_same(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPLIT, CPU_ENVIRONMENT[SPLIT])
    for heads, size in ((1, 32), (7, 64), (1, 128)):
        for tokens in (1, 30, 64, 128):
            assert not AttentionProbe(heads, size, torch.float32, 32).depends_on_history(tokens), (heads, size, tokens)


def test_a_split_that_depends_on_other_sequences_is_noticed(
    model: torch.nn.Module, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's default setting splits sequences so in an engine of two threads."""
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
