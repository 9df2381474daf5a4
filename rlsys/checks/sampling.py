"""Checks how samples are made: rollout and pipeline."""

from collections.abc import Iterator

from rlsys.config.derived import max_new_tokens, runs_eagerly
from rlsys.config.schema import MIN_TEMPERATURE, Config


def check_rollout(c: Config) -> Iterator[str]:
    r = c.rollout
    if 0 < r.temperature < MIN_TEMPERATURE:
        yield (
            f"rollout.temperature is {r.temperature:g}; vLLM would take {MIN_TEMPERATURE:g} in its place, and the "
            f"trainer would not. Use {MIN_TEMPERATURE:g} or more."
        )
    if r.min_new_tokens > r.max_new_tokens:
        yield f"rollout.min_new_tokens ({r.min_new_tokens}) is more than rollout.max_new_tokens ({r.max_new_tokens})."
    else:
        for key, sources in (("data.train", c.data.train), ("eval.datasets", c.eval.datasets)):
            for name, source in sources.items():
                if r.min_new_tokens > (limit := max_new_tokens(c, source)):
                    yield (
                        f"rollout.min_new_tokens ({r.min_new_tokens}) is more than the {limit} tokens of {key}.{name}: no "
                        "completion could end. Use fewer, or more max_new_tokens."
                    )
    if "" in r.stop:
        yield "rollout.stop has an empty text, at which every completion would end. Leave it out."
    if any(i < 0 for i in r.stop_token_ids):
        yield f"rollout.stop_token_ids has {min(r.stop_token_ids)}; ids of tokens are numbers of 0 or more."
    if not 0 < r.gpu_memory < 1:
        yield f"rollout.gpu_memory is {r.gpu_memory}; it is a share between 0 and 1."
    if c.cluster.device == "cpu" and r.tensor_parallel != 1 and not runs_eagerly(c):
        yield (
            f"rollout.tensor_parallel is {r.tensor_parallel}, and an engine of several processes on CPU computes "
            "layer by layer. Use rollout.enforce_eager true, or more engines."
        )
    yield from check_exact(c)
    yield from check_oversample(c)


def check_exact(c: Config) -> Iterator[str]:
    r, p = c.rollout, c.policy
    if not r.exact:
        return
    if c.cluster.device != "cpu" or not r.dtype == p.dtype == "float32" or not r.threads == p.threads == 1:
        yield (
            "rollout.exact needs cluster.device cpu, float32 as rollout.dtype and policy.dtype, and 1 as "
            "rollout.threads and policy.threads. Use those, or rollout.exact false."
        )
    if p.compile:
        yield (
            "rollout.exact needs the policy to compute as the engines do, and compiled layers round differently. "
            "Use policy.compile false, or rollout.exact false."
        )
    if not runs_eagerly(c):
        yield (
            "rollout.exact needs the engines to compute as the policy does, and compiled layers round differently. "
            "Use rollout.enforce_eager true, or rollout.exact false."
        )
    if c.cluster.device == "cpu" and r.tensor_parallel != 1:
        yield (
            f"rollout.tensor_parallel is {r.tensor_parallel}, and an engine of several processes on CPU rounds as vLLM "
            "does, not as rollout.exact does. Use one of them."
        )


def check_oversample(c: Config) -> Iterator[str]:
    extra = c.rollout.oversample
    if not extra <= 1:
        yield f"rollout.oversample is {extra:g}; it is a share of trainer.prompts_per_step, at most 1. Try 0.25."
    if extra > 0 and c.pipeline.max_lag < 1:
        yield (
            f"rollout.oversample ({extra:g}) continues half-written samples in the next step, which pipeline.max_lag 0 "
            "forbids. Use max_lag 1 or more."
        )
    if extra and c.dynamic_sampling.enabled:
        yield (
            f"rollout.oversample ({extra:g}) takes the groups that are finished first, dynamic_sampling.enabled those "
            "that differ, in the order of the data. Use one of them."
        )


def check_pipeline(c: Config) -> Iterator[str]:
    if c.pipeline.in_flight and updates_while_sampling(c) < 1:
        taken = ", one of which rollout.oversample takes," if c.rollout.oversample else ""
        yield (
            "pipeline.in_flight has engines sample while training goes on; "
            f"pipeline.max_lag {c.pipeline.max_lag}{taken} leaves no update for that. "
            f"Use max_lag {1 + bool(c.rollout.oversample)} or more."
        )


def updates_while_sampling(c: Config) -> int:
    """Updates that may pass while a batch is sampled or waits. Over-sampling takes one of `max_lag` for itself."""
    return c.pipeline.max_lag - bool(c.rollout.oversample)
