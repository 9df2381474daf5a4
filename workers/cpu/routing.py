"""Routers of experts in vLLM's CPU build, which knows biases and sigmoids only for experts in groups."""

from typing import Any

SCORES = ("softmax", "sigmoid")


def route_without_groups() -> None:
    """Patch: a router without groups is computed as one with a single group of all experts.

    vLLM ignores its bias, and stops at a sigmoid.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter, _grouped_topk

    compute = CPURouter._compute_routing

    def compute_routing(self: Any, hidden: Any, logits: Any, *more: Any, **options: Any) -> tuple[Any, Any]:
        bias, scores = self.e_score_correction_bias, self.scoring_func
        if self.use_grouped_topk or self.custom_routing_function or scores not in SCORES:
            return compute(self, hidden, logits, *more, **options)  # type: ignore[no-any-return]
        if bias is None and scores == "softmax":
            return compute(self, hidden, logits, *more, **options)  # type: ignore[no-any-return]
        options = {"scoring_func": scores, "routed_scaling_factor": self.routed_scaling_factor}
        groups = {"num_expert_group": 1, "topk_group": 1}
        return _grouped_topk(logits, self.top_k, self.renormalize, **groups, **options, e_score_correction_bias=bias)

    CPURouter._compute_routing = compute_routing
