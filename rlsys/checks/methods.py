"""Checks the method: algorithm, correction, entropy, reference and critic."""

import math
from collections.abc import Iterator, Mapping, Sequence

from rlsys.config.derived import SEQUENCE_LOSSES, correction_method, kl_estimator, token_weighting, updates_of_step
from rlsys.config.methods import ADVANTAGES, CORRECTIONS, GROUP_RELATIVE, LOSSES, AlgorithmConfig
from rlsys.config.plugins import user_function_problems
from rlsys.config.schema import Config

CORRECTION_BOUNDS = {"icepop": (0.5, 5.0)}  # default low and high of a correction that has both, as in its function


def check_algorithm(c: Config) -> Iterator[str]:
    a = c.algorithm
    yield from unused_options(a, "algorithm.advantage", a.advantage, ADVANTAGES)
    yield from unused_options(a, "algorithm.loss", a.loss, LOSSES)
    yield from unused_weights(c)
    yield from check_sequence_loss(c)
    if a.anchor == "rollout" and a.loss == "reinforce":
        yield (
            "algorithm.loss reinforce has no ratio, so algorithm.anchor rollout would change nothing. Use "
            "algorithm.anchor old, or a loss with a ratio such as ppo_clip."
        )
    if a.loss == "reinforce" and updates_of_step(c) > 1:
        yield (
            f"algorithm.loss reinforce has no ratio, and a step makes {updates_of_step(c)} updates: the later ones would "
            "train on samples of another policy as if they were their own. Use trainer.updates_per_step 1 and "
            "epochs_per_step 1, or a loss with a ratio such as ppo_clip."
        )
    if a.loss == "reinforce" and c.pipeline.max_lag and correction_method(c) == "none":
        yield (
            f"algorithm.loss reinforce has no ratio, and with pipeline.max_lag {c.pipeline.max_lag} samples are of older "
            "weights. Use correction.method auto, pipeline.max_lag 0, or a loss with a ratio such as ppo_clip."
        )
    if a.loss == "advantage_clip" and a.advantage in set(ADVANTAGES) - set(GROUP_RELATIVE):
        yield (
            "algorithm.loss advantage_clip widens its bounds by how far a completion is from its group, which "
            f"algorithm.advantage {a.advantage} does not say. Use an advantage that compares samples of one prompt, such "
            "as grpo, or loss ppo_clip."
        )
    yield from user_function_problems("algorithm.advantage", a.advantage)
    yield from user_function_problems("algorithm.loss", a.loss)
    if a.dual_clip and 0 < a.dual_clip <= 1:
        yield f"algorithm.dual_clip is {a.dual_clip:g}; it must be greater than 1, 0 for no bound, or null for 10."
    yield from check_control_tokens(c)
    if token_weighting(c) == "decoupled" and not a.control_weight and (c.reference.kl_coef or c.entropy.coef):
        yield (
            "algorithm.control_weight is 0: a completion of one token would weigh nothing and be left out, also of the KL "
            "to the reference and of the entropy bonus. Use a small weight, such as 1e-6."
        )
    if a.loss == "dcpo" and a.max_ratio and a.max_ratio <= 1:
        yield f"algorithm.max_ratio is {a.max_ratio:g}; with algorithm.loss dcpo it must be greater than 1, or null for 10."
    if a.loss == "dppo_tv" and a.max_ratio and a.max_ratio < 1:
        yield (
            f"algorithm.max_ratio is {a.max_ratio:g}, and unchanged tokens have the ratio 1: algorithm.loss dppo_tv would "
            "truncate them too. Use 1 or more, or null for 20."
        )
    kl_in_reward = c.reference.kl_in == "reward" and c.reference.kl_coef
    if a.advantage == "max_rl" and (c.overlong.buffer or kl_in_reward):
        yield (
            "algorithm.advantage max_rl takes rewards of 0 or more; overlong.buffer and reference.kl_in reward take "
            "something off. Use overlong.buffer 0 and reference.kl_in loss."
        )
    if c.reward.per_token and a.advantage in ("gae", "remax"):
        yield (
            f"reward.per_token is for rewards that are compared with each other, and algorithm.advantage {a.advantage} "
            "compares none. Use reward.per_token false, or another advantage such as grpo."
        )
    if a.credit == "turn" and (a.advantage in ("gae", "gdpo", "max_rl", "remax") or c.reward.per_token):
        other = "reward.per_token" if c.reward.per_token else f"algorithm.advantage {a.advantage}"
        yield f"algorithm.credit turn compares turns with each other, which {other} does not. Use credit episode, or advantage grpo."
    if a.advantage == "gdpo" and kl_in_reward:
        yield (
            "algorithm.advantage gdpo brings each part of the reward to one deviation, so reference.kl_coef "
            f"({c.reference.kl_coef:g}) would say nothing of KL in the reward. Use reference.kl_in loss."
        )


def check_control_tokens(c: Config) -> Iterator[str]:
    tokens, advantage = c.algorithm.control_tokens, c.algorithm.advantage
    if tokens and advantage in ("gdpo", "max_rl", "remax"):
        why = {
            "gdpo": "compares parts of the reward",
            "max_rl": "takes no negative reward",
            "remax": "compares with the plain score of a greedy completion",
        }[advantage]
        yield (
            f"algorithm.control_tokens makes one reward of score and mode, -1 for a wrong answer, and algorithm.advantage "
            f"{advantage} {why}. Use another advantage such as dr_grpo, or no control_tokens."
        )
    if tokens and not 0 <= (c.reward.failure_score or 0) <= 1:
        yield (
            f"algorithm.control_tokens takes scores from 0 (wrong) to 1 (right); reward.on_failure is "
            f"`{c.reward.on_failure}`. Use drop, or score: 0."
        )
    if tokens and c.reward.per_token:
        yield (
            "algorithm.control_tokens gives wrong answers -1, and reward.per_token would divide that too: long wrong answers "
            "would be better than short ones. Use reward.per_token false."
        )
    if tokens and c.algorithm.credit == "turn":
        yield (
            "algorithm.control_tokens rewards the mode of a whole completion, and algorithm.credit turn takes the scores "
            "of earlier turns from that. Use credit episode, or no control_tokens."
        )
    for text, reward in tokens.items():
        if not text or not -1 < reward < math.inf:
            yield (
                f"algorithm.control_tokens has `{text}`: {reward:g}; give the text of a token, and the reward of a right "
                "answer after it, which is more than the -1 of a wrong one."
            )


def unused_options(section: object, key: str, method: str, table: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Finds options of other methods of `table`. They would silently have no effect."""
    if method not in table:
        return  # a user's function may ask for any option
    prefix = key.partition(".")[0]
    for option in sorted({option for options in table.values() for option in options} - set(table[method])):
        value = getattr(section, option)
        if value is not None:
            used = ", ".join(f"{prefix}.{name}" for name in table[method]) or "no options"
            yield f"{prefix}.{option} is {value}, but {key} {method} does not use it; it has {used}."


def unused_weights(c: Config) -> Iterator[str]:
    """Finds options of one way to weight tokens that are given with another."""
    if ":" in c.algorithm.advantage + c.algorithm.loss:
        return  # a user's function may ask for any option
    for normalize, option in (("constant", "constant"), ("decoupled", "control_weight")):
        value, default = getattr(c.algorithm, option), getattr(AlgorithmConfig(), option)
        if value != default and token_weighting(c) != normalize:
            yield (
                f"algorithm.{option} is {value}, but algorithm.normalize {token_weighting(c)} does not use it. "
                f"Use algorithm.normalize={normalize}, or go back to algorithm.{option}={default}."
            )


def check_sequence_loss(c: Config) -> Iterator[str]:
    """Refuses weights by which a loss with one number per sequence would weigh it by its length, or its tokens unlike each other."""
    loss, weighting = c.algorithm.loss, token_weighting(c)
    if loss in SEQUENCE_LOSSES and weighting != "sequence_mean":
        yield (
            f"algorithm.normalize {weighting} would change algorithm.loss {loss}, which has one value per sequence: "
            "long completions, or first tokens, would count differently. Use algorithm.normalize auto, which is "
            "sequence_mean, or a loss per token such as ppo_clip."
        )
    for option, given, other in (
        ("algorithm.advantage gae", c.algorithm.advantage == "gae", "another advantage"),
        ("algorithm.credit turn", c.algorithm.credit == "turn", "credit episode"),
        ("entropy.control clip_cov", c.entropy.control == "clip_cov", "kl_cov"),
    ):
        if loss == "gmpo" and given:
            yield (
                f"{option} tells tokens of a completion apart, and algorithm.loss gmpo multiplies their ratios into one "
                f"number. Use {other}, or a loss per token such as ppo_clip."
            )


def check_correction(c: Config) -> Iterator[str]:
    method = correction_method(c)
    if c.algorithm.anchor == "rollout" and method != "none":
        yield (
            f"algorithm.anchor rollout takes the ratio to the engines' log-probs, and correction.method {method} would "
            "correct the same difference again. Use correction.method none, or algorithm.anchor old."
        )
    yield from unused_options(c.correction, "correction.method", method, CORRECTIONS | {"none": ()})
    if method in CORRECTION_BOUNDS:
        default_low, default_high = CORRECTION_BOUNDS[method]
        low = default_low if c.correction.low is None else c.correction.low
        high = default_high if c.correction.high is None else c.correction.high
        if low > high:
            yield (
                f"correction.low ({low:g}) is above correction.high ({high:g}); every token would weigh 0. "
                f"Null, for both, is {default_low:g} and {default_high:g}."
            )
            return
    for option, bound, wrong, way_out in (
        ("low", c.correction.low, (c.correction.low or 0) > 1, "at most 1"),
        ("high", c.correction.high, c.correction.high is not None and c.correction.high < 1, "1 or more"),
    ):
        if wrong and option in CORRECTIONS.get(method, ()):
            yield (
                f"correction.{option} is {bound:g}, and tokens on which policy and engines agree have the ratio 1: "
                f"correction.method {method} would change them too. Use {way_out}, or null."
            )


def check_entropy(c: Config) -> Iterator[str]:
    e, t = c.entropy, c.trainer
    if e.control != "none" and e.share == 0:
        yield f"entropy.share is 0: entropy.control {e.control} would take no token. Use null, or entropy.control none."
    if e.control == "kl_cov" and t.updates_per_step * t.epochs_per_step == 1:
        yield (
            "entropy.control kl_cov has no gradient in a step's first update, and with trainer.updates_per_step 1 and "
            "epochs_per_step 1 there is no other. Use 2 updates, or clip_cov."
        )


def check_reference(c: Config) -> Iterator[str]:
    for option in ("path", "refresh_every"):
        if (value := getattr(c.reference, option)) and not c.reference.kl_coef > 0:
            yield (
                f"reference.{option} is {value}, but kl_coef is 0: there is no reference. "
                "Set reference.kl_coef, such as 0.01, or leave it out."
            )
    if c.reference.path and c.reference.refresh_every:
        yield (
            f"reference.path ({c.reference.path}) is a model that stays, and reference.refresh_every "
            f"({c.reference.refresh_every}) takes the policy's weights. Use one of them."
        )
    if c.reference.kl_target and not c.reference.kl_coef > 0:
        yield (
            f"reference.kl_target is {c.reference.kl_target:g}, but kl_coef is 0 and stays 0. "
            "Start from a coefficient such as 0.01."
        )
    if c.reference.kl_coef and c.reference.kl_in == "loss" and kl_estimator(c) == "k1":
        yield (
            "algorithm.kl k1 in the loss holds nothing: its gradient is 0 on average. Use algorithm.kl k3, k2 or "
            "k3_unbiased, or reference.kl_in reward."
        )


def check_critic(c: Config) -> Iterator[str]:
    if c.algorithm.advantage != "gae":
        return
    if c.critic.alone_steps and c.critic.alone_steps >= c.trainer.steps:
        yield (
            f"critic.alone_steps ({c.critic.alone_steps}) is not less than trainer.steps ({c.trainer.steps}): "
            "the policy would never learn. Use fewer, or train longer."
        )
