"""Finds choices that are allowed and probably not meant. Each is a sentence at the start of a run."""

from collections.abc import Iterator

from rlsys.config.derived import MEAN_OF_SEQUENCES, token_weighting, updates_of_step
from rlsys.config.schema import Config


def find_notes(c: Config) -> Iterator[str]:
    a, weighting = c.algorithm, token_weighting(c)
    if a.loss in MEAN_OF_SEQUENCES and weighting != "sequence_mean":
        yield f"algorithm.normalize {weighting}: {a.loss} was published with sequence_mean, which auto is."
    if a.advantage == "dr_grpo" and weighting != "constant":
        yield f"algorithm.normalize {weighting}: with advantage dr_grpo, Dr. GRPO's paper has constant."
    if weighting == "decoupled" and not a.control_tokens:
        yield (
            "algorithm.normalize decoupled without control_tokens: every completion's first token is a control token, "
            f"of weight {a.control_weight:g}."
        )
    if c.reference.kl_coef and c.reference.kl_in == "reward" and a.kl not in ("auto", "k1"):
        yield f"algorithm.kl {a.kl} in the reward: its gradient is biased and nearly 0 close to the reference; k1's is exact."
    if a.std == "none" and a.eps is not None:
        yield f"algorithm.eps {a.eps:g}: without effect, because algorithm.std none divides by no deviation."
    if c.reward.per_token:
        yield "reward.per_token: a negative reward is divided too, so of wrong answers the long ones lose less."
    updates = c.trainer.steps * updates_of_step(c)
    if c.policy.warmup_updates > updates:
        yield f"policy.warmup_updates {c.policy.warmup_updates}: the run has {updates} updates, so the rate never reaches policy.lr."
