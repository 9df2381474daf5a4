"""The sections of the method: algorithm, correction, entropy, reference and critic."""

from dataclasses import dataclass, field

from rlsys.config.allowed_values import not_negative, one_of, positive, share

# Methods by name, each with its options in `algorithm` or `correction`. The functions are in the files of these names.
ADVANTAGES = {
    "grpo": ("std", "eps"),
    "dr_grpo": (),
    "rloo": (),
    "reinforce_pp": ("whiten_over", "std", "eps"),
    "reinforce_pp_baseline": ("whiten_over", "std", "eps"),
    "opo": (),
    "grpo_passk": ("std", "eps"),
    "gdpo": ("std", "eps", "whiten"),
    "max_rl": ("eps",),
    "remax": (),
    "raw": (),
    "gae": ("whiten",),
}
GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "grpo_passk", "gdpo", "max_rl")
LOSSES = {
    "ppo_clip": ("clip_low", "clip_high", "dual_clip"),
    "advantage_clip": ("clip_low", "clip_high", "dual_clip"),
    "gspo": ("clip_low", "clip_high"),
    "dcpo": ("clip_low", "clip_high", "max_ratio"),
    "cispo": ("clip_low", "clip_high"),
    "gmpo": ("clip_low", "clip_high"),
    "sapo": ("tau_pos", "tau_neg"),
    "dppo_tv": ("clip_low", "clip_high", "max_ratio"),
    "reinforce": (),
    "nll": (),
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


@dataclass(frozen=True)
class AlgorithmConfig:
    """Null stands for the method's own recommendation, which is the default of its function."""

    advantage: str = one_of(*ADVANTAGES, user_function=True)  # advantage estimator; gae: PPO, with a critic
    std: str | None = one_of("sample", "population", "none", default=None)  # divides advantages; G-1, G or none
    eps: float | None = not_negative(None)  # added to that deviation
    whiten: bool | None = None  # gdpo, gae: divide by the batch's deviation, gae also less the mean; null: true
    whiten_over: str | None = one_of(
        "tokens", "samples", default=None
    )  # reinforce_pp: whether mean and deviation are over tokens or samples
    credit: str = one_of("episode", "turn")  # whether episodes are compared, or turns by the reward that followed each
    loss: str = one_of(*LOSSES, user_function=True)  # policy loss; nll: supervised, on the rows' own answers
    anchor: str = one_of("old", "rollout")  # the ratio is to the policy's log-probs before the step, or to the engine's
    clip_low: float | None = not_negative(None)  # how far below 1 the ratio is clipped (ppo_clip: 0.2)
    clip_high: float | None = not_negative(None)  # how far above 1 the ratio is clipped (ppo_clip: 0.2)
    dual_clip: float | None = not_negative(None)  # ppo_clip, advantage_clip: bound where A is below 0 (10); 0: none
    max_ratio: float | None = positive(None)  # dppo_tv: larger ratios weigh as this (20); dcpo: the highest bound (10)
    tau_pos: float | None = positive(None)  # sapo: steepness of the gate at a positive advantage
    tau_neg: float | None = positive(None)  # sapo: steepness of the gate at a negative advantage
    normalize: str = one_of("auto", *NORMALIZERS)  # auto: sequence_mean for gspo, gmpo, sapo, dcpo; else token_mean
    constant: int = not_negative(0)  # tokens per sequence that normalize=constant divides by; 0: rollout.max_new_tokens
    control_weight: float = not_negative(1e-3)  # weight of a control token (α) with normalize=decoupled
    control_tokens: dict[str, float] = field(
        default_factory=dict
    )  # first tokens that choose a mode, with the reward of a right answer in it, as {<short>: 1, <think>: 0.5}; wrong: -1
    kl: str = one_of("auto", *KL_ESTIMATORS)  # KL estimator; auto: k3 in the loss, k1 in the reward


@dataclass(frozen=True)
class CorrectionConfig:
    method: str = one_of("auto", "none", *CORRECTIONS)  # weighs by old / rollout; auto: tis with lag or bfloat16
    low: float | None = not_negative(None)  # icepop: ratios below this have weight 0; null: the method's default
    high: float | None = not_negative(None)  # larger ratios are truncated or have weight 0; null: the method's default


@dataclass(frozen=True)
class EntropyConfig:
    coef: float = not_negative(0.0)  # weight of an entropy bonus in the loss
    control: str = one_of("none", "clip_cov", "kl_cov")  # excludes tokens of high covariance, or holds them by KL
    share: float | None = share(
        None
    )  # share of all tokens that the control acts on; at least one token; null: 2e-4 with clip_cov, 2e-3 with kl_cov


@dataclass(frozen=True)
class ReferenceConfig:
    kl_coef: float = not_negative(0.0)  # weight of the KL term; 0: there is no reference worker
    path: str = ""  # another model with the same tokenizer, named as model.path; empty: the policy of step 0
    kl_in: str = one_of("loss", "reward")  # whether KL is a term of the loss or is subtracted from the reward
    refresh_every: int = not_negative(0)  # steps after which the reference takes the policy's weights; 0: never
    kl_target: float = not_negative(0.0)  # KL per token at which an adaptive kl_coef aims; 0: kl_coef is constant
    ranks: int = positive(1)  # processes that share the scoring
    place: str = one_of(
        "whole", "offload", "split", "cpu"
    )  # each rank has the model on a GPU, or in host memory while it waits; or ZeRO 3 splits it; or ranks compute on the CPU


@dataclass(frozen=True)
class CriticConfig:
    """Used with algorithm.advantage gae only. dtype, zero_stage and its other DeepSpeed settings are the policy's."""

    ranks: int = positive(1)  # DeepSpeed processes, one GPU each on a GPU cluster
    lr: float = positive(1e-5)  # peak learning rate; its course is policy.lr_schedule
    warmup_updates: int = not_negative(0)  # optimizer updates of linear warm-up
    alone_steps: int = not_negative(0)  # first steps, which train the critic only
    clip: float = not_negative(0.2)  # how far a value may move from its old one within a step; 0: no limit
    gamma: float = share(1.0)  # discount per token
    lam: float = share(1.0)  # GAE's lambda; 1: the whole return, lower: more weight on the critic's own later estimates
