"""Routers of vLLM's CPU build against a loop over tokens."""

from typing import Any

import pytest
import torch

from workers.cpu.routing import route_without_groups


@pytest.fixture(scope="module")
def patched() -> Any:
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_router.CPURouter, "_compute_routing", cpu_router.CPURouter._compute_routing)
        route_without_groups()
        yield cpu_router.CPURouter


def routed(logits: list[float], bias: list[float] | None, score: str, scale: float) -> dict[int, float]:
    """Weights of the two experts with the largest biased scores; a weight is a score without its bias."""
    exact = [torch.tensor(x, dtype=torch.float64) for x in logits]
    total = sum(x.exp() for x in exact)
    scores = [float(x.exp() / total if score == "softmax" else 1 / (1 + (-x).exp())) for x in exact]
    biased = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    chosen = sorted(range(len(scores)), key=lambda i: -biased[i])[:2]
    return {i: scale * scores[i] / sum(scores[j] for j in chosen) for i in chosen}


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [None, [0.9, 0.0, -0.9, 0.3, 0.0]])
def test_experts_are_chosen_by_biased_scores_and_weighted_without_the_bias(
    patched: Any, score: str, bias: list[float] | None
) -> None:
    torch.manual_seed(0)
    logits, scale = torch.randn(20, 5), 2.5 if bias else 1.0
    correction = None if bias is None else torch.tensor(bias)
    router = patched(2, 5, scoring_func=score, routed_scaling_factor=scale, e_score_correction_bias=correction)
    weights, experts = router._compute_routing(logits, logits, None)
    for row, chosen, token in zip(weights.tolist(), experts.tolist(), logits.tolist(), strict=True):
        assert dict(zip(chosen, row, strict=True)) == pytest.approx(routed(token, bias, score, scale), rel=1e-5)
    if bias:
        unbiased = [set(routed(token, None, score, scale)) for token in logits.tolist()]
        assert any(set(chosen) != other for chosen, other in zip(experts.tolist(), unbiased, strict=True))
