import math
from collections.abc import Callable
from functools import partial
from typing import Any

import plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_columns import draw_columns

from rlsys.algorithms.losses import LOSSES, ppo_clip

ONE = torch.zeros(1, dtype=torch.long)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo_clip": ("ppo_clip", {}),
    "ppo_clip two sides": ("ppo_clip", {"clip_low": 0.3, "clip_high": 0.7}),
    "ppo_clip dual": ("ppo_clip", {"dual_clip": 3.0}),
    "advantage_clip": ("advantage_clip", {}),
    "advantage_clip two sides": ("advantage_clip", {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 2.0}),
    "advantage_clip wide": ("advantage_clip", {"clip_low": 0.7, "dual_clip": 0.0}),
    "gspo": ("gspo", {}),
    "gspo wide": ("gspo", {"clip_low": 0.2, "clip_high": 0.3}),
    "dcpo": ("dcpo", {}),
    "dcpo wide": ("dcpo", {"clip_low": 0.05, "clip_high": 0.7, "max_ratio": 3.0}),
    "cispo": ("cispo", {}),
    "cispo two sides": ("cispo", {"clip_low": 0.3, "clip_high": 0.2}),
    "gmpo": ("gmpo", {}),
    "gmpo two sides": ("gmpo", {"clip_low": 0.2, "clip_high": 0.7}),
    "sapo": ("sapo", {}),
    "sapo steep": ("sapo", {"tau_pos": 3.0, "tau_neg": 0.5}),
    "dppo_tv": ("dppo_tv", {}),
    "ppo_clip without dual": ("ppo_clip", {"dual_clip": 0.0}),
    "dppo_tv truncated": ("dppo_tv", {"max_ratio": 2.0}),
    "dppo_tv two sides": ("dppo_tv", {"clip_low": 0.1, "clip_high": 0.3}),
    "reinforce": ("reinforce", {}),
    "nll": ("nll", {}),
}


def ours(case: str, columns: list[list[float]]) -> tuple[list[float], list[float]]:
    """Losses, and the gradient of their weighted sum."""
    name, options = CASES[case]
    logprobs, old, advantages, weights = (torch.tensor(c, dtype=torch.float32) for c in columns[:4])
    logprobs.requires_grad_()
    losses = LOSSES[name](logprobs, old, advantages, torch.tensor(columns[4], dtype=torch.long), **options)
    (losses * weights).sum().backward()
    assert losses.dtype == torch.float32
    return losses.tolist(), logprobs.grad.tolist()


def weighted_sum(loss: Callable[..., plain.Pair], weights: list[float], logprobs: list[float]) -> float:
    return math.fsum(w * value for w, value in zip(weights, loss(logprobs)[0], strict=True))


def share_in_sequences(columns: list[list[float]]) -> list[list[float]]:
    """The same, but the tokens of a sequence have one advantage and one weight."""
    logprobs, old, advantages, weights, sequences = map(list, columns)
    for sequence in plain.members(sequences):
        for t in sequence:
            advantages[t], weights[t] = advantages[sequence[0]], weights[sequence[0]]
    return [logprobs, old, advantages, weights, sequences]


def theirs(case: str, columns: list[list[float]]) -> tuple[list[float], list[float]]:
    name, options = CASES[case]
    logprobs, old, advantages, weights, sequences = columns
    return plain.LOSSES[name](logprobs, old, advantages, sequences, weights, **options)


# --- the formulas -----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(draw_columns())
def test_losses_and_gradients_equal_a_plain_loop_over_ragged_sequences(columns):
    for case in CASES:
        for actual, expected in zip(ours(case, columns), theirs(case, columns), strict=True):
            assert actual == pytest.approx(expected, rel=1e-5, abs=1e-5), case


@settings(max_examples=15)
@given(draw_columns())
def test_the_plain_gradients_are_the_slopes_of_the_plain_losses(columns):
    """Without weights that the gradient treats as constants: cispo's, and truncated ratios. gspo's loss for a token of its own
    advantage has no slope of its own either."""
    smooth = {case: CASES[case] for case in CASES if not case.startswith(("cispo", "dppo_tv"))}
    smooth["dppo_tv"] = "dppo_tv", {"max_ratio": 1e9}
    for name, options in smooth.values():
        logprobs, old, advantages, weights, sequences = share_in_sequences(columns) if name == "gspo" else columns
        loss = partial(
            plain.LOSSES[name], old=old, advantages=advantages, sequences=sequences, weights=weights, **options
        )
        slopes = plain.differences(partial(weighted_sum, loss, weights), logprobs)
        assert loss(logprobs)[1] == pytest.approx(slopes, rel=1e-4, abs=1e-5), name


@given(draw_columns(), st.randoms(use_true_random=False))
def test_the_order_of_sequences_does_not_matter(columns, rng):
    blocks = plain.members(columns[4])
    rng.shuffle(blocks)
    order = [t for block in blocks for t in block]
    for case in CASES:
        for actual, moved in zip(
            ours(case, columns), ours(case, [[c[t] for t in order] for c in columns]), strict=True
        ):
            assert moved == pytest.approx([actual[t] for t in order], rel=1e-5, abs=1e-6), case


@given(draw_columns())
def test_on_policy_every_loss_has_the_policy_gradient(columns):
    """If the tokens of a sequence share their advantage, sequence losses agree too: 1/|y| of |y| equal terms."""
    logprobs, _, advantages, weights, sequences = share_in_sequences(columns)
    expected = [-w * a for w, a in zip(weights, advantages, strict=True)]
    for case in CASES:
        actual = ours(case, [logprobs, logprobs, advantages, weights, sequences])[1]
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6), case


def loss_and_slope(ratio: float, advantage: float, **options: float) -> tuple[float, float]:
    """The loss of a single token, and its derivative by the log-prob."""
    logprob = torch.tensor([math.log(ratio) - 2.0], requires_grad=True)
    loss = ppo_clip(logprob, torch.tensor([-2.0]), torch.tensor([advantage]), ONE, **options)
    loss.sum().backward()
    return loss.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),  # d(-r A)/d logprob = -r A
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),  # inside the clip
        (1.5, 2.0, -2.4, 0.0),  # a good token 1.2 times as likely is not pushed further
        (0.5, 2.0, -1.0, -1.0),  # but may return
        (0.5, -2.0, 1.6, 0.0),  # a bad token 0.8 times as likely is not pushed further
        (1.5, -2.0, 3.0, 3.0),  # but may return
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_loss_and_gradient_are_as_in_the_paper(ratio, advantage, loss, slope):
    assert loss_and_slope(ratio, advantage) == pytest.approx((loss, slope), rel=1e-5)


def test_the_two_sides_of_the_clip_are_set_separately():
    assert loss_and_slope(1.5, 1.0, clip_low=0.1, clip_high=0.3) == pytest.approx((-1.3, 0.0), rel=1e-5)
    assert loss_and_slope(0.5, -1.0, clip_low=0.1, clip_high=0.3) == pytest.approx((0.9, 0.0), rel=1e-5)
    assert loss_and_slope(1.25, 1.0, clip_low=0.1, clip_high=0.3) == pytest.approx((-1.25, -1.25), rel=1e-5)


def test_a_dual_clip_bounds_the_loss_of_bad_tokens_only():
    assert loss_and_slope(5.0, -2.0) == pytest.approx((10.0, 10.0), rel=1e-5)
    assert loss_and_slope(5.0, -2.0, dual_clip=3.0) == pytest.approx((6.0, 0.0), rel=1e-5)
    assert loss_and_slope(2.5, -2.0, dual_clip=3.0) == pytest.approx((5.0, 5.0), rel=1e-5)
    assert loss_and_slope(5.0, 2.0, dual_clip=3.0) == pytest.approx((-2.4, 0.0), rel=1e-5)


def test_the_dual_clip_is_10_and_a_0_removes_it():
    assert loss_and_slope(9.0, -1.0) == pytest.approx((9.0, 9.0), rel=1e-5)
    assert loss_and_slope(1e5, -1.0) == pytest.approx((10.0, 0.0), rel=1e-5)
    assert loss_and_slope(1e5, -1.0, dual_clip=0) == pytest.approx((1e5, 1e5), rel=1e-4)


def test_on_policy_ppo_clip_has_the_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 0.25])
    ppo_clip(logprobs, logprobs.detach(), advantages, torch.tensor([0, 0, 1])).sum().backward()
    assert torch.equal(logprobs.grad, -advantages)


def test_gspo_clips_a_sequence_as_one():
    """Of the ratios e^0.5 and e^-0.3, neither is within 20 %, but their geometric mean e^0.1 is."""
    logprobs = torch.tensor([0.5, -0.3], requires_grad=True)
    result = LOSSES["gspo"].with_clip(
        logprobs, torch.zeros(2), torch.ones(2), torch.tensor([0, 0]), clip_low=0.2, clip_high=0.2
    )
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([-math.exp(0.1)] * 2, rel=1e-5)
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.1)] * 2, rel=1e-5)
    assert not (result.clipped_low | result.clipped_high).any()


def test_gmpo_clips_each_token_before_the_mean_is_taken():
    """A good sequence with the ratios e^0.5 and e^-0.3 counts e^0.4 and e^-0.3."""
    logprobs = torch.tensor([0.5, -0.3], requires_grad=True)
    result = LOSSES["gmpo"].with_clip(logprobs, torch.zeros(2), torch.ones(2), torch.tensor([0, 0]))
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([-math.exp(0.05)] * 2, rel=1e-5)
    assert logprobs.grad.tolist() == pytest.approx([0.0, -math.exp(0.05)], rel=1e-5)
    assert result.clipped_high.tolist() == [True, False]


def test_cispo_keeps_a_gradient_for_every_token():
    logprobs = torch.tensor([math.log(0.9), math.log(0.01)], requires_grad=True)
    old = torch.tensor([math.log(0.1), math.log(0.1)])
    result = LOSSES["cispo"].with_clip(logprobs, old, torch.tensor([1.0, -1.0]), torch.tensor([0, 0]))
    result.loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-5.0, 0.1], rel=1e-5)  # ratios 9, clipped to 5, and 0.1
    assert result.clipped_high.tolist() == [True, False]


def test_the_gradient_of_sapo_fades_on_both_sides_of_a_ratio_of_1():
    slopes = []
    for ratio in (0.1, 0.5, 1.0, 2.0, 10.0):
        logprob = torch.tensor([math.log(ratio)], requires_grad=True)
        LOSSES["sapo"](logprob, torch.zeros(1), torch.ones(1), ONE).sum().backward()
        slopes.append(-logprob.grad.item() / ratio)
    assert slopes[2] == pytest.approx(1.0)
    assert slopes[0] < slopes[1] < slopes[2] > slopes[3] > slopes[4]


def test_dppo_does_not_clip_a_rare_token_that_ppo_clip_clips():
    """From 0.01 to 0.05 is five times the probability, but a difference of only 0.04."""
    logprobs, old = torch.tensor([math.log(0.05)]), torch.tensor([math.log(0.01)])
    assert not LOSSES["dppo_tv"].with_clip(logprobs, old, torch.ones(1), ONE).clipped_high
    assert ppo_clip.with_clip(logprobs, old, torch.ones(1), ONE).clipped_high


@pytest.mark.parametrize(
    ("advantage", "options", "weight"), [(1.0, {}, 20), (-2.0, {}, 40), (1.0, {"max_ratio": 3}, 3)]
)
def test_dppo_weights_a_token_by_at_most_the_largest_ratio(advantage, options, weight):
    """From 1e-6 to 0.08: 80,000 times the probability, within the bound of 0.15. Its gradient stays, with weight 20."""
    logprobs = torch.tensor([math.log(0.08)], requires_grad=True)
    loss = LOSSES["dppo_tv"](logprobs, torch.tensor([math.log(1e-6)]), torch.tensor([advantage]), ONE, **options)
    loss.sum().backward()
    assert loss.item() == pytest.approx(-math.copysign(weight, advantage), rel=1e-5)
    assert logprobs.grad.item() == pytest.approx(-math.copysign(weight, advantage), rel=1e-5)


@pytest.mark.parametrize(
    ("advantage", "bound"), [(0.25, 1.24), (1.0, 1.3), (3.0, 1.35), (1e6, 1.4), (-0.25, 0.76), (-1.0, 0.7), (-1e6, 0.6)]
)
def test_a_completion_far_from_its_group_may_move_up_to_twice_as_far_as_one_close_to_it(advantage, bound):
    logprob = torch.tensor([math.copysign(5.0, advantage)])
    loss = LOSSES["advantage_clip"](logprob, torch.zeros(1), torch.tensor([advantage]), ONE)
    assert -loss.item() / advantage == pytest.approx(bound, rel=1e-5)


def dcpo_bounds(q: float, **options: float) -> tuple[float, float]:
    """The range of the ratio in which a token of old probability q has a gradient, by its loss far outside of it."""
    advantages, old = torch.tensor([-1.0, 1.0]), torch.tensor([math.log(q)] * 2)
    logprobs = old + torch.tensor([-5.0, 5.0])
    low, high = LOSSES["dcpo"](logprobs, old, advantages, torch.tensor([0, 1]), **options).tolist()
    return low, -high


@pytest.mark.parametrize(
    ("q", "low", "high"),
    [
        (1.0, 0.8, (1 + math.sqrt(1.8)) / 2),  # √(1 - 0.64) = 0.6
        (0.64, 0.5, (1 + 1.5) / 2),  # 1 - 0.64 / 0.64 = 0;  √(1 + 0.8 / 0.64) = 1.5
        (0.9, (1 + math.sqrt(1 - 0.64 / 0.9)) / 2, (1 + math.sqrt(1 + 0.8 / 0.9)) / 2),
        (0.01, 0.5, 5.0),  # √(1 + 80) = 9; the paper's table: from 0.01 to 0.005 or 0.05
        (1e-20, 0.5, 10.0),
    ],
)
def test_dcpo_lets_a_rare_token_change_more_than_a_likely_one(q, low, high):
    assert dcpo_bounds(q) == pytest.approx((low, high), rel=1e-5)


@pytest.mark.parametrize("q", [1.0, 0.3, 1e-30])
def test_dcpo_lets_nothing_change_where_its_clip_is_0(q):
    assert dcpo_bounds(q, clip_low=0, clip_high=0) == (1, 1)


def test_dcpo_bounds_how_far_the_ratio_moves_times_the_new_probability():
    """|r - 1| π = ε at both bounds, which is where they come from."""
    low, high = dcpo_bounds(0.8)
    assert (1 - low) * low * 0.8 == pytest.approx(0.16)
    assert (high - 1) * high * 0.8 == pytest.approx(0.2)


# --- clipped tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.startswith(("ppo_clip", "advantage_clip", "dcpo", "dppo_tv"))]
)
@given(columns=draw_columns())
def test_exactly_the_tokens_without_gradient_are_reported_as_clipped(case, columns):
    name, options = CASES[case]
    columns[2] = [a or 1.0 for a in columns[2]]  # without an advantage there is no gradient
    logprobs, old, advantages = (torch.tensor(c) for c in columns[:3])
    logprobs.requires_grad_()
    result = LOSSES[name].with_clip(logprobs, old, advantages, torch.tensor(columns[4], dtype=torch.long), **options)
    result.loss.sum().backward()
    assert torch.equal(result.clipped_low | result.clipped_high, logprobs.grad == 0)
    assert not (result.clipped_low & result.clipped_high).any()
    assert not (result.clipped_low & (logprobs > old)).any()
    assert not (result.clipped_high & (logprobs < old)).any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.75, 1.0, 1.25, 1.75])
def test_each_side_of_the_clip_reports_its_tokens_without_gradient(ratio, advantage):
    options = {"clip_low": 0.3, "clip_high": 0.2}
    _, slope = loss_and_slope(ratio, advantage, **options)
    result = ppo_clip.with_clip(
        torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), ONE, **options
    )
    assert result.clipped_low.item() == (slope == 0 and ratio < 1)
    assert result.clipped_high.item() == (slope == 0 and ratio > 1)


@given(draw_columns())
def test_with_clip_returns_the_same_loss(columns):
    logprobs, old, advantages = (torch.tensor(c) for c in columns[:3])
    sequences = torch.tensor(columns[4], dtype=torch.long)
    for name, options in CASES.values():
        result = LOSSES[name].with_clip(logprobs, old, advantages, sequences, **options)
        assert torch.equal(result.loss, LOSSES[name](logprobs, old, advantages, sequences, **options))
        assert result.clipped_low.dtype == result.clipped_high.dtype == torch.bool


@pytest.mark.parametrize("name", ["sapo", "reinforce"])
def test_a_loss_without_a_clip_reports_no_clipped_tokens(name):
    result = LOSSES[name].with_clip(
        torch.tensor([-9.0, 0.0]), torch.tensor([0.0, -9.0]), torch.ones(2), torch.tensor([0, 1])
    )
    assert not (result.clipped_low | result.clipped_high).any()


# --- huge ratios ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gap", [50.0, 1e4, 1e30])
def test_a_huge_log_ratio_gives_a_finite_loss_and_gradient(case, gap):
    """Ratios up and down, for good and bad tokens, each token a sequence, and all of them one."""
    name, options = CASES[case]
    for sequences in (torch.arange(4), torch.zeros(4, dtype=torch.long)):
        logprobs = torch.tensor([0.0, -gap, 0.0, -gap], requires_grad=True)
        old, advantages = torch.tensor([-gap, 0.0, -gap, 0.0]), torch.tensor([1.0, 1.0, -1.0, -1.0])
        loss = LOSSES[name](logprobs, old, advantages, sequences, **options)
        loss.sum().backward()
        assert loss.isfinite().all()
        assert logprobs.grad.isfinite().all()


def test_a_bad_token_that_became_far_more_likely_is_pushed_back_or_clipped():
    logprobs = torch.tensor([0.0], requires_grad=True)
    result = ppo_clip.with_clip(logprobs, torch.tensor([-30.0]), torch.tensor([-1.0]), ONE)
    result.loss.sum().backward()
    assert logprobs.grad == 0
    assert result.clipped_high
    ppo_clip(logprobs, torch.tensor([-30.0]), torch.tensor([-1.0]), ONE, dual_clip=0).sum().backward()
    assert logprobs.grad > 0


FAR = [25.0, 1e4, 1e8, 1e30, math.inf]


@pytest.mark.parametrize("gap", FAR)
def test_a_log_ratio_beyond_the_maximum_counts_as_the_maximum(gap):
    for logprob, old, advantage, loss in ((0.0, -gap, -1.0, math.exp(20)), (-gap, 0.0, 1.0, -math.exp(-20))):
        logprobs = torch.tensor([logprob], requires_grad=True)
        actual = ppo_clip(logprobs, torch.tensor([old]), torch.tensor([advantage]), ONE, dual_clip=0)
        actual.sum().backward()
        assert actual.item() == pytest.approx(loss, rel=1e-5)
        assert logprobs.grad.isfinite().all()


# --- gradients and precision ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_flows_into_the_log_probs_alone(name):
    logprobs, old, advantages = (torch.tensor([-1.0, -2.0], requires_grad=True) for _ in range(3))
    LOSSES[name](logprobs, old, advantages, torch.tensor([0, 0])).sum().backward()
    assert logprobs.grad.any()
    assert old.grad is None
    assert advantages.grad is None


@pytest.mark.parametrize("case", CASES)
def test_half_precision_is_computed_in_full_precision(case):
    name, options = CASES[case]
    half = [torch.linspace(-3, -0.1, 7).bfloat16(), torch.linspace(-0.3, -2, 7).bfloat16(), torch.linspace(-1, 1, 7)]
    half[2], sequences = half[2].bfloat16(), torch.tensor([5, 5, 1, -2, -2, -2, 9])
    actual = LOSSES[name](*half, sequences, **options)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, LOSSES[name](*(t.float() for t in half), sequences, **options))


@pytest.mark.parametrize("name", LOSSES)
def test_without_tokens_there_are_no_losses(name):
    logprobs = torch.zeros(0, requires_grad=True)
    result = LOSSES[name].with_clip(logprobs, torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.long))
    result.loss.sum().backward()
    assert result.loss.shape == result.clipped_low.shape == result.clipped_high.shape == logprobs.grad.shape == (0,)


@pytest.mark.parametrize("clip", [{"clip_low": 0.2, "clip_high": 0.3}])
def test_for_sequences_of_one_token_gspo_is_ppo_clip(clip):
    columns = [[-0.5, -1.0, -3.0], [-1.0, -0.5, -3.0], [1.0, -1.0, 2.0], [1.0, 1.0, 1.0]]
    single = LOSSES["gspo"](*map(torch.tensor, columns[:3]), torch.tensor([3, -1, 8]), **clip)
    assert torch.equal(single, ppo_clip(*map(torch.tensor, columns[:3]), torch.tensor([3, -1, 8]), **clip))


def test_the_table_holds_what_it_names():
    assert LOSSES["ppo_clip"] is ppo_clip
    assert all(loss.name == loss.__name__ == name for name, loss in LOSSES.items())
    assert set(LOSSES) == set(plain.LOSSES) == {name for name, _ in CASES.values()}


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_different_shapes_are_refused_and_all_listed(name):
    with pytest.raises(ValueError, match=rf"^{name}: .* are \[2\], \[3\], \[2\], \[2\]; each must be \[T\]"):
        LOSSES[name](torch.zeros(2), torch.zeros(3), torch.zeros(2), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=rf"^{name}: .*\[1, 2\]"):
        LOSSES[name](*[torch.zeros(1, 2)] * 3, torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo_clip", {"clip": 0.2}, "unknown option clip=0.2; known: clip_low, clip_high, dual_clip"),
        ("reinforce", {"clip_low": 0.2}, "unknown option clip_low=0.2; known: none"),
        ("ppo_clip", {"clip_low": -0.1}, "clip_low is -0.1"),
        ("gspo", {"clip_high": -3e-4}, "clip_high is -0.0003"),
        ("cispo", {"clip_high": math.nan}, "clip_high is nan"),
        ("gmpo", {"clip_low": "0.4"}, "clip_low is '0.4'"),
        ("dppo_tv", {"clip_low": -1}, "clip_low is -1"),
        ("ppo_clip", {"dual_clip": 1.0}, "dual_clip is 1.0"),
        ("ppo_clip", {"dual_clip": 0.5}, "dual_clip is 0.5; it must be greater than 1, or 0 for no bound"),
        ("advantage_clip", {"dual_clip": 1.0}, "dual_clip is 1.0; it must be greater than 1, or 0 for no bound"),
        ("dcpo", {"max_ratio": 1.0}, "max_ratio is 1.0; it must be greater than 1"),
        ("sapo", {"tau_pos": 0.0}, "tau_pos is 0.0"),
        ("sapo", {"tau_neg": -1.0}, "tau_neg is -1.0"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(name, options, message):
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
        LOSSES[name](torch.zeros(1), torch.zeros(1), torch.ones(1), ONE, **options)


@pytest.mark.parametrize("name", ["ppo_clip", "advantage_clip", "gspo", "dcpo", "cispo", "gmpo", "dppo_tv"])
def test_none_stands_for_the_default_clip(name):
    values = torch.tensor([-1.0]), torch.tensor([-1.7]), torch.ones(1), ONE
    assert LOSSES[name](*values, clip_low=None, clip_high=None).tolist() == LOSSES[name](*values).tolist()
