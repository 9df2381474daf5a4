"""Do the engines and the policy compute the same log-probs? Measured on a few samples of real prompts.

The samples are the run's own kind, but have seeds of their own and move no cursor: the run's samples are what they were.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlsys.config.schema import Config
from rlsys.interfaces import Rollout, Scorer
from rlsys.packs.packing import pack, unpack
from rlsys.seeds import derive_seed
from rlsys.types import Batch, Floats, Prompt, Request

PROMPT_COUNT = 8  # enough to see a difference of any kind; few enough that no start is slower for it
MAX_COMPLETION_TOKENS = 256  # tokens of a completion, at most: the start of a run does not wait for a whole rollout

# Mean |rollout - policy| that is still agreement. Where both compute in float32 it has been 1e-7 to 1e-5 from kernel to kernel,
# and any real cause is far above 1e-3. Two bfloat16 forward passes with other kernels have differed by 0.04.
LIMIT_BY_DTYPE = {"float32": 1e-3, "bfloat16": 0.1}
LAGGED_LIMIT = (
    0.5  # samples of older weights differ by what was learned since; beyond this they are hardly from this policy
)


class Disagreement(RuntimeError):
    """Engines and policy give other log-probs to the same tokens: what would be learned is not what was sampled."""


@dataclass(frozen=True)
class Agreement:
    """What was found. `str(found)`: rollout and policy agree: mean 2e-07, largest 1.5e-05 over 61 tokens"""

    batch: Batch  # one sample of each prompt; its rewards mean nothing
    policy: Floats  # [T] the policy's log-probs of the samples' tokens, end to end
    limit: float

    @cached_property
    def rollout(self) -> Floats:
        """The engines' log-probs.  [T]"""
        return np.concatenate([s.logprobs for s in self.batch.samples])

    def gap(self, policy: Floats) -> tuple[float, float]:
        """Mean and largest |rollout - policy|, were these the policy's log-probs.  [T]"""
        gaps = np.abs(self.rollout.astype(np.float64) - policy)
        return float(gaps.mean()), float(gaps.max())

    @cached_property
    def mean(self) -> float:
        return self.gap(self.policy)[0]

    @cached_property
    def largest(self) -> float:
        return self.gap(self.policy)[1]

    @property
    def tokens(self) -> int:
        return len(self.policy)

    @property
    def within_limit(self) -> bool:
        return self.mean <= self.limit  # and nan is not

    def event_fields(self) -> dict[str, float]:
        """For events.jsonl."""
        return {"mean": self.mean, "largest": self.largest, "tokens": self.tokens, "limit": self.limit}

    def __str__(self) -> str:
        found = f"mean {self.mean:.2g}, largest {self.largest:.2g} over {self.tokens} tokens"
        return f"rollout and policy {'agree' if self.within_limit else 'disagree'}: {found}" + (
            "" if self.within_limit else f"; the mean may be {self.limit:g}"
        )


def measure_agreement(rollout: Rollout, policy: Scorer, prompts: list[Prompt], config: Config) -> Agreement:
    """One sample of each prompt, scored by the policy. Engines and policy must have the same version of the weights."""
    rollout.wake()
    r = config.rollout
    requests = [
        Request(
            p.uid,
            0,
            p.tokens,
            derive_seed(config.run.seed, "agreement", p.uid),
            r.temperature,
            min(r.max_new_tokens, MAX_COMPLETION_TOKENS),
        )
        for p in prompts
    ]
    place = {p.uid: i for i, p in enumerate(prompts)}
    samples = sorted((s for some in rollout.generate(requests) for s in some), key=lambda s: place[s.uid])
    batch = Batch(
        prompts,
        samples,
        np.array([place[s.uid] for s in samples], dtype=np.int64),
        np.zeros(len(samples), dtype=np.float32),
        [{} for _ in samples],
    )
    packs = pack(batch, range(len(samples)), ranks=policy.ranks, tokens_per_pack=config.policy.tokens_per_pack)
    return Agreement(batch, unpack(packs, policy.score(packs), len(samples)), mismatch_limit(config))


def mismatch_limit(config: Config) -> float:
    """The mean |rollout - policy| that engines and policy of the same weights may have."""
    if config.trainer.max_mismatch is not None:
        return config.trainer.max_mismatch
    return LIMIT_BY_DTYPE["bfloat16" if "bfloat16" in (config.rollout.dtype, config.policy.dtype) else "float32"]


def step_mismatch_limit(config: Config) -> float:
    """The `mismatch/mean_abs` that a step may have: with pipeline.max_lag its samples come from older weights."""
    if config.trainer.max_mismatch is not None:
        return config.trainer.max_mismatch
    return max(mismatch_limit(config), LAGGED_LIMIT) if config.pipeline.max_lag else mismatch_limit(config)
