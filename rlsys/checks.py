"""What does not fit together in a configuration, each problem a sentence with the numbers and a way out."""

import difflib
import json
import math
import re
from pathlib import Path

from rlsys.checks_sets import COLDEST, check_data_sets, check_rewards, functions_of
from rlsys.config.loading import load_config
from rlsys.config.plugins import user_function_problems
from rlsys.config.schema import (
    ADVANTAGES,
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSSES,
    NORMALIZERS,
    TRANSPORTS,
    AlgorithmConfig,
    Config,
    ConfigError,
)
from rlsys.models.known_shapes import look_up_shape
from rlsys.models.lookup import context_of_model, known_model_shape
from rlsys.models.shapes import ModelShape, tensor_parallel_problem
from rlsys.rewards.settings import function_deadline
from rlsys.tracking.builtin import tracker_problems as problems_of_trackers


def load_checked(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads a configuration as `config.loading.load` does. Raises `ConfigError` with all problems that `check` finds."""
    config = load_config(path, overrides)
    if problems := check(config):
        raise ConfigError(problems)
    return config


def check(config: Config, model: ModelShape | None = None) -> list[str]:
    """All cross-field problems at once, each a sentence with the numbers and a way out.

    `model`: its shape, where that is known and not only to be read from a config.json.
    """
    c, problems = config, []

    def need(good: bool, sentence: str) -> None:
        if not good:
            problems.append(sentence)

    def one_of(key: str, value: str, names: tuple[str, ...], user: bool = False) -> None:
        if value not in names and not (user and ":" in value):
            known = f"{', '.join(names)}{', or module:function' if user else ''}"
            need(False, f"{key} is `{value}`; known: {known}.{_hint(key, value, names)}")

    one_of("cluster.device", c.cluster.device, ("cpu", "gpu"))
    one_of("cluster.placement", c.cluster.placement, ("separate", "colocated"))
    one_of("data.overlong", c.data.overlong, ("error", "skip"))
    one_of("data.on_bad_row", c.data.on_bad_row, ("error", "skip"))
    one_of("rollout.dtype", c.rollout.dtype, ("float32", "bfloat16"))
    one_of("policy.dtype", c.policy.dtype, ("float32", "bfloat16"))
    one_of("policy.lr_schedule", c.policy.lr_schedule, ("constant", "linear", "cosine"))
    one_of("algorithm.advantage", c.algorithm.advantage, tuple(ADVANTAGES), user=True)
    if c.algorithm.std is not None:
        one_of("algorithm.std", c.algorithm.std, ("sample", "population", "none"))
    one_of("algorithm.loss", c.algorithm.loss, tuple(LOSSES), user=True)
    one_of("correction.method", c.correction.method, ("none", *CORRECTIONS))
    one_of("reference.kl_in", c.reference.kl_in, ("loss", "reward"))
    one_of("entropy.control", c.entropy.control, ("none", "clip_cov", "kl_cov"))
    one_of("algorithm.normalize", c.algorithm.normalize, NORMALIZERS)
    one_of("algorithm.kl", c.algorithm.kl, KL_ESTIMATORS)
    one_of("sync.transport", c.sync.transport, TRANSPORTS)
    one_of("watchdog.action", c.watchdog.action, ("restart", "abort"))
    positive = {
        "trainer": ("steps", "prompts_per_step", "samples_per_prompt", "updates_per_step", "epochs_per_step"),
        "rollout": (
            "engines",
            "tensor_parallel",
            "temperature",
            "max_new_tokens",
            "max_sequences",
            "block_size",
            "threads",
            "kv_cache_mb",
        ),
        "policy": ("ranks", "tokens_per_pack", "logprob_chunk", "lr", "threads"),
        "reward": ("workers", "timeout_s", "batch", "concurrency"),
        "cluster": ("start_timeout_s",),
        "watchdog": ("stall_s",),
        "critic": ("ranks", "lr"),
        "reference": ("kl_horizon",),
        "dynamic_sampling": ("max_rounds",),
    }
    for section, names in positive.items():
        for name in names:
            value = getattr(getattr(c, section), name)
            need(0 < value < math.inf, f"{section}.{name} is {value}; it must be a number greater than 0.")
    not_negative = {
        "policy": ("warmup_updates", "weight_decay", "clip_grad", "port"),
        "rollout": ("max_prompt_tokens", "oversample"),
        "pipeline": ("max_lag",),
        "reference": ("kl_coef", "kl_target", "gpus"),
        "critic": ("warmup_updates", "alone_steps", "clip", "gamma", "lam", "port"),
        "entropy": ("coef", "share", "kl_coef"),
        "overlong": ("buffer", "penalty"),
        "reward": ("memory_mb",),
        "algorithm": ("constant", "control_weight"),
        "trainer": ("max_skipped",),
        "eval": ("every",),
        "tracking": ("samples",),
        "checkpoint": ("every", "keep_last"),
        "cluster": ("dashboard_port",),
        "run": ("seed", "max_restarts", "grace_s"),
    }
    for section, names in not_negative.items():
        for name in names:
            value = getattr(getattr(c, section), name)
            need(0 <= value < math.inf, f"{section}.{name} is {value}; it must be a number of 0 or more.")

    problems += _check_options(c) + _check_weights(c) + problems_of_trackers(c.tracking)
    t = c.trainer
    need(
        t.max_mismatch is None or 0 < t.max_mismatch < math.inf,
        f"trainer.max_mismatch is {t.max_mismatch}; it must be a number greater than 0, or null for what suits dtype and lag.",
    )
    need(
        not c.rollout.exact
        or (
            c.cluster.device == "cpu"
            and c.rollout.dtype == c.policy.dtype == "float32"
            and c.rollout.threads == c.policy.threads == 1
        ),
        "rollout.exact is there for cluster.device cpu with float32 as rollout.dtype and policy.dtype, and 1 as rollout.threads "
        "and policy.threads. Use those, or rollout.exact false.",
    )
    if t.updates_per_step > 0 and t.prompts_per_step > 0 and t.prompts_per_step % t.updates_per_step:
        good = [n for n in range(1, t.prompts_per_step + 1) if t.prompts_per_step % n == 0]
        need(
            False,
            f"trainer.prompts_per_step ({t.prompts_per_step}) cannot be split into trainer.updates_per_step "
            f"({t.updates_per_step}) mini-batches of whole groups. Use updates_per_step {_nearest(good, t.updates_per_step)}, "
            f"or prompts_per_step {-(-t.prompts_per_step // t.updates_per_step) * t.updates_per_step}.",
        )
    if c.algorithm.advantage in GROUP_RELATIVE:
        need(
            t.samples_per_prompt >= 2,
            f"trainer.samples_per_prompt is {t.samples_per_prompt}; {c.algorithm.advantage} compares samples of one prompt and "
            "needs at least 2. With 1, algorithm.advantage may be reinforce_pp, remax, raw or gae.",
        )
    need(
        not c.dynamic_sampling.enabled or t.samples_per_prompt >= 2,
        f"dynamic_sampling drops groups of equal rewards; with trainer.samples_per_prompt {t.samples_per_prompt} that is every group.",
    )
    need(
        not c.reference.kl_target or c.reference.kl_coef > 0,
        f"reference.kl_target is {c.reference.kl_target:g}, but kl_coef is 0 and stays 0. Start from a coefficient such as 0.01.",
    )
    need(
        c.algorithm.advantage != "max_rl"
        or not (c.overlong.buffer or (c.reference.kl_in == "reward" and c.reference.kl_coef)),
        "algorithm.advantage max_rl takes rewards of 0 or more; overlong.buffer and reference.kl_in reward take something off. "
        "Use overlong.buffer 0 and reference.kl_in loss.",
    )
    need(c.entropy.share <= 1, f"entropy.share is {c.entropy.share}; it is a share of the tokens, at most 1.")
    need(
        c.entropy.low <= c.entropy.high,
        f"entropy.low ({c.entropy.low:g}) is above entropy.high ({c.entropy.high:g}); no covariance is between them.",
    )
    for name in ("beta1", "beta2"):
        beta = getattr(c.policy, name)
        need(0 <= beta < 1, f"policy.{name} is {beta}; it must be a number from 0 to less than 1.")
    need(c.critic.gamma <= 1, f"critic.gamma is {c.critic.gamma}; it must be between 0 and 1.")
    need(c.critic.lam <= 1, f"critic.lam is {c.critic.lam}; it must be between 0 and 1.")
    timed = [
        (n, f) for n, f in functions_of(c) if isinstance(f.options.get("timeout_s", 0), int | float)
    ]  # others are refused
    slowest, name = max(((function_deadline(f, c.reward.timeout_s), n) for n, f in timed), default=(0.0, ""))
    need(
        c.watchdog.stall_s > slowest,
        f"watchdog.stall_s ({c.watchdog.stall_s:g}) is not more than what {name} may take ({slowest:g} s): every slow verdict would "
        "be a stall. Use a larger stall_s, or shorter deadlines.",
    )
    with_critic = c.algorithm.advantage == "gae"
    need(
        not with_critic or not c.critic.alone_steps or c.critic.alone_steps < t.steps,
        f"critic.alone_steps ({c.critic.alone_steps}) is not less than trainer.steps ({t.steps}): the policy would never learn. "
        "Use fewer, or train longer.",
    )
    need(
        not with_critic or not c.critic.port or c.critic.port != c.policy.port,
        f"critic.port and policy.port are both {c.policy.port}; two meeting points need two ports. Change one, or use 0 for any free one.",
    )
    need(
        c.entropy.control != "kl_cov" or t.updates_per_step * t.epochs_per_step != 1,
        "entropy.control kl_cov has no gradient in a step's first update, and with trainer.updates_per_step 1 and epochs_per_step 1 "
        "there is no other. Use 2 updates, or clip_cov.",
    )
    need(
        c.algorithm.advantage != "gdpo" or c.reference.kl_in != "reward" or not c.reference.kl_coef,
        f"algorithm.advantage gdpo brings each part of the reward to one deviation, so reference.kl_coef ({c.reference.kl_coef:g}) would "
        "say nothing of KL in the reward. Use reference.kl_in loss.",
    )
    need(
        c.overlong.buffer <= c.rollout.max_new_tokens,
        f"overlong.buffer ({c.overlong.buffer}) is longer than a completion can be, rollout.max_new_tokens ({c.rollout.max_new_tokens}).",
    )
    longest = c.rollout.max_prompt_tokens + c.rollout.max_new_tokens
    need(
        c.policy.tokens_per_pack >= longest,
        f"policy.tokens_per_pack ({c.policy.tokens_per_pack}) is smaller than one full sequence: rollout.max_prompt_tokens "
        f"({c.rollout.max_prompt_tokens}) + rollout.max_new_tokens ({c.rollout.max_new_tokens}) = {longest}. Use at least {longest}.",
    )
    need(
        c.rollout.top_p == 1.0 and c.rollout.top_k in (-1, 0),
        f"rollout.top_p={c.rollout.top_p}, rollout.top_k={c.rollout.top_k}: sampling from a truncated distribution makes "
        "the engines' log-probs incomparable with the trainer's, which are over the whole vocabulary. Use top_p 1 and top_k -1; "
        "rollout.temperature is handled on both sides.",
    )
    need(
        not 0 < c.rollout.temperature < COLDEST,
        f"rollout.temperature is {c.rollout.temperature:g}; vLLM would take {COLDEST:g} in its place, and the trainer would not. "
        f"Use {COLDEST:g} or more.",
    )
    need(
        c.policy.zero_stage in (0, 1, 2, 3), f"policy.zero_stage is {c.policy.zero_stage}; DeepSpeed has 0, 1, 2 and 3."
    )
    need(
        not c.policy.offload_optimizer or c.policy.zero_stage >= 1,
        f"policy.offload_optimizer needs policy.zero_stage 1, 2 or 3; it is {c.policy.zero_stage}.",
    )
    need(
        not c.policy.offload_params or c.policy.zero_stage == 3,
        f"policy.offload_params needs policy.zero_stage 3; it is {c.policy.zero_stage}.",
    )
    need(
        not c.policy.compile or c.policy.zero_stage < 3,
        "policy.compile is there for policy.zero_stage 0, 1 and 2: ZeRO 3 gathers weights in the middle of layers, and what was "
        "compiled would be compiled again and again. Use one of those, or policy.compile false.",
    )
    need(
        not (c.policy.compile and c.rollout.exact),
        "rollout.exact needs the policy to compute as engines do, and compiled layers round otherwise. Use policy.compile false, "
        "or rollout.exact false.",
    )
    need(
        c.rollout.enforce_eager or not c.rollout.exact,
        "rollout.exact needs engines to compute as the policy does, and compiled layers round otherwise. Use rollout.enforce_eager "
        "true, or rollout.exact false.",
    )
    between = c.pipeline.max_lag - bool(c.rollout.oversample)  # updates while a batch is sampled or waits
    need(
        not c.pipeline.in_flight or between >= 1,
        f"pipeline.in_flight has engines sample while training goes on; pipeline.max_lag {c.pipeline.max_lag}"
        + (", one of which rollout.oversample takes," if c.rollout.oversample else "")
        + f" leaves no update for that. Use max_lag {1 + bool(c.rollout.oversample)} or more.",
    )
    need(
        c.rollout.oversample <= 1,
        f"rollout.oversample is {c.rollout.oversample:g}; it is a share of trainer.prompts_per_step, at most 1. Try 0.25.",
    )
    need(
        c.rollout.oversample <= 0 or c.pipeline.max_lag >= 1,
        f"rollout.oversample ({c.rollout.oversample:g}) goes on in the next step with what is half-written, which pipeline.max_lag 0 "
        "forbids. Use max_lag 1 or more.",
    )
    need(
        not c.rollout.oversample or not c.dynamic_sampling.enabled,
        f"rollout.oversample ({c.rollout.oversample:g}) takes the groups that are finished first, dynamic_sampling.enabled those that "
        "differ, in the order of the data. Use one of them.",
    )
    problems += check_rewards(c) + check_data_sets(c)
    need(0 < c.rollout.gpu_memory < 1, f"rollout.gpu_memory is {c.rollout.gpu_memory}; it is a share between 0 and 1.")
    need(
        c.cluster.device == "gpu" or c.rollout.block_size % 32 == 0,
        f"rollout.block_size is {c.rollout.block_size}; vLLM on CPU takes multiples of 32.",
    )
    if c.cluster.device == "cpu":
        wide = f"rollout.tensor_parallel is {c.rollout.tensor_parallel}, and an engine of several processes on CPU computes as vLLM does"
        need(
            c.rollout.tensor_parallel == 1 or not c.rollout.exact,
            f"{wide}, not as rollout.exact does. Use one of them.",
        )
        need(
            c.rollout.tensor_parallel == 1 or c.rollout.enforce_eager,
            f"{wide}, layer by layer. Use rollout.enforce_eager true, or more engines.",
        )
        need(
            c.sync.transport not in ("nccl", "cuda_ipc"),
            f"sync.transport {c.sync.transport} needs GPUs; cluster.device is cpu. Use auto.",
        )
        need(
            c.cluster.placement == "separate",
            "cluster.placement colocated shares GPUs; cluster.device is cpu. Use separate.",
        )
    else:
        need(
            c.sync.transport != "cuda_ipc" or c.cluster.placement == "colocated",
            "sync.transport cuda_ipc passes pointers within one GPU; it needs cluster.placement colocated.",
        )
        need(
            c.sync.transport != "nccl" or c.cluster.placement == "separate",
            "sync.transport nccl cannot connect two processes on one GPU; with cluster.placement colocated use cuda_ipc.",
        )
        if c.cluster.placement == "colocated":
            need(
                c.algorithm.advantage != "gae" or c.critic.ranks <= c.policy.ranks,
                f"critic.ranks ({c.critic.ranks}) is more than the GPUs of cluster.placement colocated, policy.ranks ({c.policy.ranks}).",
            )
            need(
                c.rollout.engines * c.rollout.tensor_parallel == c.policy.ranks,
                f"cluster.placement colocated puts one policy rank on each engine GPU, but rollout.engines ({c.rollout.engines}) × "
                f"rollout.tensor_parallel ({c.rollout.tensor_parallel}) is not policy.ranks ({c.policy.ranks}).",
            )
            need(
                between <= 0,
                f"pipeline.max_lag {c.pipeline.max_lag} generates while training; colocated GPUs do one at a time. Use placement separate, "
                f"or max_lag {int(bool(c.rollout.oversample))}.",
            )
    return problems + _check_paths(c) + check_model(c, c.model.path, model)


def _hint(key: str, value: str, names: tuple[str, ...]) -> str:
    """What a value that is not known was probably meant to be."""
    small = value.lower()
    if small in names:
        return f" Did you mean `{small}`?"
    if (key, small) in OTHER_NAMES:
        return f" {OTHER_NAMES[key, small]}"
    letters = re.sub("[^a-z]", "", small.replace("++", "pp"))
    recipe = [name for name in RECIPES if name.replace("_", "") == letters]
    if recipe and key in ("algorithm.advantage", "algorithm.loss"):
        return f" {value} is a recipe of several options: configs/{recipe[0]}.yaml."
    near = difflib.get_close_matches(small, names, 1)
    return f" Did you mean `{near[0]}`?" if near else ""


def _check_paths(c: Config) -> list[str]:
    """What can be seen of model, data and reward files without opening anything heavy."""
    problems = []
    # A hub name is `owner/name` or `name`; anything else is a directory.
    looks_local = c.model.path.startswith((".", "/", "~")) or c.model.path.count("/") > 1 or Path(c.model.path).is_dir()
    if c.model.path.startswith("builtin:"):
        if c.model.path != "builtin:tiny":
            problems.append(f"model.path is `{c.model.path}`; the only built-in model is builtin:tiny.")
    elif looks_local:
        config_file = Path(c.model.path).expanduser() / "config.json"
        if not config_file.is_file():
            problems.append(
                f"model.path: {config_file} does not exist. Give a Hugging Face model directory, a hub name, or builtin:tiny."
            )
        else:
            problems += _check_config_file(config_file)
    problems += user_function_problems("algorithm.advantage", c.algorithm.advantage)
    return problems + user_function_problems("algorithm.loss", c.algorithm.loss)


RECIPES = ("cispo", "dapo", "degrpo", "dr_grpo", "grpo", "gspo", "ppo", "reinforce_pp", "rloo")  # configs/<name>.yaml
OTHER_NAMES = {  # values from elsewhere that no spelling leads to ours
    ("algorithm.advantage", "ppo"): "PPO is algorithm.advantage gae: configs/ppo.yaml.",
    ("algorithm.loss", "ppo"): "PPO's loss is ppo_clip; the whole recipe is configs/ppo.yaml.",
    ("algorithm.normalize", "seq-mean-token-mean"): "Here that is sequence_mean.",
    ("algorithm.normalize", "seq-mean-token-sum"): "Here that is sequence_sum.",
    ("algorithm.normalize", "seq-mean-token-sum-norm"): "Here that is constant.",
    ("algorithm.normalize", "dapo"): "Here that is token_mean.",
    ("algorithm.normalize", "grpo"): "Here that is sequence_mean.",
    ("algorithm.normalize", "dr_grpo"): "Here that is constant.",
    ("algorithm.normalize", "bnpo"): "Here that is token_mean.",
    ("algorithm.normalize", "cispo"): "That is an algorithm.loss here.",
    ("algorithm.normalize", "sapo"): "That is an algorithm.loss here.",
    ("correction.method", "token_truncate"): "Here that is tis.",
    ("correction.method", "token_mask"): "Here that is mis.",
    ("correction.method", "sequence_truncate"): "Here that is sequence_tis.",
    ("correction.method", "sequence_mask"): "Here that is sequence_mis.",
    ("algorithm.kl", "low_var_kl"): "Here that is k3.",
}
CORRECTION_BOUNDS = {"icepop": (0.5, 5.0)}  # low and high of a correction that has both, as in its function
DIVIDE = ("tau_pos", "tau_neg")  # a gate of no steepness
GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "grpo_passk", "gdpo", "max_rl")


def _check_options(c: Config) -> list[str]:
    """Options that the chosen method does not have would be silently without effect."""
    problems = []
    chosen = [
        (c.algorithm, "algorithm", "advantage", c.algorithm.advantage, ADVANTAGES),
        (c.algorithm, "algorithm", "loss", c.algorithm.loss, LOSSES),
        (c.correction, "correction", "method", c.correction.method, CORRECTIONS | {"none": ()}),
    ]
    for values, section, kind, method, table in chosen:
        for option in sorted({option for options in table.values() for option in options}):
            value = getattr(values, option)
            if value is None:
                continue
            if isinstance(value, float) and not 0 <= value < math.inf:
                problems.append(f"{section}.{option} is {value}; it must be a number of 0 or more.")
            elif value == 0 and option in DIVIDE:
                problems.append(f"{section}.{option} is {value}; it must be a number greater than 0.")
            elif method in table and option not in table[method]:
                own = ", ".join(f"{section}.{o}" for o in table[method]) or "no options"
                problems.append(
                    f"{section}.{option} is {value}, but {section}.{kind} {method} does not use it; it has {own}."
                )
    if c.correction.method in CORRECTION_BOUNDS:
        own_low, own_high = CORRECTION_BOUNDS[c.correction.method]
        low = own_low if c.correction.low is None else c.correction.low
        high = own_high if c.correction.high is None else c.correction.high
        if low > high:
            problems.append(
                f"correction.low ({low:g}) is above correction.high ({high:g}); every token would weigh 0. "
                f"Null, for both, is {own_low:g} and {own_high:g}."
            )
    if c.algorithm.dual_clip is not None and c.algorithm.dual_clip <= 1:
        problems.append(
            f"algorithm.dual_clip is {c.algorithm.dual_clip:g}; it must be greater than 1, or null for none."
        )
    return problems


def _check_weights(c: Config) -> list[str]:
    """Options of one way to weigh tokens, given with another."""
    if ":" in c.algorithm.advantage + c.algorithm.loss:
        return []  # a user's function may ask for any option of the section
    problems = []
    for normalize, option in (("constant", "constant"), ("decoupled", "control_weight")):
        value, default = getattr(c.algorithm, option), getattr(AlgorithmConfig(), option)
        if value != default and c.algorithm.normalize != normalize:
            problems.append(
                f"algorithm.{option} is {value}, but algorithm.normalize {c.algorithm.normalize} does not use it. "
                f"Use algorithm.normalize={normalize}, or go back to algorithm.{option}={default}."
            )
    return problems


def _check_config_file(config_file: Path) -> list[str]:
    try:
        good = isinstance(json.loads(config_file.read_text()), dict)
    except ValueError:
        good = False
    return [] if good else [f"model.path: {config_file} is not a JSON object; the model directory is damaged."]


def check_model(c: Config, path: str, model: ModelShape | None = None) -> list[str]:
    """As far as the model's shape is known here: of a hub name that is new to this machine, when its config.json has come.

    Where nothing but the table of usual shapes has its window, `model` is to be given: `train` waits for the config.json.
    """
    problems = _check_window(c, model.context if model else context_of_model(path))
    if problems and model and not path.startswith("builtin:") and model == look_up_shape(path):
        problems[0] += (
            f" That is the window of what usually is called so; a config.json goes before: hf download {path} config.json"
        )
    if c.rollout.tensor_parallel > 1:
        shape = model or known_model_shape(path)
        if shape and (problem := tensor_parallel_problem(shape, c.rollout.tensor_parallel)):
            problems.append(problem)
    return problems


def _check_window(c: Config, window: int) -> list[str]:
    prompt, new = c.rollout.max_prompt_tokens, c.rollout.max_new_tokens
    if not window or max(prompt, 1) + new <= window:
        return []
    return [
        f"rollout.max_prompt_tokens ({prompt or 'at least 1'}) + rollout.max_new_tokens ({new}) = {max(prompt, 1) + new}, "
        f"but the model's window is {window} tokens. Reduce one of them by {max(prompt, 1) + new - window}."
    ]


def _nearest(numbers: list[int], wanted: int) -> int:
    return min(numbers, key=lambda n: (abs(n - wanted), n))
