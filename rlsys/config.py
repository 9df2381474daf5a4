"""The configuration: one tree of frozen dataclasses, read from defaults ← YAML ← `key=value`.

Nothing heavy is imported here, so `rlsys validate` answers at once. Each field's comment is its documentation; a default
is a recommendation.
"""

import dataclasses
import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ADVANTAGES = ("grpo",)
LOSSES = ("ppo_clip",)
KL_ESTIMATORS = ("k1", "k2", "k3")
NORMALIZERS = ("token_mean", "sequence_mean", "constant")
TRANSPORTS = ("auto", "shared_memory", "object_store", "nccl", "cuda_ipc")


class ConfigError(ValueError):
    """Something in the configuration, or in what it points to, that the user can mend. Each problem is one sentence."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Run:
    dir: str = ""  # the run directory; empty: runs/<name of the YAML file>
    seed: int = 0  # every random choice follows from it


@dataclass(frozen=True)
class Cluster:
    device: str = "cpu"  # cpu | gpu: which build of vLLM and which DeepSpeed accelerator
    address: str = ""  # a running Ray cluster; empty: RAY_ADDRESS if set, else a private one on this machine
    placement: str = "separate"  # separate | colocated: whether engines and policy ranks share GPUs
    dashboard_port: int = 0  # port of the private cluster's dashboard; 0: any free one
    start_timeout_s: float = 600.0  # how long all workers together may take to come up
    call_timeout_s: float = 3600.0  # how long any single call to a worker may take


@dataclass(frozen=True)
class Model:
    path: str = "builtin:tiny"  # builtin:tiny, a directory, or a hub name
    trust_remote_code: bool = False  # whether code shipped with the model may run


@dataclass(frozen=True)
class Data:
    train: str = "builtin:zigzag"  # a .jsonl or .parquet file, or builtin:<task>
    prompt_key: str = "prompt"  # the field with the prompt: text, or a list of chat messages
    shuffle: bool = True  # a new order each epoch, a pure function of run.seed
    overlong: str = "error"  # error | skip: prompts longer than rollout.max_prompt_tokens


@dataclass(frozen=True)
class Trainer:
    steps: int = 100  # how many batches to train on
    prompts_per_step: int = 32  # groups in a batch
    samples_per_prompt: int = 16  # completions in a group
    updates_per_step: int = 1  # mini-batches, one optimizer update each, in a pass over the batch
    epochs_per_step: int = 1  # passes over the batch


@dataclass(frozen=True)
class Rollout:
    engines: int = 2  # vLLM engines, data-parallel
    tensor_parallel: int = 1  # GPUs per engine
    dtype: str = "float32"  # float32 | bfloat16
    temperature: float = 1.0  # also divides the trainer's logits, so that log-probs compare
    top_p: float = 1.0  # only 1: see `check`
    top_k: int = -1  # only -1: see `check`
    max_prompt_tokens: int = 512  # longer prompts are refused or skipped (data.overlong)
    max_new_tokens: int = 512  # a completion is cut here
    max_sequences: int = 256  # sequences an engine decodes at once
    block_size: int = 32  # tokens per KV block: prompts shorter than one share nothing
    kv_cache_mb: int = 64  # KV cache of a CPU engine, MiB
    gpu_memory: float = 0.85  # share of a GPU's memory a GPU engine takes
    enforce_eager: bool = True  # false: CUDA graphs; slower start, faster decoding


@dataclass(frozen=True)
class Policy:
    ranks: int = 2  # DeepSpeed processes; one GPU each on a GPU cluster
    zero_stage: int = 2  # 0 | 1 | 2 | 3
    offload_optimizer: bool = False  # keep optimizer state in host memory (ZeRO 1-3)
    offload_params: bool = False  # keep parameters in host memory (ZeRO 3)
    dtype: str = "float32"  # float32 | bfloat16
    tokens_per_pack: int = 4096  # tokens of one forward and backward
    logprob_chunk: int = 1024  # positions whose logits exist at one time
    gradient_checkpointing: bool = False  # recompute activations in the backward pass
    lr: float = 1e-6  # peak learning rate (AdamW)
    lr_schedule: str = "constant"  # constant | linear | cosine, after the warm-up
    warmup_updates: int = 0  # optimizer updates of linear warm-up
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    weight_decay: float = 0.0  # AdamW
    clip_grad: float = 1.0  # global gradient norm; 0: no clipping
    threads: int = 1  # CPU threads per rank
    port: int = 0  # rendezvous port of the ranks; 0: any free one


@dataclass(frozen=True)
class Reference:
    kl_coef: float = 0.0  # weight of the KL term; 0: no reference worker exists
    gpus: float = 0.0  # GPUs it takes on a GPU cluster; a fraction shares one, 0 runs it on the CPU


@dataclass(frozen=True)
class Reward:
    functions: dict[str, float] = field(default_factory=lambda: {"zigzag": 1.0})  # built-in, module:function or file.py:function → weight
    workers: int = 2  # reward processes
    timeout_s: float = 10.0  # a sample past this has its process killed
    memory_mb: int = 0  # address space of a reward process, MiB; 0: no limit
    max_failure_share: float = 0.5  # more failed verdicts than this in a step stop the run
    shuffle: bool = False  # debugging: shuffle rewards within the batch; nothing can be learned then


@dataclass(frozen=True)
class Algorithm:
    advantage: str = "grpo"  # advantage estimator
    std: str = "sample"  # sample (1/(G-1)) | population (1/G) | none
    epsilon: float = 1e-6  # added to the deviation
    loss: str = "ppo_clip"  # policy loss
    clip_low: float = 0.2  # ratio may fall to 1 - clip_low
    clip_high: float = 0.2  # ratio may rise to 1 + clip_high
    normalize: str = "token_mean"  # token_mean | sequence_mean | constant: how token losses are summed
    constant: int = 0  # tokens per sequence that normalize=constant divides by; 0: rollout.max_new_tokens
    kl: str = "k3"  # k1 | k2 | k3: estimator of the KL term


@dataclass(frozen=True)
class Sync:
    transport: str = "auto"  # auto | shared_memory | object_store | nccl | cuda_ipc
    verify: bool = True  # compare the engines' fingerprints with the policy's after each sync


@dataclass(frozen=True)
class Pipeline:
    max_lag: int = 0  # 0: on-policy; 1: the next batch is generated while this one is trained


@dataclass(frozen=True)
class Eval:
    datasets: list[str] = field(default_factory=list)  # files like data.train; each row's source is its file's name unless it says
    every: int = 10  # steps between evaluations; also before the first and after the last; 0: only those two


@dataclass(frozen=True)
class Checkpoint:
    every: int = 50  # steps between checkpoints; also after the last; 0: only that one
    keep_last: int = 2  # older ones are removed; 0: keep all


@dataclass(frozen=True)
class Config:
    run: Run = field(default_factory=Run)
    cluster: Cluster = field(default_factory=Cluster)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    trainer: Trainer = field(default_factory=Trainer)
    rollout: Rollout = field(default_factory=Rollout)
    policy: Policy = field(default_factory=Policy)
    reference: Reference = field(default_factory=Reference)
    reward: Reward = field(default_factory=Reward)
    algorithm: Algorithm = field(default_factory=Algorithm)
    sync: Sync = field(default_factory=Sync)
    pipeline: Pipeline = field(default_factory=Pipeline)
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads a YAML file, applies `key=value` overrides, and returns a checked configuration or raises `ConfigError`."""
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else [], 1)
        raise ConfigError(f"{path}: no such file." + (f" Did you mean {path.parent / near[0]}?" if near else ""))
    try:
        tree = OmegaConf.load(path)
    except Exception as error:  # the YAML parser's own errors name line and column
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path} must hold a mapping such as `trainer: {{steps: 10}}`.")
    config = build(tree, list(overrides), str(path))
    if not config.run.dir:
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=f"runs/{path.stem}"))
    if problems := check(config):
        raise ConfigError(problems)
    return config


def build(tree: DictConfig, overrides: list[str], where: str) -> Config:
    """Merges the sources over the defaults; unknown keys and wrong types are collected and raised together."""
    problems: list[str] = []
    merged: dict[str, Any] = {}
    for source, items in ((where, _flatten(tree)), ("command line", _overrides(overrides, problems))):
        for key, value in items:
            kind = _kind(key)
            if kind is None:
                problems.append(f"{source}: unknown option `{key}`.{_suggest(key)}")
                continue
            merged[key] = _weighted(value) if key == "reward.functions" else value
    schema = OmegaConf.structured(Config)
    OmegaConf.set_readonly(schema, False)
    for section in schema:
        OmegaConf.set_readonly(schema[section], False)
    for key, value in merged.items():
        try:
            if isinstance(value, dict):
                OmegaConf.update(schema, key, value, merge=False)
            else:
                OmegaConf.update(schema, key, value)
        except OmegaConfBaseException:
            problems.append(f"`{key}` must be {_name(_kind(key))}; {value!r} is {_name(type(value))}.")
    if problems:
        raise ConfigError(problems)
    try:
        config = OmegaConf.to_object(schema)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from None
    assert isinstance(config, Config)
    return config


def check(config: Config) -> list[str]:
    """All cross-field problems at once, each a sentence with the numbers and a way out."""
    c, problems = config, []

    def need(good: bool, sentence: str) -> None:
        if not good:
            problems.append(sentence)

    def one_of(key: str, value: str, names: tuple[str, ...], user: bool = False) -> None:
        if value not in names and not (user and ":" in value):
            near = difflib.get_close_matches(value, names, 1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            need(False, f"{key} is `{value}`; known: {', '.join(names)}{', or module:function' if user else ''}.{hint}")

    one_of("cluster.device", c.cluster.device, ("cpu", "gpu"))
    one_of("cluster.placement", c.cluster.placement, ("separate", "colocated"))
    one_of("data.overlong", c.data.overlong, ("error", "skip"))
    one_of("rollout.dtype", c.rollout.dtype, ("float32", "bfloat16"))
    one_of("policy.dtype", c.policy.dtype, ("float32", "bfloat16"))
    one_of("policy.lr_schedule", c.policy.lr_schedule, ("constant", "linear", "cosine"))
    one_of("algorithm.advantage", c.algorithm.advantage, ADVANTAGES, user=True)
    one_of("algorithm.std", c.algorithm.std, ("sample", "population", "none"))
    one_of("algorithm.loss", c.algorithm.loss, LOSSES, user=True)
    one_of("algorithm.normalize", c.algorithm.normalize, NORMALIZERS)
    one_of("algorithm.kl", c.algorithm.kl, KL_ESTIMATORS)
    one_of("sync.transport", c.sync.transport, TRANSPORTS)

    positive = {
        "trainer": ("steps", "prompts_per_step", "samples_per_prompt", "updates_per_step", "epochs_per_step"),
        "rollout": ("engines", "tensor_parallel", "temperature", "max_prompt_tokens", "max_new_tokens", "max_sequences", "kv_cache_mb"),
        "policy": ("ranks", "tokens_per_pack", "logprob_chunk", "lr", "threads"),
        "reward": ("workers", "timeout_s"),
        "cluster": ("start_timeout_s", "call_timeout_s"),
    }
    for section, names in positive.items():
        for name in names:
            value = getattr(getattr(c, section), name)
            need(value > 0, f"{section}.{name} is {value}; it must be greater than 0.")
    not_negative = {
        "policy": ("warmup_updates", "weight_decay", "clip_grad", "port"),
        "reference": ("kl_coef", "gpus"),
        "reward": ("memory_mb",),
        "algorithm": ("epsilon", "clip_low", "clip_high", "constant"),
        "eval": ("every",),
        "checkpoint": ("every", "keep_last"),
        "cluster": ("dashboard_port",),
        "run": ("seed",),
    }
    for section, names in not_negative.items():
        for name in names:
            value = getattr(getattr(c, section), name)
            need(value >= 0, f"{section}.{name} is {value}; it must be 0 or more.")

    t = c.trainer
    if t.updates_per_step > 0 and t.prompts_per_step > 0 and t.prompts_per_step % t.updates_per_step:
        good = [n for n in range(1, t.prompts_per_step + 1) if t.prompts_per_step % n == 0]
        need(
            False,
            f"trainer.prompts_per_step ({t.prompts_per_step}) cannot be split into trainer.updates_per_step "
            f"({t.updates_per_step}) mini-batches of whole groups. Use updates_per_step {_nearest(good, t.updates_per_step)}, "
            f"or prompts_per_step {-(-t.prompts_per_step // t.updates_per_step) * t.updates_per_step}.",
        )
    if c.algorithm.advantage == "grpo":
        need(t.samples_per_prompt >= 2, f"trainer.samples_per_prompt is {t.samples_per_prompt}; GRPO compares samples of one prompt and needs at least 2.")
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
    need(c.policy.zero_stage in (0, 1, 2, 3), f"policy.zero_stage is {c.policy.zero_stage}; DeepSpeed has 0, 1, 2 and 3.")
    need(
        not c.policy.offload_optimizer or c.policy.zero_stage >= 1,
        f"policy.offload_optimizer needs policy.zero_stage 1, 2 or 3; it is {c.policy.zero_stage}.",
    )
    need(
        not c.policy.offload_params or c.policy.zero_stage == 3, f"policy.offload_params needs policy.zero_stage 3; it is {c.policy.zero_stage}."
    )
    need(
        c.pipeline.max_lag in (0, 1),
        f"pipeline.max_lag is {c.pipeline.max_lag}; 0 (on-policy) and 1 (generate the next batch while training this one) exist.",
    )
    need(bool(c.reward.functions), "reward.functions is empty; name at least one, such as `reward.functions: {exact: 1.0}`.")
    need(0 <= c.reward.max_failure_share <= 1, f"reward.max_failure_share is {c.reward.max_failure_share}; it is a share between 0 and 1.")
    need(0 < c.rollout.gpu_memory < 1, f"rollout.gpu_memory is {c.rollout.gpu_memory}; it is a share between 0 and 1.")
    need(
        c.cluster.device == "gpu" or c.rollout.block_size % 32 == 0,
        f"rollout.block_size is {c.rollout.block_size}; vLLM on CPU takes multiples of 32.",
    )
    if c.cluster.device == "cpu":
        need(c.rollout.tensor_parallel == 1, f"rollout.tensor_parallel is {c.rollout.tensor_parallel}; on CPU an engine is one process. Use more engines.")
        need(c.sync.transport not in ("nccl", "cuda_ipc"), f"sync.transport {c.sync.transport} needs GPUs; cluster.device is cpu. Use auto.")
        need(c.cluster.placement == "separate", "cluster.placement colocated shares GPUs; cluster.device is cpu. Use separate.")
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
                c.rollout.engines * c.rollout.tensor_parallel == c.policy.ranks,
                f"cluster.placement colocated puts one policy rank on each engine GPU, but rollout.engines ({c.rollout.engines}) × "
                f"rollout.tensor_parallel ({c.rollout.tensor_parallel}) is not policy.ranks ({c.policy.ranks}).",
            )
            need(c.pipeline.max_lag == 0, "pipeline.max_lag 1 generates while training; colocated GPUs do one at a time. Use placement separate.")
    return problems + _check_paths(c)


def _check_paths(c: Config) -> list[str]:
    """What can be seen of model, data and reward files without opening anything heavy."""
    problems = []
    looks_local = c.model.path.startswith((".", "/", "~")) or Path(c.model.path).is_dir()
    if c.model.path.startswith("builtin:"):
        if c.model.path != "builtin:tiny":
            problems.append(f"model.path is `{c.model.path}`; the only built-in model is builtin:tiny.")
    elif looks_local:
        config_file = Path(c.model.path).expanduser() / "config.json"
        if not config_file.is_file():
            problems.append(f"model.path: {config_file} does not exist. Give a Hugging Face model directory, a hub name, or builtin:tiny.")
        else:
            problems += _check_window(c, config_file)
    for key, path in [("data.train", c.data.train), *(("eval.datasets", p) for p in c.eval.datasets)]:
        if path.startswith("builtin:"):
            if path.partition(":")[2] not in ("zigzag", "zigzag_heldout"):
                problems.append(f"{key} is `{path}`; built in: builtin:zigzag, builtin:zigzag_heldout.")
        elif not Path(path).expanduser().is_file():
            problems.append(f"{key}: {path} does not exist (from {Path.cwd()}).")
        elif Path(path).suffix not in (".jsonl", ".parquet"):
            problems.append(f"{key}: {path} must end in .jsonl or .parquet.")
    for spec in c.reward.functions:
        file, _, name = spec.rpartition(":")
        if file.endswith(".py") and not Path(file).expanduser().is_file():
            problems.append(f"reward.functions: the file {file} (of `{spec}`) does not exist (from {Path.cwd()}).")
        if ":" in spec and not name:
            problems.append(f"reward.functions: `{spec}` names no function; write {spec}my_function.")
    return problems


def _check_window(c: Config, config_file: Path) -> list[str]:
    import json

    window = json.loads(config_file.read_text()).get("max_position_embeddings")
    need = c.rollout.max_prompt_tokens + c.rollout.max_new_tokens
    if window and need > window:
        return [
            f"rollout.max_prompt_tokens ({c.rollout.max_prompt_tokens}) + rollout.max_new_tokens ({c.rollout.max_new_tokens}) = {need}, "
            f"but the model's window is {window} tokens. Reduce one of them by {need - window}."
        ]
    return []


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def flatten(config: Config) -> dict[str, Any]:
    """`{"run.seed": 0, …}`: what two configurations are compared by."""
    return dict(_flatten(OmegaConf.structured(config)))


# --- names and kinds of options ------------------------------------------------------------------------------------------


def _kind(key: str) -> Any:
    """The annotated type of a dotted option, or None where there is no such option."""
    kind: Any = Config
    for part in key.split("."):
        if not dataclasses.is_dataclass(kind):
            return Any if get_origin(kind) is dict else None
        fields = {f.name: f.type for f in dataclasses.fields(kind)}
        if part not in fields:
            return None
        kind = fields[part]
    return kind


def _options(kind: Any = Config, prefix: str = "") -> list[str]:
    names = []
    for f in dataclasses.fields(kind):
        names += _options(f.type, f"{prefix}{f.name}.") if dataclasses.is_dataclass(f.type) else [prefix + f.name]
    return names


def _suggest(key: str) -> str:
    options = _options()
    near = difflib.get_close_matches(key, options, 1, 0.7)
    leaf = [o for o in options if o.rpartition(".")[2] == key.rpartition(".")[2]]
    leaf = leaf or [o for o in options if difflib.get_close_matches(key.rpartition(".")[2], [o.rpartition(".")[2]], 1, 0.8)]
    found = near or leaf[:1]
    return f" Did you mean `{found[0]}`?" if found else " `rlsys validate --options` lists them all."


def _name(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is dict:
        return "a mapping of names to weights, such as {exact: 1.0}"
    if origin is list:
        return f"a list of {_name(get_args(kind)[0]).split(' ', 1)[1]}s"
    if dataclasses.is_dataclass(kind):
        return f"a section with options {', '.join(f.name for f in dataclasses.fields(kind))}"
    return {int: "a whole number", float: "a number", str: "a text", bool: "a truth value", list: "a list", dict: "a mapping"}.get(kind, str(kind))


def _flatten(tree: DictConfig, prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for name in tree:
        value, key = tree[name], f"{prefix}{name}"
        if isinstance(value, DictConfig) and get_origin(_kind(key)) is not dict and (_kind(key) is None or dataclasses.is_dataclass(_kind(key))):
            items += _flatten(value, f"{key}.") if _kind(key) is not None else [(key, None)]
        else:
            items.append((key, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value))
    return items


def _overrides(overrides: list[str], problems: list[str]) -> list[tuple[str, Any]]:
    items = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            problems.append(f"command line: `{text}` is not key=value, such as trainer.steps=10.")
            continue
        try:
            parsed = OmegaConf.create(f"value: {value}" if value else "value: ''")
            plain = OmegaConf.to_container(parsed)
            items.append((key.strip(), plain["value"] if isinstance(plain, dict) else value))
        except Exception:
            items.append((key.strip(), value))
    return items


def _weighted(functions: Any) -> Any:
    """`exact`, `[exact, my.py:f]` and `{exact: 1.0}` all name reward functions; the first two mean weight 1."""
    if isinstance(functions, str):
        return {functions: 1.0}
    return dict.fromkeys(functions, 1.0) if isinstance(functions, list) else functions


def _nearest(numbers: list[int], wanted: int) -> int:
    return min(numbers, key=lambda n: (abs(n - wanted), n))
