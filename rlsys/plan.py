"""The batch arithmetic of a configuration, as a table with the numbers filled in."""

from rlsys.config import Config


def batch_arithmetic(c: Config) -> list[tuple[str, str, int]]:
    """Rows of (what, how it comes about, how many)."""
    t = c.trainer
    samples = t.prompts_per_step * t.samples_per_prompt
    per_update = samples // t.updates_per_step
    longest = c.rollout.max_prompt_tokens + c.rollout.max_new_tokens
    tokens = samples * longest
    per_pack = c.policy.tokens_per_pack // (longest - 1)  # the last token of a sequence is never an input
    per_rank = -(-per_update // (per_pack * c.policy.ranks))
    return [
        ("prompts per step", "trainer.prompts_per_step", t.prompts_per_step),
        ("samples per step", f"{t.prompts_per_step} prompts x {t.samples_per_prompt} samples_per_prompt", samples),
        ("samples per engine", f"{samples} samples / {c.rollout.engines} engines", -(-samples // c.rollout.engines)),
        ("samples per update", f"{samples} samples / {t.updates_per_step} updates_per_step", per_update),
        (
            "updates per step",
            f"{t.updates_per_step} updates_per_step x {t.epochs_per_step} epochs_per_step",
            t.updates_per_step * t.epochs_per_step,
        ),
        (
            "updates in all",
            f"{t.steps} steps x {t.updates_per_step * t.epochs_per_step}",
            t.steps * t.updates_per_step * t.epochs_per_step,
        ),
        (
            "tokens per step, at most",
            f"{samples} samples x ({c.rollout.max_prompt_tokens} prompt + {c.rollout.max_new_tokens} new)",
            tokens,
        ),
        (
            "packs per rank and update, at most",
            f"{c.policy.tokens_per_pack} tokens_per_pack, {c.policy.ranks} ranks",
            per_rank,
        ),
    ]


def processes(c: Config) -> list[tuple[str, int, str]]:
    """Rows of (role, how many, what it is)."""
    rows = [
        ("rollout", c.rollout.engines, f"vLLM, {c.rollout.dtype}, tensor parallel {c.rollout.tensor_parallel}"),
        ("reward", c.reward.workers, ", ".join(c.reward.functions)),
        ("policy", c.policy.ranks, f"DeepSpeed ZeRO {c.policy.zero_stage}, {c.policy.dtype}"),
    ]
    if c.reference.kl_coef:
        rows.append(("reference", 1, f"KL coefficient {c.reference.kl_coef:g}, {c.algorithm.kl}"))
    return rows
