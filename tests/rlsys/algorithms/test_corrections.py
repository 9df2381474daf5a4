import math
from typing import Any

import plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_columns import draw_columns

from rlsys.algorithms.corrections import CORRECTIONS, icepop, mis, sequence_mis, sequence_tis, tis

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tis": ("tis", {}),
    "tis 1.3": ("tis", {"high": 1.3}),
    "mis": ("mis", {}),
    "mis 7": ("mis", {"high": 7.0}),
    "sequence_tis": ("sequence_tis", {}),
    "sequence_tis 7": ("sequence_tis", {"high": 7.0}),
    "sequence_mis": ("sequence_mis", {}),
    "sequence_mis 7": ("sequence_mis", {"high": 7.0}),
    "icepop": ("icepop", {}),
    "icepop narrow": ("icepop", {"low": 0.9, "high": 1.3}),
}


def ours(case: str, columns: list[list[float]]) -> torch.Tensor:
    name, options = CASES[case]
    old, rollout = (torch.tensor(c, dtype=torch.float32) for c in columns[:2])
    return CORRECTIONS[name](old, rollout, torch.tensor(columns[4], dtype=torch.long), **options)


@settings(max_examples=50)
@given(draw_columns())
def test_weights_equal_a_plain_loop_over_ragged_sequences(columns):
    for case, (name, options) in CASES.items():
        result = ours(case, columns)
        assert result.dtype == torch.float32
        expected = plain.CORRECTIONS[name](columns[0], columns[1], columns[4], **options)
        farthest = [min(max(w, math.exp(-20)), math.exp(20)) if w else 0.0 for w in expected]
        assert result.tolist() == pytest.approx(farthest, rel=1e-5), case


@given(draw_columns(), st.randoms(use_true_random=False))
def test_the_order_of_sequences_does_not_matter(columns, rng):
    blocks = plain.members(columns[4])
    rng.shuffle(blocks)
    order = [t for block in blocks for t in block]
    for case in CASES:
        moved = ours(case, [[c[t] for t in order] for c in columns])
        torch.testing.assert_close(moved, ours(case, columns)[order])


def test_two_sequences_by_hand():
    """Token ratios 3 and 1/2, product 3/2; and 3 and 1, product 3."""
    old, sequences = torch.tensor([3.0, 0.5, 3.0, 1.0]).log(), torch.tensor([8, 8, 2, 2])
    rollout = torch.zeros(4)
    for function, expected in (
        (tis, [2, 0.5, 2, 1]),
        (mis, [0, 0.5, 0, 1]),
        (sequence_tis, [1.5, 1.5, 2, 2]),
        (sequence_mis, [1.5, 1.5, 0, 0]),
    ):
        assert function(old, rollout, sequences).tolist() == pytest.approx(expected, rel=1e-5)
    assert icepop(old, rollout, sequences, low=0.6, high=4.0).tolist() == pytest.approx([3, 0, 3, 1], rel=1e-5)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_same_policy_needs_no_correction(name):
    logprobs = torch.tensor([-0.1, -5.0, -0.7])
    assert CORRECTIONS[name](logprobs, logprobs, torch.tensor([4, 4, 1])).tolist() == [1, 1, 1]


def test_a_ratio_at_the_bound_is_kept():
    same = torch.zeros(1), torch.zeros(1), torch.tensor([0])
    for function in (mis, sequence_mis, tis, sequence_tis):
        assert function(*same, high=1.0).item() == 1
    assert icepop(*same, low=1.0, high=1.0).item() == 1


@pytest.mark.parametrize("estimate", [tis, sequence_tis])
def test_without_an_effective_bound_the_weighted_mean_is_that_of_the_policy(estimate):
    """Σ rollout · weight · x = Σ old · x over three tokens."""
    old, rollout, x = (torch.tensor(v) for v in ([0.7, 0.2, 0.1], [0.3, 0.3, 0.4], [1.0, -2.0, 5.0]))
    weight = estimate(old.log(), rollout.log(), torch.arange(3), high=100.0)
    assert (rollout * weight * x).sum().item() == pytest.approx((old * x).sum().item(), rel=1e-5)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_no_gradient_flows_through_a_correction(name):
    old, rollout = torch.tensor([-1.0], requires_grad=True), torch.tensor([-1.1], requires_grad=True)
    assert not CORRECTIONS[name](old, rollout, torch.tensor([0])).requires_grad


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("gap", [50.0, 1e4, 1e30])
def test_a_huge_log_ratio_gives_a_finite_weight(name, gap):
    old, rollout = torch.tensor([0.0, -gap, 0.0, -gap]), torch.tensor([-gap, 0.0, -gap, 0.0])
    for sequences in (torch.arange(4), torch.tensor([0, 1, 0, 1])):
        assert CORRECTIONS[name](old, rollout, sequences).isfinite().all()


@pytest.mark.parametrize("gap", [25.0, 1e30, math.inf])
def test_a_token_that_the_other_policy_never_samples_is_cut_off(gap):
    far = torch.zeros(1), torch.tensor([-gap]), torch.tensor([0])
    assert [f(*far).item() for f in (tis, sequence_tis)] == [2, 2]
    assert [f(*far).item() for f in (mis, sequence_mis, icepop)] == [0, 0, 0]


@pytest.mark.parametrize("case", CASES)
def test_half_precision_is_computed_in_full_precision(case):
    name, options = CASES[case]
    old, rollout = torch.linspace(-3, -0.1, 7).bfloat16(), torch.linspace(-2.7, -0.4, 7).bfloat16()
    sequences = torch.tensor([5, 5, 1, -2, -2, -2, 9])
    result = CORRECTIONS[name](old, rollout, sequences, **options)
    assert result.dtype == torch.float32
    assert torch.equal(result, CORRECTIONS[name](old.float(), rollout.float(), sequences, **options))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_no_tokens_have_no_weights(name):
    assert CORRECTIONS[name](torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_the_table_holds_what_it_names():
    assert all(function.__name__ == name for name, function in CORRECTIONS.items())
    assert set(CORRECTIONS) == set(plain.CORRECTIONS) == {name for name, _ in CASES.values()}


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize(
    ("old", "options", "message"),
    [
        (torch.zeros(3), {}, r"are \[3\], \[2\], \[2\]; each must be \[T\]"),
        (torch.zeros(2), {"tau": 3}, "unknown option tau=3; known: .*high"),
        (torch.zeros(2), {"high": -0.5}, "high is -0.5"),
        (torch.zeros(2), {"high": math.nan}, "high is nan"),
    ],
)
def test_wrong_inputs_are_refused_with_their_value(name, old, options, message):
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
        CORRECTIONS[name](old, torch.zeros(2), torch.zeros(2, dtype=torch.long), **options)


def test_a_lower_bound_above_the_upper_is_refused():
    with pytest.raises(ValueError, match=r"^icepop: .*3\.0.*2\.0"):
        icepop(torch.zeros(1), torch.zeros(1), torch.tensor([0]), low=3.0, high=2.0)
