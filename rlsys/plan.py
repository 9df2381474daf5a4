"""The batch arithmetic of a configuration, as a table with the numbers filled in."""

from rlsys.config import Config


def batch_arithmetic(c: Config) -> list[tuple[str, str, int]]:
    """Rows of (what, how it comes about, how many)."""
    t, prompt, new = c.trainer, c.rollout.max_prompt_tokens, c.rollout.max_new_tokens
    samples = t.prompts_per_step * t.samples_per_prompt
    per_update, updates = samples // t.updates_per_step, t.updates_per_step * t.epochs_per_step
    rows = [
        ("prompts per step", "trainer.prompts_per_step", t.prompts_per_step),
        ("samples per step", f"{t.prompts_per_step} prompts x {t.samples_per_prompt} samples_per_prompt", samples),
        ("samples per engine", f"{samples} samples / {c.rollout.engines} engines", -(-samples // c.rollout.engines)),
        ("samples per update", f"{samples} samples / {t.updates_per_step} updates_per_step", per_update),
        ("updates per step", f"{t.updates_per_step} updates x {t.epochs_per_step} epochs", updates),
        ("updates in all", f"{t.steps} steps x {updates} updates", t.steps * updates),
        ("new tokens per step, at most", f"{samples} samples x {new} max_new_tokens", samples * new),
    ]
    if prompt:
        per_pack = c.policy.tokens_per_pack // (prompt + new - 1)  # the last token of a sequence is never an input
        packs = -(-per_update // (per_pack * c.policy.ranks))
        how = f"{c.policy.tokens_per_pack} tokens_per_pack, {c.policy.ranks} ranks"
        rows.append(("packs per rank and update, at most", how, packs))
    return rows


def processes(c: Config) -> list[tuple[str, int, str]]:
    """Rows of (role, how many, what it is)."""
    rows = [
        ("rollout", c.rollout.engines, f"vLLM, {c.rollout.dtype}, tensor parallel {c.rollout.tensor_parallel}"),
        ("reward", c.reward.workers, ", ".join(c.reward.functions)),
        ("policy", c.policy.ranks, f"DeepSpeed ZeRO {c.policy.zero_stage}, {c.policy.dtype}"),
    ]
    if c.reference.kl_coef:
        where = f"KL coefficient {c.reference.kl_coef:g}, {c.algorithm.kl}, in the {c.reference.kl_in}"
        rows.append(("reference", 1, where))
    if c.algorithm.advantage == "gae":
        rows.append(("critic", c.critic.ranks, f"DeepSpeed ZeRO {c.policy.zero_stage}, {c.policy.dtype}"))
    return rows
