"""Checks a training step: trainer, policy, overlong and dynamic_sampling."""

from collections.abc import Iterator

from rlsys.config.derived import is_supervised
from rlsys.config.methods import ADVANTAGES, GROUP_RELATIVE
from rlsys.config.schema import Config
from rlsys.episodes.settings import play_of

OFFLOADABLE = ("optimizer", "params", "activations")


def check_trainer(c: Config) -> Iterator[str]:
    t = c.trainer
    if t.updates_per_step > 0 and t.prompts_per_step > 0 and t.prompts_per_step % t.updates_per_step:
        divisors = [n for n in range(1, t.prompts_per_step + 1) if t.prompts_per_step % n == 0]
        nearest = min(divisors, key=lambda n: (abs(n - t.updates_per_step), n))
        yield (
            f"trainer.prompts_per_step ({t.prompts_per_step}) cannot be split into trainer.updates_per_step "
            f"({t.updates_per_step}) mini-batches of whole groups. Use updates_per_step {nearest}, "
            f"or prompts_per_step {-(-t.prompts_per_step // t.updates_per_step) * t.updates_per_step}."
        )
    if c.algorithm.advantage in GROUP_RELATIVE and t.samples_per_prompt < 2 and not is_supervised(c):
        yield (
            f"trainer.samples_per_prompt is {t.samples_per_prompt}; {c.algorithm.advantage} compares samples of one "
            "prompt and needs at least 2. With 1, algorithm.advantage may be reinforce_pp, remax, raw or gae."
        )


def check_dynamic_sampling(c: Config) -> Iterator[str]:
    if not c.dynamic_sampling.enabled:
        return
    if c.algorithm.advantage in set(ADVANTAGES) - set(GROUP_RELATIVE):
        yield (
            "dynamic_sampling.enabled drops groups of equal rewards, and with algorithm.advantage "
            f"{c.algorithm.advantage} they teach too. Use dynamic_sampling.enabled false, or an advantage that compares "
            "samples of one prompt, such as rloo."
        )
    elif c.trainer.samples_per_prompt < 2:
        yield (
            "dynamic_sampling drops groups of equal rewards; with trainer.samples_per_prompt "
            f"{c.trainer.samples_per_prompt} that is every group."
        )
    a = c.algorithm
    kl_in_reward = c.reference.kl_coef > 0 and c.reference.kl_in == "reward"
    over_tokens = a.advantage == "reinforce_pp_baseline" and a.whiten_over != "samples"
    for option, given, reason, way_out in (
        ("algorithm.control_tokens", a.control_tokens, "by their modes", ""),
        ("algorithm.credit turn", a.credit == "turn", "by their turns", ""),
        ("reward.per_token", c.reward.per_token, "by their lengths", ""),
        ("reference.kl_in reward", kl_in_reward, "by their KL", ", or kl_in loss"),
        ("algorithm.advantage reinforce_pp_baseline", over_tokens, "by a mean over tokens", ", or whiten_over samples"),
    ):
        if given:
            yield (
                f"dynamic_sampling.enabled drops groups of equal rewards, and with {option} they teach too, {reason}. "
                f"Use dynamic_sampling.enabled false{way_out}."
            )


def check_overlong(c: Config) -> Iterator[str]:
    if c.overlong.buffer > c.rollout.max_new_tokens:
        yield (
            f"overlong.buffer ({c.overlong.buffer}) is longer than a completion can be, "
            f"rollout.max_new_tokens ({c.rollout.max_new_tokens}). Use a shorter buffer: DAPO's is a fifth of it."
        )
    if c.overlong.buffer and c.episode.max_turns > 1 and any(play_of(c, s) for s in c.data.train.values()):
        yield (
            f"overlong.buffer ({c.overlong.buffer}) counts tokens up to rollout.max_new_tokens, which limits one turn of an "
            f"episode, not its {c.episode.max_turns} turns together. Use overlong.buffer 0, or episode.max_turns 1."
        )


def check_schedule(c: Config) -> Iterator[str]:
    schedule, last = c.policy.lr_schedule, c.policy.lr_schedule_steps
    if last is None:
        return
    if schedule == "constant":
        yield (
            f"policy.lr_schedule_steps is {last}, but policy.lr_schedule constant has no end. "
            "Use linear or cosine, or policy.lr_schedule_steps=null."
        )
    elif last < c.trainer.steps:
        yield (
            f"policy.lr_schedule_steps ({last}) is less than trainer.steps ({c.trainer.steps}): the steps after it would "
            f"train with a learning rate of 0. Use {c.trainer.steps} or more, or null."
        )


def check_sequence_parallel(c: Config) -> Iterator[str]:
    """Requires that every rank is in a group of ranks that share packs."""
    sharing = c.policy.sequence_parallel
    ranks = {"policy": c.policy.ranks} | ({"critic": c.critic.ranks} if c.algorithm.advantage == "gae" else {})
    for role, count in ranks.items():
        if sharing > 0 and count > 0 and count % sharing:
            divisors = [str(n) for n in range(1, count + 1) if count % n == 0]
            yield (
                f"policy.sequence_parallel ({sharing}) ranks share each pack, and {role}.ranks is {count}. Use {role}.ranks "
                f"{-(-count // sharing) * sharing}, or a policy.sequence_parallel of {', '.join(divisors)}."
            )


def check_policy(c: Config) -> Iterator[str]:
    p, prompt, new = c.policy, c.rollout.max_prompt_tokens, c.rollout.max_new_tokens
    if p.tokens_per_pack < prompt + new:
        yield (
            f"policy.tokens_per_pack ({p.tokens_per_pack}) is smaller than one full sequence: "
            f"rollout.max_prompt_tokens ({prompt}) + rollout.max_new_tokens ({new}) = {prompt + new}. "
            f"Use at least {prompt + new}."
        )
    if p.zero_stage not in (0, 1, 2, 3):
        yield f"policy.zero_stage is {p.zero_stage}; DeepSpeed has 0, 1, 2 and 3."
    if unknown := [part for part in p.offload if part not in OFFLOADABLE]:
        yield f"policy.offload has `{unknown[0]}`; it may have {', '.join(OFFLOADABLE)}."
    if "optimizer" in p.offload and p.zero_stage < 1:
        yield f"policy.offload optimizer needs policy.zero_stage 1, 2 or 3; it is {p.zero_stage}."
    if "params" in p.offload and p.zero_stage != 3:
        yield f"policy.offload params needs policy.zero_stage 3; it is {p.zero_stage}."
    may_recompute = p.gradient_checkpointing or (p.gradient_checkpointing is None and c.cluster.device == "gpu")
    if "activations" in p.offload and not may_recompute:
        yield (
            "policy.offload activations keeps in host memory what gradient checkpointing keeps of a layer, and "
            "policy.gradient_checkpointing is not true. Use true, or leave activations out."
        )
    if len(p.betas) != 2 or not all(0 <= beta < 1 for beta in p.betas):
        yield f"policy.betas is {p.betas}; it has two numbers, each from 0 to less than 1, such as [0.9, 0.95]."
    if p.grad_dtype == "bfloat16" and p.dtype == "float32":
        yield "policy.grad_dtype is bfloat16, but gradients of policy.dtype float32 are float32. Use grad_dtype float32."
    if p.compile and p.zero_stage >= 3:
        yield (
            "policy.compile works with policy.zero_stage 0, 1 and 2: ZeRO 3 gathers weights in the middle of layers, "
            "so they would be compiled again and again. Use one of those, or policy.compile false."
        )
