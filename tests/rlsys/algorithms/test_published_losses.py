"""Our losses against the numbers of other libraries' own functions: values and gradients on one ragged batch.

Four completions have 4, 4, 1 and 2 tokens. The tables were made in float32 with verl 0.9.1, OpenRLHF 0.11.2 and TRL
1.16.0 from PyPI. `make published` computes all of them again (test_verl_itself.py, test_openrlhf_itself.py,
test_trl_itself.py): a row is a function, its options, a loss, and its gradient by each log-prob (for value losses, by
each value). Their mask is

    1 1 0 0 1 1 / 1 1 1 1 0 0 / 1 0 0 0 0 0 / 1 1 0 0 0 0

(the first completion holds two tokens of a tool). The functions:

    verl        trainer/ppo/core_algos.py: compute_policy_loss_*, with clip_ratio_low, clip_ratio_high and clip_ratio_c
                as low, high and c; kl_penalty with agg_loss; compute_value_loss; compute_gae_advantage_return.
                trainer/ppo/rollout_corr_helper.py: compute_rollout_correction_weights, for rollout_is and its threshold,
                and compute_rollout_rejection_mask, for rollout_rs. utils/torch_functional.py: entropy_from_logits
    OpenRLHF    models/loss.py: PolicyLoss and ValueLoss; models/utils.py: compute_approx_kl with aggregate_loss
    TRL         trainer/grpo_trainer.py: GRPOTrainer._compute_loss, and the ratios of _generate_and_score_completions
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.algorithms import entropy_control, kl
from rlsys.algorithms.corrections import CORRECTIONS
from rlsys.algorithms.gae import gae, whiten
from rlsys.algorithms.losses import LOSSES
from rlsys.batching.packing import token_weights
from rlsys.forward.logprob_head import ChunkedLogprobs
from rlsys.forward.values import value_loss

LENGTHS = torch.tensor([4, 4, 1, 2])
SEQUENCES = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 3, 3])
LOGPROBS = [-0.65, -0.3, -2.1, -0.9, -1.25, -2.4, -1.7, -2.2, -0.8, -2.0, -0.35]
OLD = [-0.7, -0.75, -1.6, -1.0, -1.27, -3.9, -1.4, -5.4, -2.8, -0.9, -0.5]
ROLLOUT = [-0.72, -1.5, -1.55, -1.1, -1.25, -5.7, -1.38, -4.4, -2.5, -0.95, -0.48]
REFERENCE = [-0.6, -0.5, -2.1, -1.4, -0.25, -2.9, -1.9, -1.2, -0.85, -3.1, -0.75]
MIXED = [1.0, 0.6, -1.2, 0.0, -0.8, -0.4, -1.1, 1.3, 0.5, -1.5, 0.7]  # advantages of tokens
SHARED = [1.0, 1.0, 1.0, 1.0, -0.8, -0.8, -0.8, -0.8, 0.5, -1.5, -1.5]  # advantages of completions
VALUES = [0.3, 0.8, -0.2, 0.5, 0.1, 0.45, 0.9, -0.6, 0.2, 0.0, 0.65]
OLD_VALUES = [0.25, 0.4, 0.1, 0.5, 0.4, 0.5, 0.6, -0.1, 0.2, 0.35, 0.6]
RETURNS = [1.0, 0.9, 1.0, 0.2, 0.0, -0.3, 0.5, 0.4, 0.7, -0.5, 1.2]
REWARDS = [0.1, 0.0, -0.2, 1.0, 0.0, 0.05, 0.0, -0.5, 0.75, 0.0, 1.0]
# Log-probs that are far from the reference: its probability is e^3, e^4 and e^-13 times the policy's.
FAR = [-0.65, -3.5, -2.1, -0.9, -1.25, -2.4, -1.7, -5.2, -0.8, -2.0, -0.35]
FAR_REFERENCE = [-0.6, -0.5, -2.1, -1.4, -0.25, -2.9, -14.7, -1.2, -3.3, -3.1, -0.75]

# function, options and advantages | loss | gradient
SAME = """
verl vanilla low=0.2 high=0.2 c=3 token-mean MIXED | 0.028328 | -0.09557 0 0 0 0.07420 0 0 0 0 0 -0.07393
verl vanilla low=0.2 high=0.28 c=3 seq-mean-token-mean MIXED | -0.088355 | -0.06570 0 0 0 0.05101 0 0 0 0 0 -0.10166
verl vanilla low=0.1 high=0.5 c=10 seq-mean-token-sum MIXED | 0.141070 | -0.26282 0 0 0 0.20404 0.44817 0 0 0 0 -0.20332
verl vanilla low=0.2 high=0.2 c=10 seq-mean-token-sum-norm MIXED | 0.037678 | -0.04380 0 0 0 0.03401 0.07469 0 0 0 0 -0.03389
verl gspo low=0.0003 high=0.0004 seq-mean-token-mean SHARED | 0.603582 | 0 0 0 0 0.15096 0.15096 0.15096 0.15096 0 0 0
verl gspo low=0.2 high=0.3 seq-mean-token-mean SHARED | 0.485016 | -0.06408 -0.06408 -0.06408 -0.06408 0.15096 0.15096 0.15096 0.15096 0 0 0
verl gspo low=0.2 high=0.3 seq-mean-token-mean MIXED | 0.235841 | -0.06408 -0.03845 0.07690 0 0.15096 0.07548 0.20757 0 0 0 -0.05441
verl geo_mean low=0.4 high=0.4 SHARED | 0.495159 | -0.06329 0 -0.06329 -0.06329 0.15096 0.15096 0.15096 0.15096 0 0 0.16547
verl geo_mean low=0.2 high=0.7 SHARED | 0.476825 | -0.06408 -0.06408 -0.06408 -0.06408 0.15478 0.15478 0 0.15478 0 0 0.18287
verl cispo low=0.3 high=0.2 token-mean MIXED | -0.211414 | -0.09557 -0.06545 0.07636 0 0.07420 0.04364 0.07408 -0.14182 -0.05455 0.09545 -0.07393
verl cispo low=1 high=4 token-mean MIXED | 0.755932 | -0.09557 -0.08554 0.06617 0 0.07420 0.16297 0.07408 -0.59091 -0.22727 0.04539 -0.07393
verl sapo tau_pos=1 tau_neg=1.05 MIXED | -0.584229 | -0.06566 -0.05431 0.04360 0 0.05100 0.01101 0.05000 0 -0.00619 0.05534 -0.10100
verl sapo tau_pos=3 tau_neg=0.5 MIXED | 1.090624 | -0.06532 -0.03062 0.04505 0 0.05101 0.05689 0.05072 0 0 0.06071 -0.09590
verl gpg token-mean MIXED | -0.455909 | -0.09091 -0.05455 0.10909 0 0.07273 0.03636 0.10000 -0.11818 -0.04545 0.13636 -0.06364
verl vanilla low=0.2 high=0.2 c=3 token-mean MIXED rollout_is=token 2 | 0.173564 | -0.09750 0 0 0 0.07273 0 0 0 0 0 -0.07247
verl vanilla low=0.2 high=0.2 c=3 token-mean MIXED rollout_is=token 0.5_5 | -0.000104 | -0.09750 0 0 0 0.07273 0 0 0 0 0 -0.07247
verl vanilla low=0.2 high=0.2 c=3 token-mean MIXED rollout_is=sequence 2 | 0.091253 | -0.19114 0 0 0 0.14839 0 0 0 0 0 -0.07619
OpenRLHF PolicyLoss(0.2, 0.28, dual_clip=3) MIXED | 0.010873 | -0.09557 0 0 0 0.07420 0 0 0 0 0 -0.07393
OpenRLHF PolicyLoss(token_level_loss=False) MIXED | -0.031813 | -0.06570 0 0 0 0.05101 0.11204 0 0 0 0 -0.10166
OpenRLHF PolicyLoss(0.2, 0.3, policy_loss_type=gspo) SHARED | 0.485016 | -0.06408 -0.06408 -0.06408 -0.06408 0.15096 0.15096 0.15096 0.15096 0 0 0
OpenRLHF PolicyLoss(is_correction_level=token, is_correction_mode=clip, is_correction_threshold=[0, 2]) MIXED | 0.281324 | -0.09750 0 0 0 0.07273 0.32594 0 0 0 0 -0.07247
OpenRLHF PolicyLoss(is_correction_level=token, is_correction_mode=mask, is_correction_threshold=[0.5, 5]) MIXED | -0.000104 | -0.09750 0 0 0 0.07273 0 0 0 0 0 -0.07247
TRL grpo epsilon=0.2 MIXED | -0.031813 | -0.06570 0 0 0 0.05101 0.11204 0 0 0 0 -0.10166
TRL dapo epsilon=0.2 epsilon_high=0.28 delta=3 MIXED | 0.010873 | -0.09557 0 0 0 0.07420 0 0 0 0 0 -0.07393
TRL dr_grpo epsilon=0.2 max_completion_length=6 MIXED | 0.037678 | -0.04380 0 0 0 0.03401 0.07469 0 0 0 0 -0.03389
TRL cispo epsilon_high=5 MIXED | 0.755932 | -0.09557 -0.08554 0.06617 0 0.07420 0.16297 0.07408 -0.59091 -0.22727 0.04539 -0.07393
TRL sapo MIXED | -0.584229 | -0.06566 -0.05431 0.04360 0 0.05100 0.01101 0.05000 0 -0.00619 0.05534 -0.10100
TRL grpo importance_sampling_level=sequence epsilon=0.0003 epsilon_high=0.0004 SHARED | 0.603582 | 0 0 0 0 0.15096 0.15096 0.15096 0.15096 0 0 0
TRL dapo epsilon=0.2 MIXED token_truncate 2 | 0.281324 | -0.09750 0 0 0 0.07273 0.32594 0 0 0 0 -0.07247
TRL dapo epsilon=0.2 MIXED token_mask 2 | 0.086292 | -0.09750 0 0 0 0.07273 0 0 0 0 0 -0.07247
TRL dapo epsilon=0.2 MIXED token_mask 0.5 to 5 | -0.000104 | -0.09750 0 0 0 0.07273 0 0 0 0 0 -0.07247
TRL dapo epsilon=0.2 MIXED sequence_truncate 2 | 0.199012 | -0.19114 0 0 0 0.14839 0.32594 0 0 0 0 -0.07619
TRL dapo epsilon=0.2 MIXED sequence_mask 2 | -0.004182 | 0 0 0 0 0 0 0 0 0 0 -0.07619
TRL dapo epsilon=0.2 MIXED beta=0.1 | 0.102142 | -0.09604 0.00165 0 0.00358 0.05858 0.16655 0.00165 -0.01562 0.00044 0.00606 -0.07094
verl kl_penalty k1 | 0.081818 | 0.09091 0.09091 0.09091 0.09091 0.09091 0.09091 0.09091 0.09091 0.09091 0.09091 0.09091
verl kl_penalty k2 | 0.179773 | -0.00455 0.01818 0 0.04545 -0.09091 0.04545 0.01818 -0.09091 0.00455 0.10000 0.03636
verl kl_penalty k3 | 0.199343 | -0.00466 0.01648 0 0.03577 -0.15621 0.03577 0.01648 -0.15621 0.00443 0.06065 0.02997
verl kl_penalty k3+ | 0.199343 | -0.00455 0.01818 0 0.04545 -0.09091 0.04545 0.01818 -0.09091 0.00455 0.10000 0.03636
OpenRLHF compute_approx_kl k1 | 0.081818 | 0.09091 0.09091 0.09091 0.09091 0.09091 0.09091 0.09091 0.09091 0.09091 0.09091 0.09091
OpenRLHF compute_approx_kl k2 | 0.179773 | -0.00455 0.01818 0 0.04545 -0.09091 0.04545 0.01818 -0.09091 0.00455 0.10000 0.03636
OpenRLHF compute_approx_kl k3 | 0.199343 | -0.00466 0.01648 0 0.03577 -0.15621 0.03577 0.01648 -0.15621 0.00443 0.06065 0.02997
OpenRLHF compute_approx_kl k3 unbiased_gradient | 0.199343 | -0.00455 0.01818 0 0.04545 -0.09091 0.04545 0.01818 -0.09091 0.00455 0.10000 0.03636
verl compute_value_loss cliprange_value=0.2 token-mean | 0.220341 | -0.06364 0 -0.10909 0.02727 0 0.06818 0.03636 -0.09091 -0.04545 0 -0.05000
verl compute_value_loss cliprange_value=0.2 seq-mean-token-mean | 0.197578 | -0.04375 0 -0.07500 0.01875 0 0.04688 0.02500 -0.06250 -0.12500 0 -0.06875
OpenRLHF ValueLoss(0.2) | 0.220341 | -0.06364 0 -0.10909 0.02727 0 0.06818 0.03636 -0.09091 -0.04545 0 -0.05000
OpenRLHF ValueLoss(None) | 0.207500 | -0.06364 -0.00909 -0.10909 0.02727 0.00909 0.06818 0.03636 -0.09091 -0.04545 0.04545 -0.05000
"""
DIFFERENT = """
verl dppo_tv low=0.15 high=0.15 c=20 token-mean MIXED | 4.539233 | -0.09557 0 0.06617 0 0.07420 0.16297 0.07408 -2.36364 0 0 -0.07393
verl dppo_tv low=0.3 high=0.1 c=3 token-mean MIXED | -0.622239 | -0.09557 0 0.06617 0 0.07420 0.10909 0.07408 0 0 0.04539 -0.07393
verl clip_cov clip_cov_ratio=1 clip_cov_lb=0.2 clip_cov_ub=0.9 low=0.2 high=0.2 token-mean MIXED, log-probs OLD | 0.100000 | -0.09091 0 0.10909 0 0.07273 0 0.10000 -0.11818 -0.04545 0.13636 -0.06364
verl kl_cov kl_cov_ratio=0.2 ppo_kl_coef=0.5 token-mean MIXED | -2.994680 | -0.09557 -0.08554 0.02071 0 0.07420 0.16297 0.07408 -2.89930 -0.33587 -0.00006 -0.07393
verl vanilla low=0.2 high=0.2 c=3 token-mean MIXED rollout_is=token 1e6 rollout_rs=token_k1 0.5_1e6 | 0.105468 | -0.11917 0 0 0 0.08889 0 0 0 0 0 -0.08858
verl geo_mean low=0.4 high=0.4 SHARED rollout_is=token 2 | 0.445125 | -0.07659 0 -0.07659 -0.07659 0.13842 0.13842 0.13842 0.13842 0 0 0.16797
verl kl_penalty k3, log-probs FAR | 3.001626 | -0.00466 0 0 0.03577 -0.15621 0.03577 0 0 0.08345 0.06065 0.02997
verl kl_penalty k3+, log-probs FAR | 3.001626 | -0.00455 -0.27273 0 0.04545 -0.09091 0.04545 1.18182 -0.36364 0.22727 0.10000 0.03636
OpenRLHF compute_approx_kl k3 unbiased_gradient, with OLD | 0.199343 | -0.00478 0.02851 0 0.05024 -0.09275 0.20371 0.01347 -0.90909 0.03359 0.03329 0.04225
OpenRLHF compute_approx_kl k3, log-probs FAR | 3.001626 | -0.00466 0 0 0.03577 -0.15621 0.03577 0 0 0.08345 0.06065 0.02997
"""
Result = tuple[float, list[float]]  # a loss, and its gradient [T]


def read_table(table: str) -> dict[str, Result]:
    rows = (row.split("|") for row in table.strip().splitlines())
    return {name.strip(): (float(loss), [float(slope) for slope in gradient.split()]) for name, loss, gradient in rows}


PUBLISHED = read_table(SAME) | read_table(DIFFERENT)


def differentiate(loss: Callable[[Tensor], Tensor], at: list[float] = LOGPROBS) -> Result:
    leaf = torch.tensor(at, requires_grad=True)
    total = loss(leaf)
    total.backward()
    return total.item(), leaf.grad.tolist()


def mean(values: Tensor, normalize: str = "token_mean") -> Tensor:
    return (values * token_weights(LENGTHS, normalize, constant=6.0 if normalize == "constant" else 0.0)).sum()


def policy(
    loss: str, normalize: str, advantages: list[float] = MIXED, correction: str = "", *bounds: float, **options: Any
) -> Result:
    """Our policy loss. `bounds` are those of the correction, the highest last."""
    old, weights = torch.tensor(OLD), torch.ones(len(OLD))
    if correction:
        named = dict(zip(("high", "low"), reversed(bounds), strict=False))
        weights = CORRECTIONS[correction](old, torch.tensor(ROLLOUT), SEQUENCES, **named)
    return differentiate(
        lambda logprobs: mean(
            LOSSES[loss](logprobs, old, torch.tensor(advantages), SEQUENCES, **options) * weights, normalize
        )
    )


def divergence(name: str) -> Result:
    return differentiate(lambda logprobs: mean(kl.ESTIMATORS[name](logprobs, torch.tensor(REFERENCE))))


def critic(normalize: str, clip: float) -> Result:
    old, returns = torch.tensor(OLD_VALUES), torch.tensor(RETURNS)
    return differentiate(lambda values: mean(value_loss(values, old, returns, clip=clip), normalize), VALUES)


def ppo_clip_with_k3() -> Result:
    (loss, slopes), (k3, k3_slopes) = policy("ppo_clip", "token_mean", dual_clip=0), divergence("k3")
    return loss + 0.1 * k3, [a + 0.1 * b for a, b in zip(slopes, k3_slopes, strict=True)]


def assert_equal(actual: Result, expected: Result) -> None:
    """As far as the table's digits go."""
    assert actual[0] == pytest.approx(expected[0], rel=1e-6, abs=1e-5)
    assert actual[1] == pytest.approx(expected[1], rel=1e-6, abs=1e-5)


def scaled(result: Result, factor: float) -> Result:
    return result[0] * factor, [slope * factor for slope in result[1]]


# --- the same -----------------------------------------------------------------------------------------------------------

OURS: dict[str, Callable[[], Result]] = {
    "verl vanilla low=0.2 high=0.2 c=3 token-mean MIXED": lambda: policy("ppo_clip", "token_mean", dual_clip=3),
    "verl vanilla low=0.2 high=0.28 c=3 seq-mean-token-mean MIXED": lambda: policy(
        "ppo_clip", "sequence_mean", clip_high=0.28, dual_clip=3
    ),
    "verl vanilla low=0.1 high=0.5 c=10 seq-mean-token-sum MIXED": lambda: policy(
        "ppo_clip", "sequence_sum", clip_low=0.1, clip_high=0.5
    ),
    "verl vanilla low=0.2 high=0.2 c=10 seq-mean-token-sum-norm MIXED": lambda: policy("ppo_clip", "constant"),
    "verl gspo low=0.0003 high=0.0004 seq-mean-token-mean SHARED": lambda: policy("gspo", "sequence_mean", SHARED),
    "verl gspo low=0.2 high=0.3 seq-mean-token-mean SHARED": lambda: policy(
        "gspo", "sequence_mean", SHARED, clip_low=0.2, clip_high=0.3
    ),
    "verl gspo low=0.2 high=0.3 seq-mean-token-mean MIXED": lambda: policy(
        "gspo", "sequence_mean", clip_low=0.2, clip_high=0.3
    ),
    "verl geo_mean low=0.4 high=0.4 SHARED": lambda: policy("gmpo", "sequence_mean", SHARED),
    "verl geo_mean low=0.2 high=0.7 SHARED": lambda: policy(
        "gmpo", "sequence_mean", SHARED, clip_low=0.2, clip_high=0.7
    ),
    "verl cispo low=0.3 high=0.2 token-mean MIXED": lambda: policy("cispo", "token_mean", clip_low=0.3, clip_high=0.2),
    "verl cispo low=1 high=4 token-mean MIXED": lambda: policy("cispo", "token_mean"),
    "verl sapo tau_pos=1 tau_neg=1.05 MIXED": lambda: policy("sapo", "sequence_mean"),
    "verl sapo tau_pos=3 tau_neg=0.5 MIXED": lambda: policy("sapo", "sequence_mean", tau_pos=3, tau_neg=0.5),
    "verl gpg token-mean MIXED": lambda: policy("reinforce", "token_mean"),
    "verl vanilla low=0.2 high=0.2 c=3 token-mean MIXED rollout_is=token 2": lambda: policy(
        "ppo_clip", "token_mean", MIXED, "tis", 2, dual_clip=3
    ),
    "verl vanilla low=0.2 high=0.2 c=3 token-mean MIXED rollout_is=token 0.5_5": lambda: policy(
        "ppo_clip", "token_mean", MIXED, "icepop", 0.5, 5, dual_clip=3
    ),
    "verl vanilla low=0.2 high=0.2 c=3 token-mean MIXED rollout_is=sequence 2": lambda: policy(
        "ppo_clip", "token_mean", MIXED, "sequence_tis", 2, dual_clip=3
    ),
    "OpenRLHF PolicyLoss(0.2, 0.28, dual_clip=3) MIXED": lambda: policy(
        "ppo_clip", "token_mean", clip_high=0.28, dual_clip=3
    ),
    "OpenRLHF PolicyLoss(token_level_loss=False) MIXED": lambda: policy("ppo_clip", "sequence_mean", dual_clip=0),
    "OpenRLHF PolicyLoss(0.2, 0.3, policy_loss_type=gspo) SHARED": lambda: policy(
        "gspo", "sequence_mean", SHARED, clip_low=0.2, clip_high=0.3
    ),
    "OpenRLHF PolicyLoss(is_correction_level=token, is_correction_mode=clip, is_correction_threshold=[0, 2]) MIXED": (
        lambda: policy("ppo_clip", "token_mean", MIXED, "tis", 2, dual_clip=0)
    ),
    "OpenRLHF PolicyLoss(is_correction_level=token, is_correction_mode=mask, is_correction_threshold=[0.5, 5]) MIXED": (
        lambda: policy("ppo_clip", "token_mean", MIXED, "icepop", 0.5, 5, dual_clip=0)
    ),
    "TRL grpo epsilon=0.2 MIXED": lambda: policy("ppo_clip", "sequence_mean", dual_clip=0),
    "TRL dapo epsilon=0.2 epsilon_high=0.28 delta=3 MIXED": lambda: policy(
        "ppo_clip", "token_mean", clip_high=0.28, dual_clip=3
    ),
    "TRL dr_grpo epsilon=0.2 max_completion_length=6 MIXED": lambda: policy("ppo_clip", "constant", dual_clip=0),
    "TRL cispo epsilon_high=5 MIXED": lambda: policy("cispo", "token_mean", clip_high=4),
    "TRL sapo MIXED": lambda: policy("sapo", "sequence_mean"),
    "TRL grpo importance_sampling_level=sequence epsilon=0.0003 epsilon_high=0.0004 SHARED": lambda: policy(
        "gspo", "sequence_mean", SHARED
    ),
    "TRL dapo epsilon=0.2 MIXED token_truncate 2": lambda: policy(
        "ppo_clip", "token_mean", MIXED, "tis", 2, dual_clip=0
    ),
    "TRL dapo epsilon=0.2 MIXED token_mask 2": lambda: policy("ppo_clip", "token_mean", MIXED, "mis", 2, dual_clip=0),
    "TRL dapo epsilon=0.2 MIXED token_mask 0.5 to 5": lambda: policy(
        "ppo_clip", "token_mean", MIXED, "icepop", 0.5, 5, dual_clip=0
    ),
    "TRL dapo epsilon=0.2 MIXED sequence_truncate 2": lambda: policy(
        "ppo_clip", "token_mean", MIXED, "sequence_tis", 2, dual_clip=0
    ),
    "TRL dapo epsilon=0.2 MIXED sequence_mask 2": lambda: policy(
        "ppo_clip", "token_mean", MIXED, "sequence_mis", 2, dual_clip=0
    ),
    "TRL dapo epsilon=0.2 MIXED beta=0.1": ppo_clip_with_k3,
    "verl kl_penalty k1": lambda: divergence("k1"),
    "verl kl_penalty k2": lambda: divergence("k2"),
    "verl kl_penalty k3": lambda: divergence("k3"),
    "verl kl_penalty k3+": lambda: divergence("k3_unbiased"),
    "OpenRLHF compute_approx_kl k1": lambda: divergence("k1"),
    "OpenRLHF compute_approx_kl k2": lambda: divergence("k2"),
    "OpenRLHF compute_approx_kl k3": lambda: divergence("k3"),
    "OpenRLHF compute_approx_kl k3 unbiased_gradient": lambda: divergence("k3_unbiased"),
    "verl compute_value_loss cliprange_value=0.2 token-mean": lambda: critic("token_mean", 0.2),
    "verl compute_value_loss cliprange_value=0.2 seq-mean-token-mean": lambda: critic("sequence_mean", 0.2),
    "OpenRLHF ValueLoss(0.2)": lambda: critic("token_mean", 0.2),
    "OpenRLHF ValueLoss(None)": lambda: critic("token_mean", 0),
}


def test_every_number_is_compared():
    assert OURS.keys() == read_table(SAME).keys()


def test_every_number_is_computed_again_by_make_published():
    from test_openrlhf_itself import CRITICS, DIVERGENCES, POLICIES
    from test_trl_itself import NAMES
    from test_verl_itself import CRITICS as VERLS_CRITICS
    from test_verl_itself import DIVERGENCES as VERLS_DIVERGENCES
    from test_verl_itself import LOSSES as VERLS_LOSSES

    computed = [*POLICIES, *DIVERGENCES, *CRITICS, *NAMES, *VERLS_LOSSES, *VERLS_DIVERGENCES, *VERLS_CRITICS]
    assert sorted(computed) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", OURS)
def test_losses_and_gradients_are_those_that_other_libraries_publish(name):
    assert_equal(OURS[name](), PUBLISHED[name])


# verl's entropy_from_logits and logprobs_from_logits; the gradient is that of the entropies' sum with weights 1, -2 and 3
LOGITS = [[0.5, -1.0, 2.0, 0.0], [3.0, 3.0, -2.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
CHOSEN = [2, 3, 0]
ENTROPY = {
    "logprobs": [-0.3423, -2.7618, -1.3863],
    "entropy": [0.8783, 0.9039, 1.3863],
    "gradient": [0.1528, 0.0871, -0.3806, 0.1407, 0.1327, 0.1327, -0.0306, -0.2348, 0, 0, 0, 0],
}
# verl's compute_gae_advantage_return: gamma and lam → advantages, returns
GAE = {
    (1.0, 1.0): (
        [0.83406, 0.48653, 0.90356, 0.62554, -1.25109, -1.39010, -1.59861, -0.62554, 0.69505, 0.83406, 0.48653],
        [0.9, 0.8, 0.8, 1.0, -0.45, -0.45, -0.5, -0.5, 0.75, 1.0, 1.0],
    ),
    (0.9, 0.8): (
        [0.40511, 0.04508, 0.88547, 0.86691, -0.78899, -1.20096, -1.87624, -0.80348, 0.95971, 0.82608, 0.68131],
        [0.50118, 0.45720, 0.61, 1.0, 0.0078, -0.11416, -0.378, -0.5, 0.75, 0.828, 1.0],
    ),
}


def test_verl_computes_the_same_entropy():
    logits = torch.tensor(LOGITS, requires_grad=True)
    logprobs, entropy = ChunkedLogprobs.apply(logits, torch.eye(4), torch.tensor(CHOSEN), 1.0, 2)
    (entropy * torch.tensor([1.0, -2.0, 3.0])).sum().backward()
    assert logprobs.tolist() == pytest.approx(ENTROPY["logprobs"], abs=5e-5)
    assert entropy.tolist() == pytest.approx(ENTROPY["entropy"], abs=5e-5)
    assert logits.grad.flatten().tolist() == pytest.approx(ENTROPY["gradient"], abs=5.1e-5)


@pytest.mark.parametrize("options", GAE)
def test_verl_computes_the_same_advantages_and_returns_from_a_critic(options):
    gamma, lam = options
    estimates, targets = gae(torch.tensor(REWARDS), torch.tensor(OLD_VALUES), SEQUENCES, gamma=gamma, lam=lam)
    advantages, returns = GAE[options]
    assert whiten(estimates).tolist() == pytest.approx(advantages, abs=1e-5)
    assert targets.tolist() == pytest.approx(returns, abs=1e-5)


# --- different on purpose -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("verl dppo_tv low=0.15 high=0.15 c=20 token-mean MIXED", {}),
        (
            "verl dppo_tv low=0.3 high=0.1 c=3 token-mean MIXED",
            {"clip_low": 0.3, "clip_high": 0.1, "max_ratio": 3},
        ),
    ],
)
def test_dppo_has_the_published_gradient_and_a_loss_without_the_log_prob(name, options):
    """verl's loss of a token is a constant times its log-prob. Ours is that constant, and so the sum of verl's gradient."""
    gradient = PUBLISHED[name][1]
    assert_equal(policy("dppo_tv", "token_mean", **options), (sum(gradient), gradient))


def test_clip_cov_excludes_the_published_tokens():
    """verl draws `clip_cov_ratio` of all tokens among those within the bounds; at 1 it takes all of these, as we do.

    It draws in each mini-batch from the log-probs of the moment; we draw before the first update, where these are old.
    """
    chosen = entropy_control.clip_cov(
        np.float32(OLD), np.float32(MIXED), share=1.0, low=0.2, high=0.9, rng=np.random.default_rng(0)
    )
    assert np.flatnonzero(chosen).tolist() == [1, 5]
    old, kept = torch.tensor(OLD), torch.tensor(np.where(chosen, np.float32(0), np.float32(MIXED)))
    actual = differentiate(lambda logprobs: mean(LOSSES["ppo_clip"](logprobs, old, kept, SEQUENCES)), OLD)
    name = "clip_cov clip_cov_ratio=1 clip_cov_lb=0.2 clip_cov_ub=0.9 low=0.2 high=0.2 token-mean MIXED, log-probs OLD"
    assert_equal(actual, PUBLISHED[f"verl {name}"])


def test_kl_cov_holds_the_published_tokens_by_a_square():
    """verl adds coef · |log(π/old)| and has no clip; we add coef · ½ log²(π/old) to any loss.

    The loss below has a clip that never acts.
    """
    chosen = entropy_control.kl_cov(np.float32(LOGPROBS), np.float32(MIXED), share=0.2)
    assert np.flatnonzero(chosen).tolist() == [2, 9]
    old, coef = torch.tensor(OLD), 0.5 * torch.from_numpy(chosen)

    def total(logprobs: Tensor) -> Tensor:
        options = {"clip_low": 1e9, "clip_high": 1e9, "dual_clip": 0}
        loss = LOSSES["ppo_clip"](logprobs, old, torch.tensor(MIXED), SEQUENCES, **options)
        return mean(loss + coef * kl.k2(logprobs, old))

    loss, gradient = PUBLISHED["verl kl_cov kl_cov_ratio=0.2 ppo_kl_coef=0.5 token-mean MIXED"]
    for t in (2, 9):
        log_ratio = LOGPROBS[t] - OLD[t]
        loss += 0.5 / 11 * (log_ratio**2 / 2 - abs(log_ratio))
        gradient = [slope + (i == t) * 0.5 / 11 * (log_ratio + 1) for i, slope in enumerate(gradient)]  # sign: -1
    assert_equal(differentiate(total), (loss, gradient))


def test_a_correction_weighs_a_completion_of_gmpo_by_its_mean_and_verl_by_its_geometric_mean():
    weights = CORRECTIONS["tis"](torch.tensor(OLD), torch.tensor(ROLLOUT), SEQUENCES)
    parts = weights.split(LENGTHS.tolist())
    name = "verl geo_mean low=0.4 high=0.4 SHARED"
    plain, weighted = PUBLISHED[name], PUBLISHED[f"{name} rollout_is=token 2"]
    geometric = torch.cat([part.log().mean().exp().expand(len(part)) for part in parts])
    assert weighted[1] == pytest.approx((torch.tensor(plain[1]) * geometric).tolist(), abs=1e-5)
    arithmetic = torch.cat([part.mean().expand(len(part)) for part in parts])
    actual = policy("gmpo", "sequence_mean", SHARED, "tis", 2)
    assert actual[1] == pytest.approx((torch.tensor(plain[1]) * arithmetic).tolist(), abs=2e-5)


def test_a_masked_token_still_counts_in_the_mean_and_verl_leaves_it_out():
    """verl's rollout_rs takes 2 of 11 tokens out of the mask, and so out of the number of tokens. TRL counts them, as we do."""
    name = "verl vanilla low=0.2 high=0.2 c=3 token-mean MIXED rollout_is=token 1e6 rollout_rs=token_k1 0.5_1e6"
    assert_equal(policy("ppo_clip", "token_mean", MIXED, "mis", 2, dual_clip=3), scaled(PUBLISHED[name], 9 / 11))


@pytest.mark.parametrize("name", ["verl kl_penalty k3, log-probs FAR", "OpenRLHF compute_approx_kl k3, log-probs FAR"])
def test_far_from_the_reference_k3_keeps_a_slope_where_theirs_is_bounded_and_flat(name):
    """Their k3 is at most 10, without gradient. Ours is bounded only where the reference is larger, and keeps its slope there."""
    loss, gradient = PUBLISHED[name]
    gradient = [*gradient]
    for t in (1, 7):  # ref/π counts as 13.6
        loss += (13.6 - math.log(13.6) - 1 - 10) / 11
        gradient[t] = -12.6 / 11
    loss += (math.exp(-13) + 13 - 1 - 10) / 11
    gradient[6] = (1 - math.exp(-13)) / 11
    actual = differentiate(lambda logprobs: mean(kl.k3(logprobs, torch.tensor(FAR_REFERENCE))), FAR)
    assert_equal(actual, (loss, gradient))


def test_far_from_the_reference_k3_unbiased_has_the_published_gradient():
    """Only the value differs, as that of k3."""
    actual = differentiate(lambda logprobs: mean(kl.k3_unbiased(logprobs, torch.tensor(FAR_REFERENCE))), FAR)
    assert actual[1] == pytest.approx(PUBLISHED["verl kl_penalty k3+, log-probs FAR"][1], abs=1e-5)


def test_k3_unbiased_does_not_weigh_stale_tokens_by_their_ratio_and_openrlhf_can():
    """Given old log-probs, OpenRLHF weighs the gradient by min(π/old, 10)."""
    ratios = [min(math.exp(new - old), 10) for new, old in zip(LOGPROBS, OLD, strict=True)]
    weighted = [slope * ratio for slope, ratio in zip(divergence("k3_unbiased")[1], ratios, strict=True)]
    published = PUBLISHED["OpenRLHF compute_approx_kl k3 unbiased_gradient, with OLD"][1]
    assert weighted == pytest.approx(published, abs=1e-5)
