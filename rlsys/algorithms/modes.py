"""The reward of a model that chooses how to answer by its first token, a control token such as `<think>` or `<short>`."""

from torch import Tensor


def mode_rewards(scores: Tensor, right: Tensor) -> Tensor:
    """Returns -1 for a wrong answer (score 0), `right` for a right one (score 1), linear between.  [N], [N] -> [N]

    Fang et al. 2025 (Thinkless), arXiv 2505.13379: `right` is 1 after <short> and 1 - γ after <think>. It is -1
    where no control token comes first, so that such an answer is always wrong.
    """
    return scores * (1 + right) - 1
