"""What follows from several options together: rules that training and its estimates share."""

from rlsys.config.schema import Config

DEFAULT_BATCHED_TOKENS = 2048  # tokens that vLLM computes in one go, if it is not told how many


def scores_old(c: Config) -> bool:
    """Whether a step has a pass for old log-probs. With one update and nothing else that asks, the update's own forward pass has them."""
    in_reward = c.reference.kl_coef > 0 and c.reference.kl_in == "reward"
    return c.trainer.updates_per_step * c.trainer.epochs_per_step > 1 or in_reward or c.entropy.control != "none"


def sends_shards(c: Config) -> bool:
    """Whether ranks send what each has, if the transport can. Where devices of an engine have parts of tensors, ranks gather what is sent."""
    return c.policy.zero_stage == 3 and c.cluster.device == "cpu" and c.rollout.tensor_parallel == 1


def max_batched_tokens(c: Config, longest: int) -> int:
    """Tokens that an engine computes at a time at most: room for one of each sequence, and on CPU, where no prompt is cut, for `longest`."""
    return max(DEFAULT_BATCHED_TOKENS, c.rollout.max_sequences, longest if c.cluster.device == "cpu" else 0)
