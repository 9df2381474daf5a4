"""The configuration: one tree of frozen dataclasses.

The comment next to an option documents it, and `rlsys validate --options` prints it. A default is a recommendation.
The sections of the method are in `methods`, the others here.
`loading` reads the tree from defaults ← YAML ← `key=value`, and `rlsys.checks` finds what does not fit together.
Nothing heavy is imported, so `rlsys validate` answers at once.
"""

from dataclasses import dataclass, field
from typing import Any

from rlsys.config.allowed_values import not_negative, one_of, positive, share
from rlsys.config.methods import AlgorithmConfig, CorrectionConfig, CriticConfig, EntropyConfig, ReferenceConfig
from rlsys.config.transports import TRANSPORTS

MIN_TEMPERATURE = 0.01  # vLLM samples at this temperature in place of a lower one above 0


@dataclass(frozen=True)
class RunConfig:
    dir: str = ""  # the run directory; empty: runs/<name of the YAML file>
    seed: int = not_negative(0)  # every random choice follows from it
    max_restarts: int = not_negative(10)  # restarts without a new checkpoint, after the loss of policy, driver or Ray


@dataclass(frozen=True)
class ClusterConfig:
    device: str = one_of("cpu", "gpu")  # decides the build of vLLM and DeepSpeed's accelerator
    address: str = ""  # address of a running Ray cluster; empty: RAY_ADDRESS if set, else a private one
    placement: str = one_of("separate", "colocated")  # whether engines and policy ranks share GPUs
    start_timeout_s: float = positive(600.0)  # seconds within which all workers must have started, downloads included
    env: dict[str, str] = field(
        default_factory=dict
    )  # environment of ranks and engines: {NCCL_IB_HCA: mlx5}; no secrets


@dataclass(frozen=True)
class ModelConfig:
    path: str = "builtin:tiny"  # builtin:tiny, a directory, or a Hugging Face hub name
    trust_remote_code: bool = False  # run the code that ships with the model
    adapter: str = ""  # directory of a PEFT adapter to start from, with its own numbers in policy.lora; empty: none


@dataclass(frozen=True)
class FrozenModel:
    """A model that is never trained, such as a judge. In YAML `name: {path: …, engines: 1}`."""

    path: str = ""  # named as model.path; empty: the name of the entry
    engines: int = 1  # vLLM engines with the settings of rollout, each on a GPU of its own, or on the CPU


@dataclass(frozen=True)
class RewardFunction:
    """A reward function. In YAML `name: weight`, or `name: {weight: 1.0, some_option: value, …}`."""

    weight: float = 1.0  # the reward is the sum of all functions' scores, each times its weight
    function: str = ""  # built-in name, module:function or file.py:function; empty: the name of the entry
    deadline_s: float | None = None  # seconds; null: reward.timeout_s, or more for model, http, judge and code
    options: dict[str, Any] = field(default_factory=dict)  # the function's keyword arguments


@dataclass(frozen=True)
class DataSource:
    """A data set. In YAML `path`, `path: weight`, or `name: {path: …, weight: …, …}`."""

    path: str = ""  # file, directory, hub name, or <package>:<task>, as data.train has it; empty: the entry's name
    weight: float | None = None  # share of the prompts; null for every set: each row once per epoch
    split: str = "train"  # split of a Hugging Face data set
    subset: str = ""  # subset of a Hugging Face data set that has several
    source: str = ""  # name in metrics; empty: the row's field `source`, else the file's name
    prompt_key: str | None = None  # replaces data.prompt_key
    answer_key: str | None = None  # replaces data.answer_key
    system: str | None = None  # replaces data.system
    template: str | None = None  # replaces data.template
    as_chat: bool | None = None  # replaces data.as_chat
    template_options: dict[str, Any] | None = None  # replaces data.template_options
    continue_final_message: bool | None = None  # replaces data.continue_final_message
    max_new_tokens: int | None = None  # a lower limit than rollout.max_new_tokens
    reward: dict[str, RewardFunction] = field(default_factory=dict)  # its own reward functions; empty: reward.functions
    options: dict[str, Any] = field(default_factory=dict)  # of a reasoning_gym task or verifiers taskset: {size: 2000}
    episode: str = ""  # replaces episode.play


@dataclass(frozen=True)
class HeldOutSource(DataSource):
    samples: int | None = None  # replaces eval.samples
    temperature: float | None = None  # replaces eval.temperature
    max_new_tokens: int | None = None  # replaces eval.max_new_tokens


@dataclass(frozen=True)
class DataConfig:
    train: dict[str, DataSource] = field(
        default_factory=lambda: {"builtin:zigzag": DataSource("builtin:zigzag")}
    )  # JSONL, JSON, CSV or parquet files, Hugging Face data sets (directory or hub name), builtin:<task>, reasoning_gym:<task>, verifiers:<taskset>
    prompt_key: str = "prompt"  # field with the prompt: a text or a list of chat messages; a.b is field b of field a
    answer_key: str = "answer"  # field that reward functions receive as `answer`, and supervised training learns
    system: str = ""  # system message for prompts without one; it turns a text prompt into a chat
    template: str = ""  # Jinja file that renders messages as text; empty: the tokenizer's own chat template
    as_chat: bool = False  # turn a text prompt into a user message and apply the chat template
    template_options: dict[str, Any] = field(
        default_factory=dict
    )  # values that the chat template knows by name, such as {enable_thinking: false}
    continue_final_message: bool = False  # messages that end with the assistant's: let the model continue the last one
    shuffle: bool = True  # use a new order in each epoch, derived from run.seed
    overlong: str = one_of("error", "skip")  # what happens to prompts longer than rollout.max_prompt_tokens
    on_bad_row: str = one_of("error", "skip")  # what happens to unreadable rows; skipped rows are counted and listed


@dataclass(frozen=True)
class TrainerConfig:
    steps: int = positive(100)  # training steps, one batch each
    prompts_per_step: int = positive(32)  # groups in a batch
    samples_per_prompt: int = positive(16)  # completions in a group
    updates_per_step: int = positive(1)  # mini-batches in a pass over the batch, one optimizer update each
    epochs_per_step: int = positive(1)  # passes over the batch
    max_mismatch: float | None = positive(
        None
    )  # limit of a step's mean |rollout - old| log-prob; null: by dtype and lag


@dataclass(frozen=True)
class RolloutConfig:
    engines: int = positive(2)  # vLLM engines, data-parallel
    tensor_parallel: int = positive(1)  # GPUs per engine (processes on CPU); each holds a part of every matrix
    dtype: str = one_of("float32", "bfloat16", gpu="bfloat16")  # number format of the engines' weights and activations
    temperature: float = positive(1.0)  # 0.01 or more; also divides the trainer's logits: log-probs stay comparable
    max_prompt_tokens: int = not_negative(0)  # longest prompt, see data.overlong; 0: what the model's window allows
    max_new_tokens: int = positive(512)  # longest completion; it is truncated there
    min_new_tokens: int = not_negative(0)  # shortest completion; before it, no token that ends one is sampled
    stop: list[str] = field(default_factory=list)  # texts at which a completion ends; they stay in it, and are trained
    stop_token_ids: list[int] = field(default_factory=list)  # tokens that end a completion, besides end-of-sequence
    max_sequences: int = positive(256, gpu=1024)  # sequences that an engine decodes at the same time
    oversample: float = not_negative(0.0)  # extra prompts, as a share of a step's; the slowest move to a later step
    threads: int = positive(1)  # CPU threads per engine; auto: its share of the cores, or 1 for a small model
    kv_cache_mb: int = positive(64)  # KV cache of a CPU engine, in MiB
    gpu_memory: float = 0.85  # share of a GPU's memory that an engine takes
    enforce_eager: bool | None = None  # false: CUDA graphs, on CPU compiled layers; null: true on CPU, false on GPUs
    exact: bool = False  # CPU only: rollout and old log-probs are equal bit for bit, because both compute alike


@dataclass(frozen=True)
class LoraConfig:
    rank: int = not_negative(0)  # columns and rows of each adapter's two matrices; 0: no LoRA, all weights are trained
    alpha: float = not_negative(0.0)  # an adapter is multiplied by alpha / rank; usually twice the rank
    targets: list[str] = field(default_factory=lambda: ["all-linear"])  # layers such as [q_proj, v_proj], or all-linear


@dataclass(frozen=True)
class PolicyConfig:
    ranks: int = positive(2)  # DeepSpeed processes, one GPU each on a GPU cluster
    sequence_parallel: int = positive(1)  # ranks that share each pack's tokens, for long sequences; divides the ranks
    zero_stage: int = 2  # 0 | 1 | 2 | 3: how much of the training state DeepSpeed splits over the ranks
    offload: list[str] = field(
        default_factory=list
    )  # kept in host memory: optimizer (ZeRO 1-3), params (ZeRO 3), activations (layers' inputs, with gradient_checkpointing)
    dtype: str = one_of("float32", "bfloat16", gpu="bfloat16")  # number format of forward and backward
    grad_dtype: str = one_of(
        "float32", "bfloat16"
    )  # format in which a bfloat16 policy adds up gradients of ranks, and with ZeRO 2 and 3 those of packs
    head_dtype: str | None = one_of("float32", default=None)  # of the logits, in training alone; null: policy.dtype
    tokens_per_pack: int = positive(4096, gpu=16384)  # token budget of one forward and backward
    gradient_checkpointing: bool | None = None  # recompute activations in backward; null: if a GPU lacks room for them
    compile: bool = False  # compile layers at their first use (about 20 s) for faster updates; ZeRO 0-2
    lora: LoraConfig = field(default_factory=LoraConfig)  # train adapters only, not the model's own weights
    lr: float = positive(1e-6)  # AdamW: peak learning rate
    lr_schedule: str = one_of("constant", "linear", "cosine")  # course of the learning rate after the warm-up
    lr_schedule_steps: int | None = positive(None)  # step at which a falling rate is 0; null: trainer.steps
    warmup_updates: int = not_negative(0)  # optimizer updates of linear warm-up
    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.95]
    )  # AdamW: decay of the running means of the gradient and of its square
    weight_decay: float = not_negative(0.0)  # AdamW: weight decay
    clip_grad: float = not_negative(1.0)  # largest global gradient norm; 0: no clipping
    threads: int = positive(1)  # CPU threads per rank; auto: as for engines; on GPU nodes at least its share


@dataclass(frozen=True)
class RewardConfig:
    functions: dict[str, RewardFunction] = field(
        default_factory=lambda: {"zigzag": RewardFunction(function="zigzag")}
    )  # built-in, module:function or file.py:function, each with its weight, or with weight and options
    workers: int = positive(2)  # reward processes, spread over the cluster
    timeout_s: float = positive(10.0)  # seconds a function has for a sample; then its process is killed
    memory_mb: int = not_negative(4096)  # memory limit of a reward process, in MiB; 0: no limit
    on_failure: str = "drop"  # drop (from its group) | abort | score: x: what happens to a sample whose verdict failed
    max_failure_share: float = share(0.5)  # share of failed verdicts in a step above which the run stops
    per_token: bool = False  # divide a reward, penalties included, by its completion's tokens before mean and deviation
    shuffle: bool = False  # debugging: shuffle rewards within the batch, so that nothing can be learned

    @property
    def failure_score(self) -> float | None:
        """x of `on_failure: "score: x"`, or None where a failed verdict has no score."""
        word, colon, score = self.on_failure.partition(":")
        return float(score) if colon and word.strip() == "score" else None


@dataclass(frozen=True)
class EpisodeConfig:
    play: str = ""  # module:function, file.py:function or <package>:<environment>; empty, without tools: single answers
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the function, settings of the environment
    tools: list[Any] = field(default_factory=list)  # python, module:function, file.py:function, {mcp: {command: […]}}
    tool_parser: str = ""  # vLLM's parser that reads the model's tool calls; empty: as the model's family needs
    reasoning_parser: str = ""  # vLLM's parser that splits off the model's reasoning; empty: none
    on_bad_call: str = one_of("observe", "end")  # a tool call that cannot be read: tell the model, or end the episode
    max_turns: int = positive(8)  # turns of the model
    max_tokens: int = not_negative(0)  # tokens that the model may write in all turns; 0: as many as the window takes
    window: int = positive(4096)  # longest sequence with all that the environment says; at most the model's window
    step_timeout_s: float = positive(30.0)  # most seconds between two turns; after these the episode fails
    timeout_s: float = positive(600.0)  # most seconds between turns, all added up
    workers: int = positive(2)  # episode processes, spread over the cluster
    concurrency: int = positive(256)  # episodes that a process plays at the same time
    memory_mb: int = not_negative(4096)  # memory limit of an episode process, in MiB; 0: no limit


@dataclass(frozen=True)
class OverlongConfig:
    mask: bool = False  # leave completions and episodes that were truncated at a limit out of the loss
    buffer: int = not_negative(0)  # tokens before rollout.max_new_tokens over which the reward falls linearly; 0: none
    penalty: float = not_negative(1.0)  # how much the reward has fallen at the end of the buffer


@dataclass(frozen=True)
class DynamicSamplingConfig:
    enabled: bool = False  # drop groups of equal rewards, and sample other prompts until the batch is full
    max_rounds: int = positive(20)  # rounds of sampling in a step, each of one batch at most; then the run stops


@dataclass(frozen=True)
class SyncConfig:
    transport: str = one_of("auto", *TRANSPORTS)  # how weights are sent from the policy to the engines
    verify: bool = True  # prove after each sync, tensor by tensor, that every engine has the policy's weights


@dataclass(frozen=True)
class PipelineConfig:
    max_lag: int = not_negative(0)  # updates that may pass between a sample's weights and its training; 0: on-policy
    in_flight: bool = False  # engines take new weights in the middle of samples; timing decides at which token


@dataclass(frozen=True)
class EvalConfig:
    datasets: dict[str, HeldOutSource] = field(default_factory=dict)  # as in data.train, without weights
    every: int = not_negative(10)  # steps between evaluations; 0: only before the first step and after the last
    samples: int = 1  # completions per prompt; 0, in supervised training: none, but the loss on the rows' answers
    temperature: float = 0.0  # 0: greedy; else 0.01 or more
    top_p: float = 1.0  # sample from the likeliest tokens that have this probability together; 1: from all
    top_k: int = -1  # sample from this many of the likeliest tokens; -1: from all
    max_new_tokens: int | None = positive(None)  # longest completion; null: rollout.max_new_tokens
    pass_score: float = 1.0  # lowest score of a completion that counts as solved in pass@k


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = not_negative(50)  # steps between checkpoints; 0: only after the last step
    keep_last: int = not_negative(2)  # newest checkpoints that are kept; 0: all
    keep_best: str = ""  # also keep the step with the best value of this metric: eval/all/accuracy; -kl: the lowest


@dataclass(frozen=True)
class TrackerConfig:
    """Somewhere else that metrics go. In YAML `name`, or `name: {some_option: value, …}`."""

    tracker: str = ""  # tensorboard | wandb | mlflow | module:function | file.py:function; empty: the name of the entry
    options: dict[str, Any] = field(default_factory=dict)  # the tracker's keyword arguments


@dataclass(frozen=True)
class TrackingConfig:
    to: dict[str, TrackerConfig] = field(default_factory=dict)  # tensorboard, wandb, mlflow, …: besides metrics.jsonl
    samples: int = not_negative(8)  # prompts of an evaluation whose first completion is tracked too; 0: none


@dataclass(frozen=True)
class WatchdogConfig:
    stall_s: float = positive(1800.0)  # seconds without an answer after which a worker has stalled


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    models: dict[str, FrozenModel] = field(
        default_factory=dict
    )  # frozen models by the names under which reward functions ask them
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
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
