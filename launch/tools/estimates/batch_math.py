"""Tables that explain a configuration: its batch arithmetic, its method, its data sets and its processes."""

from rlsys.config.derived import (
    MEAN_OF_SEQUENCES,
    correction_method,
    evaluated_samples,
    has_engines,
    has_reference_worker,
    is_supervised,
    kl_estimator,
    max_new_tokens,
    policy_is_reference,
    samples_differ,
    token_weighting,
)
from rlsys.config.methods import AlgorithmConfig, CorrectionConfig
from rlsys.config.schema import Config, RewardFunction
from rlsys.rewards.settings import RewardSettings, reward_services


def batch_rows(c: Config) -> list[tuple[str, str, int]]:
    """Returns rows of (quantity, how it is computed, value)."""
    t, new = c.trainer, c.rollout.max_new_tokens
    samples = t.prompts_per_step * t.samples_per_prompt
    per_update, updates = samples // t.updates_per_step, t.updates_per_step * t.epochs_per_step
    update_rows: list[tuple[str, str, int]] = [
        ("updates per step", f"{t.updates_per_step} updates x {t.epochs_per_step} epochs", updates),
        ("updates in all", f"{t.steps} steps x {updates} updates", t.steps * updates),
    ]
    if is_supervised(c):
        rows_per_update = f"{samples} rows / {t.updates_per_step} updates_per_step"
        return [
            ("rows per step", "trainer.prompts_per_step", samples),
            ("rows per update", rows_per_update, per_update),
            *update_rows,
        ]
    greedy = int(c.algorithm.advantage == "remax")  # one completion more per prompt, scored but not trained on
    per_prompt, per_engine = t.samples_per_prompt + greedy, -(-t.prompts_per_step // c.rollout.engines)
    completions = f"({t.samples_per_prompt} + 1 greedy)" if greedy else f"{t.samples_per_prompt}"
    rounds = c.dynamic_sampling.enabled
    rows = [
        ("prompts per step", "trainer.prompts_per_step", t.prompts_per_step),
        ("samples per step", f"{t.prompts_per_step} prompts x {t.samples_per_prompt} samples_per_prompt", samples),
        (
            "samples per engine" + " and round" * rounds,
            f"{per_engine} prompts x {completions}",  # an engine samples whole groups
            per_engine * per_prompt,
        ),
        ("samples per update", f"{samples} samples / {t.updates_per_step} updates_per_step", per_update),
        *update_rows,
        (
            f"new tokens per {'round' if rounds else 'step'}, at most",
            f"{t.prompts_per_step} prompts x {completions} x {new}",
            t.prompts_per_step * per_prompt * new,
        ),
    ]
    return rows + pack_rows(c, per_update)


def pack_rows(c: Config, samples_per_update: int) -> list[tuple[str, str, int]]:
    """Returns the largest number of packs per rank and update. Without a known longest prompt there is no row."""
    if not c.rollout.max_prompt_tokens:
        return []
    longest = c.rollout.max_prompt_tokens + c.rollout.max_new_tokens - 1  # the last token is never an input
    per_pack = c.policy.tokens_per_pack // longest
    sharing = c.policy.sequence_parallel
    packs = -(-samples_per_update // (max(per_pack, 1) * (c.policy.ranks // sharing)))
    how = f"{c.policy.tokens_per_pack} tokens_per_pack, {c.policy.ranks} ranks"
    how += f", of which {sharing} share a pack" * (sharing > 1)
    if not per_pack:
        how += f"; a sequence longer than that is a pack alone, of {longest} tokens at most"
    return [("packs per rank and update, at most", how, packs)]


def method_rows(c: Config) -> list[tuple[str, str]]:
    """Returns rows of (part, description): the algorithm in a few words."""
    a = c.algorithm
    deviation = f", deviation {a.std}" if a.std else ""
    clip = _set_options(a, "clip_low", "clip_high", "dual_clip", "max_ratio", "tau_pos", "tau_neg")
    whitened = ", whitened" if a.whiten and a.advantage != "gae" else ""
    rows = [
        ("advantage", f"{a.advantage}{deviation}{_set_options(a, 'eps')}{whitened}"),
        ("loss", a.loss + clip),
        ("token weights", _token_weights(c)),
    ]
    if is_supervised(c):
        rows[:2] = [("loss", "nll: supervised, on the answers of the data")]
    if a.control_tokens:
        modes = ", ".join(f"{reward:g} after {text}" for text, reward in a.control_tokens.items())
        rows.append(("right answers", f"{modes}; wrong ones -1"))
    if a.anchor == "rollout":
        rows.append(("ratio", "to the engines' log-probs"))
    if a.advantage == "gae":
        rows.append(("critic", _critic(c)))
    if c.reference.kl_coef:
        rows.append(("KL", _kl(c)))
    if (correction := correction_method(c)) != "none":
        rows.append(("correction", correction + _set_options(c.correction, "low", "high")))
    elif samples_differ(c) and a.anchor == "old":
        rows.append(("correction", "none: samples of other weights or rounding count as the policy's own"))
    if c.entropy.coef or c.entropy.control != "none":
        rows.append(("entropy", f"bonus {c.entropy.coef:g}, control {c.entropy.control}"))
    if c.reward.per_token:
        rows.append(("reward", "divided by the completion's tokens"))
    if c.overlong.mask or c.overlong.buffer:
        parts = [f"penalty over the last {c.overlong.buffer} tokens"] if c.overlong.buffer else []
        rows.append(("overlong", ", ".join(parts + ["mask"] * c.overlong.mask)))
    if c.dynamic_sampling.enabled:
        rows.append(("dynamic sampling", f"at most {c.dynamic_sampling.max_rounds} rounds"))
    return rows


def _token_weights(c: Config) -> str:
    a, weighting = c.algorithm, token_weighting(c)
    if weighting == "constant":
        return f"constant, {a.constant or c.rollout.max_new_tokens} tokens"
    text = f"decoupled (control_weight {a.control_weight:g})" if weighting == "decoupled" else weighting
    unpublished = a.loss in MEAN_OF_SEQUENCES and weighting != "sequence_mean"
    return text + f" ({a.loss} was published with sequence_mean)" * unpublished


def _kl(c: Config) -> str:
    r, estimator = c.reference, kl_estimator(c)
    biased = " (a biased gradient; that of k1 is exact)" if r.kl_in == "reward" and estimator != "k1" else ""
    target = f", adapted to {r.kl_target:g} per token" if r.kl_target else ""
    return f"{estimator} in the {r.kl_in}{biased}, coefficient {r.kl_coef:g}{target}"


def _set_options(section: AlgorithmConfig | CorrectionConfig, *names: str) -> str:
    """Returns the options that are set: " (clip_low 0.2, clip_high 0.28)", or nothing."""
    options = ", ".join(f"{n} {getattr(section, n):g}" for n in names if getattr(section, n) is not None)
    return f" ({options})" if options else ""


def _critic(config: Config) -> str:
    c = config.critic
    text = f"gamma {c.gamma:g}, lam {c.lam:g}, {f'clip {c.clip:g}' if c.clip else 'no clip'}"
    return (
        text
        + ", whitened" * (config.algorithm.whiten is not False)
        + (f", alone for {c.alone_steps} steps" if c.alone_steps else "")
    )


def dataset_rows(c: Config) -> list[tuple[str, str, str, str]]:
    """Returns rows of (purpose, data set, how much of it, its reward)."""
    total = sum(source.weight or 0 for source in c.data.train.values())
    rows = []
    for name, source in c.data.train.items():
        share = f"{source.weight / total:.1%} of the prompts" if source.weight else "every row once an epoch"
        reward = "none: learns answers" if is_supervised(c) else _reward_sum(source.reward or c.reward.functions)
        rows.append(("train", name, share, reward))
    for name, held_out in c.eval.datasets.items():
        if not (samples := evaluated_samples(c, held_out)):
            rows.append(("evaluate", name, "loss on every answer", "none"))
            continue
        temperature = c.eval.temperature if held_out.temperature is None else held_out.temperature
        how = f"temperature {temperature:g}{_truncation(c)}" if temperature else "greedy"
        reward = _reward_sum(held_out.reward or c.reward.functions)
        limit = max_new_tokens(c, held_out)
        how += f", at most {limit:,} tokens" if limit != c.rollout.max_new_tokens else ""
        rows.append(("evaluate", name, f"{samples} per prompt, {how}", reward))
    return rows


def _truncation(c: Config) -> str:
    top_p = f", top_p {c.eval.top_p:g}" if c.eval.top_p != 1 else ""
    return top_p + (f", top_k {c.eval.top_k}" if c.eval.top_k != -1 else "")


def _reward_sum(functions: dict[str, RewardFunction]) -> str:
    """Returns the weighted sum as text: "exact + 0.1 length"."""
    return " + ".join(name if f.weight == 1 else f"{f.weight:g} {name}" for name, f in functions.items())


def process_rows(c: Config) -> list[tuple[str, int, str]]:
    """Returns rows of (role, number of processes, description)."""
    vllm = f"vLLM, {c.rollout.dtype}, tensor parallel {c.rollout.tensor_parallel}{_threads(c.rollout.threads)}"
    sampling = [("rollout", c.rollout.engines, vllm), *(_reward_row(service) for service in reward_services(c))]
    rows = [
        *(sampling if has_engines(c) else []),
        (
            "policy",
            c.policy.ranks,
            f"DeepSpeed ZeRO {c.policy.zero_stage}, {c.policy.dtype}{_threads(c.policy.threads)}{_lora(c)}",
        ),
    ]
    device = "GPU" if c.cluster.device == "gpu" else "CPU"
    rows += [(name, m.engines, f"{m.path}, frozen, vLLM, {c.rollout.dtype}, {device}") for name, m in c.models.items()]
    if has_reference_worker(c):
        model, stage = c.reference.path or "the model of step 0", ", ZeRO 3" * (c.reference.place == "split")
        rows.append(("reference", c.reference.ranks, f"{model}, frozen, {c.policy.dtype}{stage}"))
    if c.algorithm.advantage == "gae":
        rows.append(("critic", c.critic.ranks, f"DeepSpeed ZeRO {c.policy.zero_stage}, {c.policy.dtype}"))
    return rows


def _threads(count: int) -> str:
    return f", {count} threads" if count > 1 else ""


def _lora(c: Config) -> str:
    lora, reference = c.policy.lora, ", also the reference" * policy_is_reference(c)
    return f", LoRA of rank {lora.rank}, alpha {lora.alpha:g}{reference}" if lora.rank else ""


def _reward_row(service: RewardSettings) -> tuple[str, int, str]:
    if service.keep_spare:
        names = dict.fromkeys(name for functions in service.functions.values() for name in functions)
        return "reward", service.workers, ", ".join(names)
    device = f"{service.gpus:g} GPUs" if service.gpus else "CPU"
    return "reward model", service.workers, f"{service.model_options.get('path', '')}, {device}"
