"""One mini-batch's gradient under any number of ranks, ZeRO stage and pack budget, and how far it is from another's.

The driver starts ranks once for each number of them; they build their model anew for each stage, and go through the budgets.
What is measured is the run's own update, up to its optimizer step, which is left out.
"""

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from rlsys.config.schema import Config, PolicyConfig
from rlsys.types import Floats, Pack
from workers.learner.zero import ZeroEngine, import_deepspeed, join_process_group
from workers.supervision.worker_setup import free_port, setup_worker_process

Gradient = dict[str, Floats]
NOISE_FLOOR = 1e-3  # a parameter with less than this part of the whole gradient is compared with this part: it may be zero but for rounding


@dataclass(frozen=True)
class GradientDifference:
    """`Difference(whole=3e-7, worst=2e-6, name="model.layers.0.mlp.up_proj.weight")`"""

    total: float  # |gradient - reference| / |reference|, all parameters as one vector
    largest: float  # the same of the parameter where it is largest
    parameter: str


def compare_gradients(gradient: Iterable[tuple[str, Floats]], reference: Gradient) -> GradientDifference:
    """One tensor after the other. Not a number anywhere is infinitely far away."""
    whole = float(np.sqrt(sum(sum_of_squares(r) for r in reference.values())))
    missing = set(reference)
    gaps: dict[str, float] = {}
    for name, own in gradient:
        missing.discard(name)
        gap = float(np.sqrt(sum_of_squares(own - reference[name])))
        gaps[name] = gap if np.isfinite(gap) else np.inf
    if missing:
        raise ValueError(f"{len(missing)} parameters have no gradient: {', '.join(sorted(missing)[:3])}")
    each = {
        name: gap / max(np.sqrt(sum_of_squares(reference[name])), NOISE_FLOOR * whole) for name, gap in gaps.items()
    }
    name = max(each, key=lambda n: each[n])
    return GradientDifference(float(np.sqrt(sum(g * g for g in gaps.values()))) / whole, float(each[name]), name)


def sum_of_squares(x: Floats) -> float:
    return float(np.square(x, dtype=np.float64).sum())


def with_zero_stage(settings: PolicyConfig, stage: int) -> PolicyConfig:
    """The policy's settings with another ZeRO stage, and what of offloading that stage has."""
    return replace(
        settings,
        zero_stage=stage,
        offload_optimizer=settings.offload_optimizer and stage > 0,
        offload_params=settings.offload_params and stage == 3,
    )


class GradientEngine(ZeroEngine):
    """Computes an update's gradient and leaves the weights alone."""

    def gradient(self, packs: list[Pack], loss_of: Any, lr: float) -> Gradient:
        self.minimize(packs, loss_of, lr)
        return self.found

    def guard(self, bad: Any) -> float:
        """Here, between the last backward pass and the step, the gradient is there."""
        norm = super().allow_or_skip_step(bad)
        self.found = dict(self.full_gradients())
        self.adam.allow_step(good=False)
        return norm

    def full_gradients(self) -> Iterator[tuple[str, Floats]]:
        """The gradient of each parameter, on rank 0; all ranks take part."""
        from deepspeed.utils import safe_get_full_grad

        first = self.deepspeed.comm.get_rank() == 0
        for name, parameter in self.engine.module.named_parameters():
            found = safe_get_full_grad(parameter)
            if first:
                yield name, found.float().cpu().numpy().copy()


class GradientRank:
    """One rank. Every method is called on all ranks at the same time."""

    def __init__(self, config: Config, rank: int, logs: str):
        setup_worker_process(f"gradient-of-{config.policy.ranks}-{rank}", logs)
        self.config, self.rank = config, rank
        import_deepspeed(config, config.policy.ranks)

    def where(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), free_port()

    def start(self, address: str, port: int) -> None:
        c = self.config
        join_process_group(c.cluster.device, self.rank, c.policy.ranks, address, port, c.run.seed)
        self.zero: GradientEngine | None = None

    def build(self, model: str, stage: int) -> None:
        """The model as this ZeRO stage has it. The one before is gone."""
        from workers.learner.model import load_packed
        from workers.learner.objective import Objective

        if self.zero:
            self.zero.engine.destroy()
            self.zero = None
            gc.collect()
        settings = with_zero_stage(self.config.policy, stage)
        packed = load_packed(replace(self.config, policy=settings), model)
        self.zero = GradientEngine(packed, settings, settings.lr)
        self.objective = Objective(self.config, self.zero.engine.device)

    def score(self, packs: list[Pack]) -> list[Floats]:
        assert self.zero
        return [logprobs.cpu().numpy() for logprobs, _ in self.zero.forward_all(packs)]

    def gradient(self, packs: list[Pack]) -> tuple[float, Gradient]:
        """This rank's share of the mini-batch's loss; and of rank 0, the whole gradient."""
        assert self.zero
        self.objective.start_minibatch(self.config.reference.kl_coef)
        found = self.zero.gradient(packs, self.objective, self.config.policy.lr)
        return self.objective.sums_over_tokens()["loss"], found

    def compare(self, packs: list[Pack], reference: Gradient) -> tuple[float, GradientDifference | None]:
        """This rank's share of the loss; and of rank 0, how far its gradient is from another."""
        loss, found = self.gradient(packs)
        return loss, compare_gradients(found.items(), reference) if self.rank == 0 else None
