import math
from typing import Any

import plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algorithms.losses import LOSSES, ppo_clip

ONE = torch.zeros(1, dtype=torch.long)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo_clip": ("ppo_clip", {}),
    "ppo_clip two sides": ("ppo_clip", {"clip_low": 0.3, "clip_high": 0.7}),
    "ppo_clip dual": ("ppo_clip", {"dual_clip": 3.0}),
    "gspo": ("gspo", {}),
    "gspo wide": ("gspo", {"clip_low": 0.2, "clip_high": 0.3}),
    "cispo": ("cispo", {}),
    "cispo two sides": ("cispo", {"clip_low": 0.3, "clip_high": 0.2}),
    "gmpo": ("gmpo", {}),
    "gmpo two sides": ("gmpo", {"clip_low": 0.2, "clip_high": 0.7}),
    "sapo": ("sapo", {}),
    "sapo steep": ("sapo", {"tau_pos": 3.0, "tau_neg": 0.5}),
    "dppo_tv": ("dppo_tv", {}),
    "dppo_tv two sides": ("dppo_tv", {"clip_low": 0.1, "clip_high": 0.3}),
    "reinforce": ("reinforce", {}),
}

# Sixteenths are exact in single precision and so are their differences: no ratio lies within rounding of a bound.
LOGPROBS = st.integers(-80, 0).map(lambda n: n / 16)
TOKEN = st.tuples(LOGPROBS, LOGPROBS, st.integers(-24, 24).map(lambda n: n / 8), st.integers(1, 8).map(lambda n: n / 8))
# Sequences by id and length: the ids in no order, with gaps and below zero.
LENGTHS = st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 5)), max_size=5, unique_by=lambda pair: pair[0])


@st.composite
def tokens(draw: st.DrawFn) -> list[list[float]]:
    """Log-probs, old log-probs, advantages, weights and sequences, [T] each."""
    sequences = [label for label, length in draw(LENGTHS) for _ in range(length)]
    rows = draw(st.lists(TOKEN, min_size=len(sequences), max_size=len(sequences)))
    return [[row[i] for row in rows] for i in range(4)] + [sequences]


def ours(case: str, columns: list[list[float]]) -> tuple[list[float], list[float]]:
    """Losses, and the gradient of their weighted sum."""
    name, options = CASES[case]
    logprobs, old, advantages, weights = (torch.tensor(c, dtype=torch.float32) for c in columns[:4])
    logprobs.requires_grad_()
    losses = LOSSES[name](logprobs, old, advantages, torch.tensor(columns[4], dtype=torch.long), **options)
    (losses * weights).sum().backward()
    assert losses.dtype == torch.float32
    return losses.tolist(), logprobs.grad.tolist()


def theirs(case: str, columns: list[list[float]]) -> tuple[list[float], list[float]]:
    name, options = CASES[case]
    logprobs, old, advantages, weights, sequences = columns
    return plain.LOSSES[name](logprobs, old, advantages, sequences, weights, **options)


# --- the formulas --------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(tokens())
def test_losses_and_gradients_equal_a_plain_loop_over_ragged_sequences(columns):
    for case in CASES:
        for found, expected in zip(ours(case, columns), theirs(case, columns), strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-5), case


@settings(max_examples=15)
@given(tokens())
def test_the_plain_gradients_are_the_slopes_of_the_plain_losses(columns):
    """Where the loss is what it says; cispo holds its weight still while it differentiates."""
    logprobs, *others, weights, sequences = columns
    for name, options in [CASES[case] for case in CASES if not case.startswith("cispo")]:

        def total(at: list[float], name: str = name, options: dict[str, Any] = options) -> float:
            losses = plain.LOSSES[name](at, *others, sequences, weights, **options)[0]
            return math.fsum(w * loss for w, loss in zip(weights, losses, strict=True))

        gradient = plain.LOSSES[name](logprobs, *others, sequences, weights, **options)[1]
        assert gradient == pytest.approx(plain.differences(total, logprobs), rel=1e-4, abs=1e-5), name


@given(tokens(), st.randoms(use_true_random=False))
def test_the_order_of_sequences_does_not_matter(columns, rng):
    blocks = plain.members(columns[4])
    rng.shuffle(blocks)
    order = [t for own in blocks for t in own]
    for case in CASES:
        for found, moved in zip(ours(case, columns), ours(case, [[c[t] for t in order] for c in columns]), strict=True):
            assert moved == pytest.approx([found[t] for t in order], rel=1e-5, abs=1e-6), case


@given(tokens())
def test_on_policy_every_gradient_is_the_policy_gradient_when_a_sequence_shares_its_advantage(columns):
    """Σ over the sequence for the losses of whole sequences, whose every token carries 1/|y| of each token's loss."""
    for own in plain.members(columns[4]):
        for t in own:
            columns[2][t], columns[3][t] = columns[2][own[0]], columns[3][own[0]]
    logprobs, _, advantages, weights, sequences = columns
    expected = [-w * a for w, a in zip(weights, advantages, strict=True)]
    for case in CASES:
        found = ours(case, [logprobs, logprobs, advantages, weights, sequences])[1]
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), case


def loss_and_slope(ratio: float, advantage: float, **options: float) -> tuple[float, float]:
    """The loss and its derivative by the log-prob, for a single token."""
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
        (1.5, 2.0, -2.4, 0.0),  # a good token already 1.2 times as likely is pushed no further
        (0.5, 2.0, -1.0, -1.0),  # but may come back
        (0.5, -2.0, 1.6, 0.0),  # a bad token already 0.8 times as likely is pushed no further
        (1.5, -2.0, 3.0, 3.0),  # but may come back
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_loss_and_gradient_are_as_in_the_paper(ratio, advantage, loss, slope):
    assert loss_and_slope(ratio, advantage) == pytest.approx((loss, slope), rel=1e-5)


def test_the_two_sides_of_the_clip_are_set_apart():
    assert loss_and_slope(1.5, 1.0, clip_low=0.1, clip_high=0.3) == pytest.approx((-1.3, 0.0), rel=1e-5)
    assert loss_and_slope(0.5, -1.0, clip_low=0.1, clip_high=0.3) == pytest.approx((0.9, 0.0), rel=1e-5)
    assert loss_and_slope(1.25, 1.0, clip_low=0.1, clip_high=0.3) == pytest.approx((-1.25, -1.25), rel=1e-5)


def test_a_dual_clip_bounds_what_a_bad_token_may_cost_and_leaves_good_ones_alone():
    assert loss_and_slope(5.0, -2.0) == pytest.approx((10.0, 10.0), rel=1e-5)
    assert loss_and_slope(5.0, -2.0, dual_clip=3.0) == pytest.approx((6.0, 0.0), rel=1e-5)
    assert loss_and_slope(2.5, -2.0, dual_clip=3.0) == pytest.approx((5.0, 5.0), rel=1e-5)
    assert loss_and_slope(5.0, 2.0, dual_clip=3.0) == pytest.approx((-2.4, 0.0), rel=1e-5)


def test_on_policy_the_gradient_is_that_of_the_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 0.25])
    ppo_clip(logprobs, logprobs.detach(), advantages, torch.tensor([0, 0, 1])).sum().backward()
    assert torch.equal(logprobs.grad, -advantages)


def test_gspo_clips_a_sequence_as_one():
    """Ratios e^0.5 and e^-0.3: neither within 20 %, their geometric mean e^0.1 is."""
    logprobs = torch.tensor([0.5, -0.3], requires_grad=True)
    told = LOSSES["gspo"].with_clip(
        logprobs, torch.zeros(2), torch.ones(2), torch.tensor([0, 0]), clip_low=0.2, clip_high=0.2
    )
    told.loss.sum().backward()
    assert told.loss.tolist() == pytest.approx([-math.exp(0.1)] * 2, rel=1e-5)
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.1)] * 2, rel=1e-5)
    assert not (told.clipped_low | told.clipped_high).any()


def test_gmpo_clips_each_token_before_the_mean_is_taken():
    """Of e^0.5 and e^-0.3, a good sequence keeps e^0.4 and e^-0.3."""
    logprobs = torch.tensor([0.5, -0.3], requires_grad=True)
    told = LOSSES["gmpo"].with_clip(logprobs, torch.zeros(2), torch.ones(2), torch.tensor([0, 0]))
    told.loss.sum().backward()
    assert told.loss.tolist() == pytest.approx([-math.exp(0.05)] * 2, rel=1e-5)
    assert logprobs.grad.tolist() == pytest.approx([0.0, -math.exp(0.05)], rel=1e-5)
    assert told.clipped_high.tolist() == [True, False]


def test_cispo_lets_no_token_go():
    logprobs = torch.tensor([math.log(0.9), math.log(0.01)], requires_grad=True)
    old = torch.tensor([math.log(0.1), math.log(0.1)])
    told = LOSSES["cispo"].with_clip(logprobs, old, torch.tensor([1.0, -1.0]), torch.tensor([0, 0]))
    told.loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-5.0, 0.1], rel=1e-5)  # ratios 9, held at 5, and 0.1
    assert told.clipped_high.tolist() == [True, False]


def test_sapo_fades_on_both_sides_of_the_policy_that_sampled():
    slopes = []
    for ratio in (0.1, 0.5, 1.0, 2.0, 10.0):
        logprob = torch.tensor([math.log(ratio)], requires_grad=True)
        LOSSES["sapo"](logprob, torch.zeros(1), torch.ones(1), ONE).sum().backward()
        slopes.append(-logprob.grad.item() / ratio)
    assert slopes[2] == pytest.approx(1.0)
    assert slopes[0] < slopes[1] < slopes[2] > slopes[3] > slopes[4]


def test_dppo_leaves_a_rare_token_free_where_the_clipped_ratio_holds_it():
    """From 0.01 to 0.05 is five times as likely and four percent of probability."""
    logprobs, old = torch.tensor([math.log(0.05)]), torch.tensor([math.log(0.01)])
    assert not LOSSES["dppo_tv"].with_clip(logprobs, old, torch.ones(1), ONE).clipped_high
    assert ppo_clip.with_clip(logprobs, old, torch.ones(1), ONE).clipped_high


# --- what the clip took hold of ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["ppo_clip", "ppo_clip two sides", "ppo_clip dual", "dppo_tv", "dppo_tv two sides"])
@given(columns=tokens())
def test_a_token_is_told_exactly_where_its_gradient_is_gone(case, columns):
    name, options = CASES[case]
    columns[2] = [a or 1.0 for a in columns[2]]  # no advantage, no gradient to lose
    logprobs, old, advantages = (torch.tensor(c) for c in columns[:3])
    logprobs.requires_grad_()
    told = LOSSES[name].with_clip(logprobs, old, advantages, torch.tensor(columns[4], dtype=torch.long), **options)
    told.loss.sum().backward()
    assert torch.equal(told.clipped_low | told.clipped_high, logprobs.grad == 0)
    assert not (told.clipped_low & told.clipped_high).any()
    assert not (told.clipped_low & (logprobs > old)).any()
    assert not (told.clipped_high & (logprobs < old)).any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.75, 1.0, 1.25, 1.75])
def test_a_token_counts_as_clipped_exactly_where_its_gradient_is_gone(ratio, advantage):
    options = {"clip_low": 0.3, "clip_high": 0.2}
    _, slope = loss_and_slope(ratio, advantage, **options)
    told = ppo_clip.with_clip(
        torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), ONE, **options
    )
    assert told.clipped_low.item() == (slope == 0 and ratio < 1)
    assert told.clipped_high.item() == (slope == 0 and ratio > 1)


@given(tokens())
def test_what_told_says_comes_with_the_same_loss(columns):
    logprobs, old, advantages = (torch.tensor(c) for c in columns[:3])
    sequences = torch.tensor(columns[4], dtype=torch.long)
    for name, options in CASES.values():
        told = LOSSES[name].with_clip(logprobs, old, advantages, sequences, **options)
        assert torch.equal(told.loss, LOSSES[name](logprobs, old, advantages, sequences, **options))
        assert told.clipped_low.dtype == told.clipped_high.dtype == torch.bool


@pytest.mark.parametrize("name", ["sapo", "reinforce"])
def test_a_loss_without_a_clip_holds_nothing(name):
    told = LOSSES[name].with_clip(
        torch.tensor([-9.0, 0.0]), torch.tensor([0.0, -9.0]), torch.ones(2), torch.tensor([0, 1])
    )
    assert not (told.clipped_low | told.clipped_high).any()


# --- far away ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gap", [50.0, 1e4, 1e30])
def test_a_huge_log_ratio_gives_a_finite_loss_and_gradient(case, gap):
    """Up and down, for good and for bad tokens, each a sequence and all of them one."""
    name, options = CASES[case]
    for sequences in (torch.arange(4), torch.zeros(4, dtype=torch.long)):
        logprobs = torch.tensor([0.0, -gap, 0.0, -gap], requires_grad=True)
        old, advantages = torch.tensor([-gap, 0.0, -gap, 0.0]), torch.tensor([1.0, 1.0, -1.0, -1.0])
        loss = LOSSES[name](logprobs, old, advantages, sequences, **options)
        loss.sum().backward()
        assert loss.isfinite().all()
        assert logprobs.grad.isfinite().all()


def test_a_bad_token_that_became_far_more_likely_is_still_pushed_back_or_told():
    logprobs = torch.tensor([0.0], requires_grad=True)
    told = ppo_clip.with_clip(logprobs, torch.tensor([-30.0]), torch.tensor([-1.0]), ONE)
    told.loss.sum().backward()
    assert logprobs.grad > 0 or told.clipped_high


FAR = [25.0, 1e4, 1e8, 1e30, math.inf]


@pytest.mark.parametrize("gap", FAR)
def test_a_log_ratio_beyond_the_farthest_counts_as_the_farthest(gap):
    for logprob, old, advantage, loss in ((0.0, -gap, -1.0, math.exp(20)), (-gap, 0.0, 1.0, -math.exp(-20))):
        logprobs = torch.tensor([logprob], requires_grad=True)
        found = ppo_clip(logprobs, torch.tensor([old]), torch.tensor([advantage]), ONE)
        found.sum().backward()
        assert found.item() == pytest.approx(loss, rel=1e-5)
        assert logprobs.grad.isfinite().all()


# --- what flows, and in which precision ----------------------------------------------------------------------------------


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
    found = LOSSES[name](*half, sequences, **options)
    assert found.dtype == torch.float32
    assert torch.equal(found, LOSSES[name](*(t.float() for t in half), sequences, **options))


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_are_no_loss(name):
    logprobs = torch.zeros(0, requires_grad=True)
    told = LOSSES[name].with_clip(logprobs, torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.long))
    told.loss.sum().backward()
    assert told.loss.shape == told.clipped_low.shape == told.clipped_high.shape == logprobs.grad.shape == (0,)


@pytest.mark.parametrize("clip", [{"clip_low": 0.2, "clip_high": 0.3}])
def test_a_sequence_of_one_token_has_no_mean_to_take(clip):
    columns = [[-0.5, -1.0, -3.0], [-1.0, -0.5, -3.0], [1.0, -1.0, 2.0], [1.0, 1.0, 1.0]]
    single = LOSSES["gspo"](*map(torch.tensor, columns[:3]), torch.tensor([3, -1, 8]), **clip)
    assert torch.equal(single, ppo_clip(*map(torch.tensor, columns[:3]), torch.tensor([3, -1, 8]), **clip))


def test_the_table_holds_what_it_names():
    assert LOSSES["ppo_clip"] is ppo_clip
    assert all(loss.name == loss.__name__ == name for name, loss in LOSSES.items())
    assert set(LOSSES) == set(plain.LOSSES) == {name for name, _ in CASES.values()}


# --- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_shapes_that_do_not_fit_are_refused_with_all_of_them(name):
    with pytest.raises(ValueError, match=rf"^{name}: .* are \[2\], \[3\], \[2\], \[2\]; each must be \[T\]"):
        LOSSES[name](torch.zeros(2), torch.zeros(3), torch.zeros(2), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=rf"^{name}: .*\[1, 2\]"):
        LOSSES[name](*[torch.zeros(1, 2)] * 3, torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("ppo_clip", {"clip": 0.2}, "unknown option clip=0.2; known: clip_low, clip_high, dual_clip"),
        ("reinforce", {"clip_low": 0.2}, "unknown option clip_low=0.2; known: none"),
        ("ppo_clip", {"clip_low": -0.1}, "clip_low is -0.1"),
        ("gspo", {"clip_high": -3e-4}, "clip_high is -0.0003"),
        ("cispo", {"clip_high": math.nan}, "clip_high is nan"),
        ("gmpo", {"clip_low": "0.4"}, "clip_low is '0.4'"),
        ("dppo_tv", {"clip_low": -1}, "clip_low is -1"),
        ("ppo_clip", {"dual_clip": 1.0}, "dual_clip is 1.0"),
        ("ppo_clip", {"dual_clip": 0.5}, "dual_clip is 0.5"),
        ("sapo", {"tau_pos": 0.0}, "tau_pos is 0.0"),
        ("sapo", {"tau_neg": -1.0}, "tau_neg is -1.0"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(name, options, told):
    with pytest.raises(ValueError, match=f"^{name}: .*{told}"):
        LOSSES[name](torch.zeros(1), torch.zeros(1), torch.ones(1), ONE, **options)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "gmpo", "dppo_tv"])
def test_none_stands_for_the_loss_s_own_clip(name):
    values = torch.tensor([-1.0]), torch.tensor([-1.7]), torch.ones(1), ONE
    assert LOSSES[name](*values, clip_low=None, clip_high=None).tolist() == LOSSES[name](*values).tolist()
