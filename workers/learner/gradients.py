"""One mini-batch's gradient under any number of ranks, sequence parallelism, ZeRO stage and pack budget, compared with a reference.

For each number of ranks, the driver starts them once. They build their model again for each stage and sequence
parallelism, and compute the gradient with each budget. It is the gradient of the run's own update; only the optimizer
step is left out.
"""

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlsys.config.schema import Config, PolicyConfig
from rlsys.forward.heads import heads_divide
from rlsys.types import Floats, Pack
from workers.learner.ranks import LearnerRank
from workers.learner.zero import ZeroEngine

Gradient = dict[str, Floats]  # by parameter

# A parameter's difference is divided by its reference, or by this share of the whole gradient if that is larger: the
# reference may be zero but for rounding.
NOISE_FLOOR = 1e-3


@dataclass(frozen=True)
class GradientDifference:
    """`GradientDifference(total=3e-7, largest=2e-6, parameter="model.layers.0.mlp.up_proj.weight")`"""

    total: float  # |gradient - reference| / |reference|, all parameters as one vector
    largest: float  # the same for the parameter where it is largest
    parameter: str


def compare_gradients(gradient: Iterable[tuple[str, Floats]], reference: Gradient) -> GradientDifference:
    """Compares one tensor after the other. If a gradient has a NaN, the difference is infinite."""
    norm = float(np.sqrt(sum(sum_of_squares(tensor) for tensor in reference.values())))
    missing = set(reference)
    gaps: dict[str, float] = {}
    for name, tensor in gradient:
        missing.discard(name)
        gap = float(np.sqrt(sum_of_squares(tensor - reference[name])))
        gaps[name] = gap if np.isfinite(gap) else np.inf
    if missing:
        raise ValueError(f"{len(missing)} parameters have no gradient: {', '.join(sorted(missing)[:3])}")
    relative = {
        name: gap / max(np.sqrt(sum_of_squares(reference[name])), NOISE_FLOOR * norm) for name, gap in gaps.items()
    }
    largest = max(relative, key=lambda name: relative[name])
    total = float(np.sqrt(sum(gap * gap for gap in gaps.values()))) / norm
    return GradientDifference(total, float(relative[largest]), largest)


def sum_of_squares(x: Floats) -> float:
    return float(np.square(x, dtype=np.float64).sum())


def with_zero_stage(settings: PolicyConfig, stage: int) -> PolicyConfig:
    """Returns the policy's settings with another ZeRO stage, and with as much offloading as that stage supports."""
    least_stage = {"optimizer": 1, "params": 3}
    return replace(
        settings, zero_stage=stage, offload=[part for part in settings.offload if stage >= least_stage.get(part, 0)]
    )


class GradientEngine(ZeroEngine):
    """Computes an update's gradient and leaves the weights alone."""

    def gradient(self, packs: list[Pack], objective: Any, lr: float) -> Gradient:
        self.minimize(packs, objective, lr, objective.slopes)
        return self.full_gradient

    def allow_or_skip_step(self, bad: Any) -> float:
        """Copies the gradient, which exists only between the last backward pass and the step. Skips the step."""
        norm = super().allow_or_skip_step(bad)
        self.full_gradient = dict(self.full_gradients())
        self.adam.allow_step(False)
        return norm

    def full_gradients(self) -> Iterator[tuple[str, Floats]]:
        """Yields the gradient of each parameter on rank 0. All ranks take part."""
        from deepspeed.utils import safe_get_full_grad

        trained = ((n, p) for n, p in self.engine.module.named_parameters() if p.requires_grad)
        for name, parameter in trained:
            gradient = safe_get_full_grad(parameter)
            if self.rank == 0:
                yield name, gradient.float().cpu().numpy().copy()


class GradientRank(LearnerRank):
    """One rank. Each method is called on all ranks at the same time, because it holds a collective."""

    def __init__(self, config: Config, rank: int, logs: str):
        ranks = config.policy.ranks
        super().__init__(config, rank, logs, role=f"gradient-of-{ranks}", ranks=ranks)

    def start(self, address: str, port: int) -> None:
        self.join(address, port)
        self.zero: GradientEngine | None = None

    def build(self, model: str, stage: int, sharing: int = 1) -> None:
        """Builds the model for this ZeRO stage and `policy.sequence_parallel`, in place of the one before."""
        from workers.learner.files.loading import load_policy
        from workers.learner.objective import Objective
        from workers.learner.proofs.at_start import prove_loaded

        if self.zero:
            self.zero.engine.destroy()
            self.zero = None
            gc.collect()
        settings = replace(with_zero_stage(self.config.policy, stage), sequence_parallel=sharing)
        config = replace(self.config, policy=settings)
        packed = load_policy(config, model)
        prove_loaded(packed, config)
        self.zero = GradientEngine(packed, settings, settings.lr)
        self.objective = Objective(self.config, self.zero.engine.device)

    def can_share(self, ranks: int) -> bool:
        """Returns whether this number of ranks can share packs of this model."""
        assert self.zero
        decoder = self.zero.engine.module.decoder
        heads = decoder.config.num_attention_heads
        return not decoder.packs.mixers and heads_divide(heads, decoder.config.num_key_value_heads or heads, ranks)

    def score(self, packs: list[Pack]) -> list[Floats]:
        assert self.zero
        return [logprobs.cpu().numpy() for logprobs, _ in self.zero.forward_all(packs)]

    def gradient(self, packs: list[Pack]) -> tuple[float, Gradient]:
        """Returns this rank's share of the mini-batch's loss, and on rank 0 the whole gradient."""
        assert self.zero
        self.objective.start_minibatch(self.config.reference.kl_coef)
        gradient = self.zero.gradient(packs, self.objective, self.config.policy.lr)
        return self.objective.sums_over_tokens()["loss"], gradient

    def compare(self, packs: list[Pack], reference: Gradient) -> tuple[float, GradientDifference | None]:
        """Returns this rank's share of the loss, and on rank 0 how far its gradient is from the reference."""
        loss, gradient = self.gradient(packs)
        return loss, compare_gradients(gradient.items(), reference) if self.rank == 0 else None
