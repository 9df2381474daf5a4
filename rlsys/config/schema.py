"""The configuration: one tree of frozen dataclasses.

The comment beside a field is its documentation; a default is a recommendation. `loading` reads it from defaults ← YAML ←
`key=value`; `rlsys.checks` finds what does not fit together. Nothing heavy is imported, so `rlsys validate` answers at once.
"""

from dataclasses import dataclass, field
from typing import Any

# Methods by name, each with its options in `algorithm` or `correction`. The functions are in the files of these names.
ADVANTAGES = {
    "grpo": ("std", "eps"),
    "dr_grpo": (),
    "rloo": (),
    "reinforce_pp": ("std", "eps"),
    "reinforce_pp_baseline": ("std", "eps"),
    "opo": (),
    "grpo_passk": ("std", "eps"),
    "gdpo": ("std", "eps", "whiten"),
    "max_rl": ("eps",),
    "remax": (),
    "raw": (),
    "gae": (),
}
LOSSES = {
    "ppo_clip": ("clip_low", "clip_high", "dual_clip"),
    "gspo": ("clip_low", "clip_high"),
    "cispo": ("clip_low", "clip_high"),
    "gmpo": ("clip_low", "clip_high"),
    "sapo": ("tau_pos", "tau_neg"),
    "dppo_tv": ("clip_low", "clip_high"),
    "reinforce": (),
}
CORRECTIONS = {
    "tis": ("high",),
    "mis": ("high",),
    "sequence_tis": ("high",),
    "sequence_mis": ("high",),
    "icepop": ("low", "high"),
}
KL_ESTIMATORS = ("k1", "k2", "k3", "k3_unbiased")
NORMALIZERS = ("token_mean", "sequence_mean", "sequence_sum", "constant", "decoupled")
TRANSPORTS = ("auto", "shared_memory", "object_store", "nccl", "cuda_ipc")


class ConfigError(ValueError):
    """Something in the configuration, or in what it points to, that the user can mend. Each problem is one sentence."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class RunConfig:
    dir: str = ""  # the run directory; empty: runs/<name of the YAML file>
    seed: int = 0  # every random choice follows from it
    max_restarts: int = 10  # times it goes on from its last checkpoint by itself, after policy, driver or Ray were lost
    grace_s: float = 25.0  # after SIGTERM: seconds in which a step may still finish, before it is abandoned


@dataclass(frozen=True)
class ClusterConfig:
    device: str = "cpu"  # cpu | gpu: which build of vLLM and which DeepSpeed accelerator
    address: str = ""  # a running Ray cluster; empty: RAY_ADDRESS if set, else a private one on this machine
    placement: str = "separate"  # separate | colocated: whether engines and policy ranks share GPUs
    dashboard_port: int = 0  # port of the private cluster's dashboard; 0: any free one
    start_timeout_s: float = 600.0  # how long all workers together may take to come up


@dataclass(frozen=True)
class ModelConfig:
    path: str = "builtin:tiny"  # builtin:tiny, a directory, or a hub name
    trust_remote_code: bool = False  # whether code shipped with the model may run


@dataclass(frozen=True)
class RewardFunction:
    """A reward function. In YAML `name: weight`, or `name: {weight: 1.0, some_option: value, …}`."""

    weight: float = 1.0  # the sum of functions' scores, each times its weight, is the reward
    function: str = ""  # built-in, module:function or file.py:function; empty: the name
    deadline_s: float | None = (
        None  # seconds it may take; null: reward.timeout_s, or more for model, http, judge and code
    )
    options: dict[str, Any] = field(default_factory=dict)  # its keyword arguments


@dataclass(frozen=True)
class DataSource:
    """A data set. In YAML `path`, `path: weight`, or `name: {path: …, weight: …, …}`; null is what `data` says."""

    path: str = ""  # file, directory, hub name or builtin:<task>; empty: the name
    weight: float | None = None  # share of prompts from this set; null for all: each row once an epoch
    split: str = "train"  # of a Hugging Face data set
    subset: str = ""  # of a Hugging Face data set that has several
    source: str = ""  # its name in figures; empty: the row's own field `source`, or the file's name
    prompt_key: str | None = None  # as in data
    answer_key: str | None = None  # as in data
    system: str | None = None  # as in data
    template: str | None = None  # as in data
    as_chat: bool | None = None  # as in data
    reward: dict[str, RewardFunction] = field(default_factory=dict)  # its own reward functions; empty: reward.functions


@dataclass(frozen=True)
class HeldOutSource(DataSource):
    samples: int | None = None  # as in eval
    temperature: float | None = None  # as in eval


@dataclass(frozen=True)
class DataConfig:
    train: dict[str, DataSource] = field(
        default_factory=lambda: {"builtin:zigzag": DataSource("builtin:zigzag")}
    )  # JSONL, JSON, CSV or parquet files, Hugging Face data sets (directory or hub name), builtin:<task>
    prompt_key: str = "prompt"  # the field with the prompt: text, or a list of chat messages; a.b is b in a
    answer_key: str = "answer"  # the field that reward functions get as `answer`
    system: str = ""  # system message put before prompts that have none; makes a chat of a text
    template: str = ""  # Jinja file that makes a text of messages; empty: the tokenizer's own chat template
    as_chat: bool = False  # whether a text prompt becomes a user message, and goes through the template
    shuffle: bool = True  # a new order each epoch, a pure function of run.seed
    overlong: str = "error"  # error | skip: prompts that rollout.max_prompt_tokens does not allow
    on_bad_row: str = "error"  # error | skip: rows that cannot be read; skipped ones are counted and listed


@dataclass(frozen=True)
class TrainerConfig:
    steps: int = 100  # how many batches to train on
    prompts_per_step: int = 32  # groups in a batch
    samples_per_prompt: int = 16  # completions in a group
    updates_per_step: int = 1  # mini-batches, one optimizer update each, in a pass over the batch
    epochs_per_step: int = 1  # passes over the batch
    max_mismatch: float | None = None  # mean |rollout - old| log-prob of a step that stops it; null: by dtype and lag
    max_skipped: int = 3  # updates in a row with a loss or gradient that is not finite; one more stops the run


@dataclass(frozen=True)
class RolloutConfig:
    engines: int = 2  # vLLM engines, data-parallel
    tensor_parallel: int = 1  # GPUs per engine, each with a part of every matrix; on CPU processes
    dtype: str = "float32"  # float32 | bfloat16
    temperature: float = 1.0  # 0.01 or more; also divides the trainer's logits, so that log-probs compare
    top_p: float = 1.0  # only 1: see `check`
    top_k: int = -1  # only -1: see `check`
    max_prompt_tokens: int = 0  # longer prompts: see data.overlong; 0: what the model's window allows
    max_new_tokens: int = 512  # a completion is cut here
    max_sequences: int = 256  # sequences an engine decodes at once
    oversample: float = 0.0  # share of prompts asked for beyond a step's, so that it need not wait for the longest
    block_size: int = 32  # tokens per KV block: prompts shorter than one share nothing
    threads: int = 1  # CPU threads per engine
    kv_cache_mb: int = 64  # KV cache of a CPU engine, MiB
    gpu_memory: float = 0.85  # share of a GPU's memory a GPU engine takes
    enforce_eager: bool = True  # false: CUDA graphs, on CPU compiled layers; slower start, faster decoding
    exact: bool = False  # CPU: engine and trainer compute alike; rollout and old log-probs are equal bit for bit


@dataclass(frozen=True)
class PolicyConfig:
    ranks: int = 2  # DeepSpeed processes; one GPU each on a GPU cluster
    zero_stage: int = 2  # 0 | 1 | 2 | 3
    offload_optimizer: bool = False  # keep optimizer state in host memory (ZeRO 1-3)
    offload_params: bool = False  # keep parameters in host memory (ZeRO 3)
    dtype: str = "float32"  # float32 | bfloat16
    tokens_per_pack: int = 4096  # tokens of one forward and backward
    logprob_chunk: int = 1024  # positions whose logits exist at one time
    gradient_checkpointing: bool = False  # recompute activations in the backward pass
    compile: bool = False  # layers are compiled at their first use: some 20 s, then shorter updates; ZeRO 0-2
    lr: float = 1e-6  # peak learning rate (AdamW)
    lr_schedule: str = "constant"  # constant | linear | cosine, after the warm-up
    warmup_updates: int = 0  # optimizer updates of linear warm-up
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    weight_decay: float = 0.0  # AdamW
    clip_grad: float = 1.0  # global gradient norm; 0: no clipping
    threads: int = 1  # CPU threads per rank; beside GPUs a rank has its part of the cores if that is more
    port: int = 0  # rendezvous port of the ranks; 0: any free one


@dataclass(frozen=True)
class ReferenceConfig:
    kl_coef: float = 0.0  # weight of the KL term; 0: no reference worker exists
    kl_in: str = "loss"  # loss | reward: a term of the loss, or taken off the reward before advantages
    kl_target: float = 0.0  # KL per token that kl_coef is adapted to keep; 0: kl_coef stays
    kl_horizon: int = 10  # steps in which an adapted kl_coef changes by about 20 % at most
    gpus: float = 0.0  # GPUs it takes on a GPU cluster; a fraction shares one, 0 runs it on the CPU


@dataclass(frozen=True)
class CriticConfig:
    """Exists with algorithm.advantage gae only. dtype, zero_stage and the rest of its DeepSpeed settings are the policy's."""

    ranks: int = 1  # DeepSpeed processes; one GPU each on a GPU cluster
    lr: float = 1e-5  # peak learning rate; policy.lr_schedule holds for it too
    warmup_updates: int = 0  # optimizer updates of linear warm-up
    alone_steps: int = 0  # first steps, in which the critic learns and the policy does not
    clip: float = 0.2  # a value that has moved so far from its old one learns no more in a step; 0: no clip
    gamma: float = 1.0  # discount of what is to come, per token
    lam: float = 1.0  # 1: the whole return counts; less: the critic's later estimates take its place
    whiten: bool = True  # bring advantages to mean 0 and deviation 1 over all tokens of the batch
    port: int = 0  # rendezvous port of the ranks; 0: any free one


@dataclass(frozen=True)
class RewardConfig:
    functions: dict[str, RewardFunction] = field(
        default_factory=lambda: {"zigzag": RewardFunction(function="zigzag")}
    )  # built-in, module:function or file.py:function → weight, or weight and options
    workers: int = 2  # reward processes, spread over the cluster
    timeout_s: float = 10.0  # a function that has not judged a sample by then has its process killed
    memory_mb: int = 4096  # memory a reward process may take, MiB; 0: no limit
    batch: int = 32  # samples a batched function gets at once, at most
    concurrency: int = 64  # samples that the async functions of a process are at together, about
    on_failure: str = "drop"  # drop (leaves its group) | abort | score: x, for a sample whose verdict failed
    max_failure_share: float = 0.5  # more failed verdicts than this in a step stop the run
    shuffle: bool = False  # debugging: shuffle rewards within the batch; nothing can be learned then

    @property
    def failure_score(self) -> float | None:
        """x of `on_failure: "score: x"`, or None where a failed verdict has no score."""
        word, colon, score = self.on_failure.partition(":")
        return float(score) if colon and word.strip() == "score" else None


@dataclass(frozen=True)
class AlgorithmConfig:
    """Null stands for the method's own recommendation, which is the default of its function."""

    advantage: str = "grpo"  # advantage estimator; gae: PPO, with a critic
    std: str | None = None  # sample (1/(G-1)) | population (1/G) | none: deviation that advantages are divided by
    eps: float | None = None  # added to the deviation
    whiten: bool | None = None  # gdpo: divide by the batch's deviation at the end
    loss: str = "ppo_clip"  # policy loss
    clip_low: float | None = None  # how far the clip lets the ratio fall below 1 (0.2 for ppo_clip)
    clip_high: float | None = None  # how far above (0.2 for ppo_clip)
    dual_clip: float | None = None  # ppo_clip: bound of the ratio of bad tokens, above 1; null: none
    tau_pos: float | None = None  # sapo: steepness of the gate for good tokens
    tau_neg: float | None = None  # sapo: for bad tokens
    normalize: str = "token_mean"  # token_mean | sequence_mean | sequence_sum | constant | decoupled: weights of tokens
    constant: int = 0  # tokens per sequence that normalize=constant divides by; 0: rollout.max_new_tokens
    control_weight: float = 1e-3  # weight of the first token with normalize=decoupled
    kl: str = "k3"  # k1 | k2 | k3 | k3_unbiased: estimator of KL to the reference


@dataclass(frozen=True)
class CorrectionConfig:
    method: str = "none"  # none | tis | mis | sequence_tis | sequence_mis | icepop: weight by old / rollout probability
    low: float | None = None  # icepop: smaller ratios weigh 0; null: the method's own
    high: float | None = None  # larger ratios are cut to this, or weigh 0; null: the method's own


@dataclass(frozen=True)
class EntropyConfig:
    coef: float = 0.0  # weight of an entropy bonus in the loss
    control: str = "none"  # none | clip_cov | kl_cov: leave out, or hold, tokens of high log-prob-advantage covariance
    share: float = 0.002  # of all tokens, that the control takes
    low: float = 1.0  # clip_cov: takes from tokens with at least this covariance
    high: float = 5.0  # clip_cov: and at most this
    kl_coef: float = 1.0  # kl_cov: weight of the term that holds its tokens near their old log-probs


@dataclass(frozen=True)
class OverlongConfig:
    mask: bool = False  # leave completions cut at rollout.max_new_tokens out of the loss
    buffer: int = 0  # tokens before rollout.max_new_tokens in which the reward falls evenly; 0: none
    penalty: float = 1.0  # how much it has fallen at the end of the buffer


@dataclass(frozen=True)
class DynamicSamplingConfig:
    enabled: bool = False  # drop groups of equal rewards, and ask for other prompts until the batch is full
    max_rounds: int = 20  # rounds of asking in a step, each for a batch at most; then the run stops


@dataclass(frozen=True)
class SyncConfig:
    transport: str = "auto"  # auto | shared_memory | object_store | nccl | cuda_ipc
    verify: bool = True  # each engine proves after each sync, tensor by tensor, that it has the policy's weights


@dataclass(frozen=True)
class PipelineConfig:
    max_lag: int = 0  # updates that may pass between a sample's weights and its training; 0: on-policy
    in_flight: bool = False  # engines take weights in the middle of samples; timing decides what is sampled from what


@dataclass(frozen=True)
class EvalConfig:
    datasets: dict[str, HeldOutSource] = field(default_factory=dict)  # as data.train; without weights
    every: int = 10  # steps between evaluations; also before the first and after the last; 0: only those two
    samples: int = 1  # completions per prompt
    temperature: float = 0.0  # 0: greedy; else 0.01 or more
    pass_score: float = 1.0  # a completion with at least this score counts as solved in pass@k


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 50  # steps between checkpoints; also after the last; 0: only that one
    keep_last: int = 2  # older ones are removed; 0: keep all
    keep_best: str = ""  # a figure, such as eval/all/accuracy: its best step is saved and kept too; -figure: the lowest


@dataclass(frozen=True)
class TrackerConfig:
    """Somewhere else that figures go. In YAML `name`, or `name: {some_option: value, …}`."""

    tracker: str = ""  # tensorboard | wandb | mlflow | module:function | file.py:function; empty: the name
    options: dict[str, Any] = field(default_factory=dict)  # its keyword arguments


@dataclass(frozen=True)
class TrackingConfig:
    to: dict[str, TrackerConfig] = field(default_factory=dict)  # tensorboard, wandb, mlflow, …: beside metrics.jsonl
    samples: int = 8  # prompts of an evaluation whose first completion goes there too; 0: none
    ray: bool = True  # whether Ray's own metrics have the figures: for its dashboard, Prometheus and Grafana


@dataclass(frozen=True)
class WatchdogConfig:
    stall_s: float = 1800.0  # a worker that is waited for, and of which nothing is heard for so long, has stalled
    action: str = "restart"  # restart | abort: what becomes of it, after its stacks were saved


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
