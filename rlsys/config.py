"""The configuration: one tree of frozen dataclasses.

The comment beside a field is its documentation; a default is a recommendation. `config_load` reads it from defaults ← YAML ←
`key=value`; `config_check` finds what does not fit together. Nothing heavy is imported, so `rlsys validate` answers at once.
"""

from dataclasses import dataclass, field

ADVANTAGES = ("grpo",)
LOSSES = ("ppo_clip",)
KL_ESTIMATORS = ("k1", "k2", "k3")
NORMALIZERS = ("token_mean", "sequence_mean", "constant")
REWARDS = ("exact", "contains", "math", "zigzag")
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
    overlong: str = "error"  # error | skip: prompts that rollout.max_prompt_tokens does not allow


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
    max_prompt_tokens: int = 0  # longer prompts: see data.overlong; 0: what the model's window allows
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
    functions: dict[str, float] = field(
        default_factory=lambda: {"zigzag": 1.0}
    )  # built-in, module:function or file.py:function → weight
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
    datasets: list[str] = field(
        default_factory=list
    )  # files like data.train; each row's source is its file's name unless it says
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
