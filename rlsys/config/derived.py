"""Rules that follow from several options together, shared by training and its estimates; among them, what `auto` means."""

from rlsys.config.schema import Config, DataSource, HeldOutSource, PolicyConfig
from rlsys.config.transports import TRANSPORTS

DEFAULT_BATCHED_TOKENS = 2048  # tokens that vLLM computes at a time, unless it is given another number
GPU_BATCHED_TOKENS = 8192  # with fewer, a GPU waits for the host while it computes prompts
SEQUENCE_LOSSES = ("gspo", "gmpo")  # one number per sequence, for all its tokens
MEAN_OF_SEQUENCES = (*SEQUENCE_LOSSES, "sapo", "dcpo")  # published as a mean over sequences of means over their tokens


def is_supervised(c: Config) -> bool:
    """True if the policy learns the answers of the data. It samples in evaluations only."""
    return c.algorithm.loss == "nll"


def evaluated_samples(c: Config, source: HeldOutSource) -> int:
    """Completions of each prompt of a held-out set. With 0, the loss on its answers is measured."""
    return c.eval.samples if source.samples is None else source.samples


def shows_answers(c: Config, source: DataSource) -> bool:
    """True if the policy computes the log-probs of a set's own answers, to learn them or to measure its loss."""
    return is_supervised(c) and not (isinstance(source, HeldOutSource) and evaluated_samples(c, source))


def has_engines(c: Config) -> bool:
    """True if anything is sampled."""
    return not is_supervised(c) or any(evaluated_samples(c, source) for source in c.eval.datasets.values())


def kl_estimator(c: Config) -> str:
    """The estimator of KL. In the reward its value weights the policy gradient, and only k1 has the right one."""
    if c.algorithm.kl != "auto":
        return c.algorithm.kl
    return "k1" if c.reference.kl_in == "reward" else "k3"


def token_weighting(c: Config) -> str:
    """How the loss weights tokens: by default as published for losses that are means over sequences, else as DAPO."""
    if c.algorithm.normalize != "auto":
        return c.algorithm.normalize
    return "sequence_mean" if c.algorithm.loss in MEAN_OF_SEQUENCES else "token_mean"


def controlled_share(c: Config) -> float:
    """The share of tokens that entropy.control acts on: by default, that of its authors' scripts."""
    if c.entropy.share is not None:
        return c.entropy.share
    return 2e-4 if c.entropy.control == "clip_cov" else 2e-3


def samples_differ(c: Config) -> bool:
    """True if the probabilities that samples were drawn with are not the policy's: its weights or rounding differ."""
    return c.pipeline.max_lag > 0 or "bfloat16" in (c.rollout.dtype, c.policy.dtype)


def correction_method(c: Config) -> str:
    """The correction of samples that differ. A ratio to the engine's own log-probs needs none."""
    if c.correction.method != "auto":
        return c.correction.method
    if is_supervised(c):
        return "none"
    return "tis" if samples_differ(c) and c.algorithm.anchor == "old" else "none"


def weighs_tokens_alone(c: Config) -> bool:
    """True if the loss of a token depends on no other token. A user's loss may look at whole sequences."""
    built_in = ":" not in c.algorithm.loss and c.algorithm.loss not in SEQUENCE_LOSSES
    return built_in and not correction_method(c).startswith("sequence_")


def updates_of_step(c: Config) -> int:
    return c.trainer.updates_per_step * c.trainer.epochs_per_step


def scores_old(c: Config) -> bool:
    """True if a step computes old log-probs in a pass of its own.

    With one update per step, the forward pass of that update computes them anyway.
    """
    kl_in_reward = c.reference.kl_coef > 0 and c.reference.kl_in == "reward"
    is_anchor = updates_of_step(c) > 1 and c.algorithm.anchor == "old" and not is_supervised(c)
    return is_anchor or kl_in_reward or c.entropy.control != "none"


def adds_packs_in_float32(p: PolicyConfig) -> bool:
    """True if a rank adds up the gradients of its packs in float32.

    In bfloat16, DeepSpeed does that with ZeRO 2 and 3 only. With ZeRO 1, another optimizer of DeepSpeed would do it, whose
    state `zero_state` cannot read.
    """
    return p.dtype == "float32" or (p.grad_dtype == "float32" and p.zero_stage >= 2)


def last_schedule_step(c: Config) -> int:
    """Returns the step at which a linear or cosine learning rate reaches 0."""
    return c.policy.lr_schedule_steps or c.trainer.steps


def sends_shards(c: Config) -> bool:
    """True if each rank sends its own shard of the weights.

    Within a GPU, engines read whole tensors of one rank. Adapters are merged into whole tensors too.
    """
    return c.policy.zero_stage == 3 and not syncs_within_gpus(c) and not c.policy.lora.rank


def syncs_within_gpus(c: Config) -> bool:
    """True if an engine opens the memory of the rank on its GPU: by the choice for colocated GPUs, or the only such one."""
    if c.cluster.placement != "colocated":
        return False
    return c.sync.transport == "auto" or TRANSPORTS[c.sync.transport].placement == "colocated"


def policy_is_reference(c: Config) -> bool:
    """True if the policy's ranks score for the reference too: it is the policy of step 0, which they are without adapters."""
    other = c.reference.path or c.reference.refresh_every or c.model.adapter
    return c.policy.lora.rank > 0 and c.reference.kl_coef > 0 and not other


def has_reference_worker(c: Config) -> bool:
    return c.reference.kl_coef > 0 and not policy_is_reference(c)


def reference_names(c: Config) -> list[str]:
    """The workers of the reference. A single one has no number."""
    if not has_reference_worker(c):
        return []
    return ["reference"] if c.reference.ranks == 1 else [f"reference-{i}" for i in range(c.reference.ranks)]


def max_new_tokens(c: Config, source: DataSource) -> int:
    """The longest completion of a data set's prompts, in tokens."""
    evaluated = c.eval.max_new_tokens if isinstance(source, HeldOutSource) else None
    return source.max_new_tokens or evaluated or c.rollout.max_new_tokens


def max_batched_tokens(c: Config, longest: int) -> int:
    """Returns the most tokens that an engine computes at a time.

    They have room for one token of each sequence, and on CPU, where no prompt is split, for `longest` tokens.
    """
    if c.cluster.device == "gpu":
        return max(GPU_BATCHED_TOKENS, c.rollout.max_sequences)
    return max(DEFAULT_BATCHED_TOKENS, c.rollout.max_sequences, longest)


def reduce_bucket(trained: int) -> int:
    """Elements of gradients that the ranks on GPUs exchange at once: a 16th of all, but enough to keep links busy."""
    return min(max(trained // 16, 50_000_000), 500_000_000)


def logprob_chunk(vocabulary: int) -> int:
    """Positions whose logits a rank computes at the same time: about a gigabyte of float32 at most."""
    return 1024 if vocabulary <= 200_000 else 256


def runs_eagerly(c: Config) -> bool:
    """True if engines compute layer by layer: by default on CPU, where compiling takes longer than a short run gains."""
    return c.cluster.device == "cpu" if c.rollout.enforce_eager is None else c.rollout.enforce_eager


def shares_gpus_with_models(c: Config) -> bool:
    """True if a critic or a reference computes on the policy's GPUs."""
    others = c.algorithm.advantage == "gae" or (has_reference_worker(c) and c.reference.place != "cpu")
    return c.cluster.placement == "colocated" and others
