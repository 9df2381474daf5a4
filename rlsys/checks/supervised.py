"""Checks supervised training, algorithm.loss nll: what is for sampled completions alone has no place in it."""

from collections.abc import Iterator

from rlsys.config.derived import is_supervised
from rlsys.config.schema import Config
from rlsys.episodes.settings import play_of

LEARNS = "algorithm.loss nll learns the answers of the data"


def check_supervised(c: Config) -> Iterator[str]:
    if not is_supervised(c):
        return
    a, t, p = c.algorithm, c.trainer, c.pipeline
    if t.samples_per_prompt != 1:
        yield f"trainer.samples_per_prompt is {t.samples_per_prompt}; {LEARNS}, of which a row has one. Use 1."
    if c.rollout.temperature != 1:
        yield (
            f"rollout.temperature is {c.rollout.temperature:g}, by which the trainer divides logits; {LEARNS} as they are. Use 1, "
            "and eval.temperature for evaluations."
        )
    for option, given, way_out in (
        ("algorithm.advantage gae", a.advantage == "gae", "leave it out"),
        ("algorithm.credit turn", a.credit == "turn", "use episode"),
        ("algorithm.anchor rollout", a.anchor == "rollout", "use old"),
        ("algorithm.control_tokens", a.control_tokens, "leave it out"),
        ("algorithm.normalize decoupled", a.normalize == "decoupled", "use token_mean"),
        ("correction.method", c.correction.method not in ("auto", "none"), "use auto"),
        ("entropy.control", c.entropy.control != "none", "use none"),
        ("reference.kl_in reward", c.reference.kl_coef and c.reference.kl_in == "reward", "use loss"),
        ("reward.shuffle", c.reward.shuffle, "use false"),
        ("reward.per_token", c.reward.per_token, "use false"),
        ("overlong.mask", c.overlong.mask, "use false"),
        ("overlong.buffer", c.overlong.buffer, "use 0"),
        ("dynamic_sampling.enabled", c.dynamic_sampling.enabled, "use false"),
        ("rollout.oversample", c.rollout.oversample, "use 0"),
        ("rollout.min_new_tokens", c.rollout.min_new_tokens, "use 0"),
        ("pipeline.max_lag", p.max_lag, "use 0"),
        ("data.continue_final_message", c.data.continue_final_message, "use false"),
        ("episodes", any(play_of(c, source) for source in c.data.train.values()), "give rows with messages instead"),
    ):
        if given:
            yield f"{LEARNS}, and {option} is for completions that were sampled: {way_out}."
