"""Measures whether the engines and the policy compute the same log-probs, on a few samples of real prompts.

The samples have seeds of their own and do not advance the data cursor, so the run's own samples stay the same.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlsys.batching.packing import pack, unpack
from rlsys.config.derived import scores_old, updates_of_step
from rlsys.config.schema import Config
from rlsys.episodes.figures import describe_unknown
from rlsys.errors import ConfigError
from rlsys.interfaces import Rollout, Scorer
from rlsys.seeds import derive_seed
from rlsys.types import Batch, Floats, Prompt, Request, Sample

PROMPT_COUNT = 8  # enough to see any kind of difference, few enough not to delay the start
MAX_COMPLETION_TOKENS = 256  # the start does not wait for a whole rollout

# The largest mean |rollout - policy| that counts as agreement. In float32, different kernels have differed by 1e-7 to
# 1e-5, and every real cause by far more than 1e-3. Two bfloat16 passes with different kernels have differed by 0.04.
LIMIT_BY_DTYPE = {"float32": 1e-3, "bfloat16": 0.1}
LAGGED_LIMIT = 0.5  # samples from older weights differ by what was learned since; a larger gap has another cause


@dataclass(frozen=True)
class Agreement:
    """A measurement. `str(agreement)`: rollout and policy agree: mean 2e-07, largest 1.5e-05 over 61 tokens"""

    batch: Batch  # one sample per prompt; its rewards have no meaning
    policy: Floats  # [T] the policy's log-probs of the samples' tokens, end to end
    limit: float

    @cached_property
    def rollout(self) -> Floats:
        """The engines' log-probs.  [T]"""
        return np.concatenate([s.logprobs for s in self.batch.samples])

    def gap(self, policy: Floats) -> tuple[float, float]:
        """The mean and the largest |rollout - policy| for the given log-probs.  [T]"""
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
    def remark(self) -> str:
        """What else is to be said of the samples."""
        return describe_unknown(self.batch.samples)

    @property
    def within_limit(self) -> bool:
        return self.mean <= self.limit  # false for NaN

    def event_fields(self) -> dict[str, float]:
        """The fields of its line in events.jsonl."""
        return {"mean": self.mean, "largest": self.largest, "tokens": self.tokens, "limit": self.limit}

    def __str__(self) -> str:
        gap = f"mean {self.mean:.2g}, largest {self.largest:.2g} over {self.tokens} tokens"
        if self.within_limit:
            return f"rollout and policy agree: {gap}"
        return f"rollout and policy disagree: {gap}; the mean may be {self.limit:g}"


def measure_agreement(rollout: Rollout, policy: Scorer, prompts: list[Prompt], config: Config) -> Agreement:
    """Draws one sample per prompt and scores it with the policy. Both must have the same version of the weights."""
    rollout.wake()
    requests = [agreement_request(config, prompt) for prompt in prompts]
    index = {p.uid: i for i, p in enumerate(prompts)}
    samples = sorted((s for group in rollout.generate(requests) for s in group), key=lambda s: index[s.uid])
    if not any(len(s.tokens) for s in samples):
        raise ConfigError(explain_no_turns(samples))
    batch = Batch(
        prompts,
        samples,
        np.array([index[s.uid] for s in samples], dtype=np.int64),
        np.zeros(len(samples), dtype=np.float32),
        [{} for _ in samples],
    )
    packs = pack(batch, range(len(samples)), ranks=policy.ranks, tokens_per_pack=config.policy.tokens_per_pack)
    return Agreement(batch, unpack(packs, policy.score(packs), len(samples)), mismatch_limit(config))


def explain_no_turns(samples: list[Sample]) -> str:
    reasons = [
        s.episode.verdict.detail.partition("\n")[0] if s.episode and s.episode.verdict else f"it reached its {s.finish}"
        for s in samples
    ]
    [(reason, count)] = Counter(reasons).most_common(1)
    return (
        f"None of the first {len(samples)} episodes had a turn. {count} of them: {reason.rstrip('.')}. Look at the function that "
        "plays them, and at the limits in `episode`, such as episode.window."
    )


def agreement_request(config: Config, prompt: Prompt) -> Request:
    seed = derive_seed(config.run.seed, "agreement", prompt.uid)
    new_tokens = min(config.rollout.max_new_tokens, MAX_COMPLETION_TOKENS)
    row = prompt if prompt.play else None
    return Request(prompt.uid, 0, prompt.tokens, seed, config.rollout.temperature, new_tokens, prompt=row)


def mismatch_limit(config: Config) -> float:
    """The largest allowed mean |rollout - policy| while engines and policy have the same weights."""
    if config.trainer.max_mismatch is not None:
        return config.trainer.max_mismatch
    return LIMIT_BY_DTYPE["bfloat16" if "bfloat16" in (config.rollout.dtype, config.policy.dtype) else "float32"]


def step_mismatch_limit(config: Config) -> float:
    """The largest allowed `mismatch/mean_abs` of a step.

    With pipeline.max_lag its samples come from older weights. Without old log-probs, its later updates compare samples
    with a policy that the earlier ones have changed.
    """
    if config.trainer.max_mismatch is not None:
        return config.trainer.max_mismatch
    moved = updates_of_step(config) > 1 and not scores_old(config)
    lagged = config.pipeline.max_lag > 0 or moved
    return max(mismatch_limit(config), LAGGED_LIMIT) if lagged else mismatch_limit(config)
