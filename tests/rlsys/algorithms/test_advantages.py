import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.algorithms.advantages import (
    ESTIMATORS,
    compute_grpo_outcome_advantage,
    gdpo,
    grpo,
    grpo_passk,
    max_rl,
    opo,
    rloo,
)


@dataclass(frozen=True)
class Samples:
    """What any estimator may ask for, one of each per sample."""

    rewards: list[float]
    groups: list[int]
    lengths: list[int]
    greedy: list[float]
    second: list[float]  # another component of the reward

    def at(self, order: list[int]) -> "Samples":
        return Samples(*([column[i] for i in order] for column in vars(self).values()))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo population": ("grpo", {"std": "population", "eps": 1e-4}),
    "grpo none": ("grpo", {"std": "none"}),
    "grpo wide eps": ("grpo", {"eps": 0.5}),
    "dr_grpo": ("dr_grpo", {}),
    "rloo": ("rloo", {}),
    "reinforce_pp": ("reinforce_pp", {}),
    "reinforce_pp population": ("reinforce_pp", {"std": "population"}),
    "reinforce_pp_baseline": ("reinforce_pp_baseline", {}),
    "reinforce_pp_baseline none": ("reinforce_pp_baseline", {"std": "none"}),
    "opo": ("opo", {}),
    "grpo_passk": ("grpo_passk", {}),
    "grpo_passk sample": ("grpo_passk", {"std": "sample"}),
    "gdpo": ("gdpo", {}),
    "gdpo weights": ("gdpo", {"weights": [0.5, -2.0], "std": "population"}),
    "gdpo whiten": ("gdpo", {"whiten": True}),
    "max_rl": ("max_rl", {}),
    "remax": ("remax", {}),
    "raw": ("raw", {}),
}
ABSOLUTE = ("remax", "raw")  # do not compare samples with each other
WHOLE_BATCH = ("reinforce_pp", "reinforce_pp population")  # compare beyond the group
WITHIN_GROUPS = [case for case in CASES if case not in (*ABSOLUTE, *WHOLE_BATCH)]

EIGHTHS = st.integers(-40, 40).map(
    lambda n: n / 8
)  # exact, so that equal rewards are equal and different ones far apart
ANY = st.floats(-100, 100, width=32)


def drawn(rewards: st.SearchStrategy[float]) -> st.SearchStrategy[Samples]:
    """Ragged groups in any order, their ids with gaps and below zero; completions may be empty."""
    row = st.tuples(rewards, st.sampled_from([-7, 0, 1, 30, 2**40]), st.integers(0, 9), rewards, rewards)
    return st.lists(row, min_size=1, max_size=20).map(lambda rows: Samples(*map(list, zip(*rows, strict=True))))


def ours(case: str, samples: Samples, dtype: torch.dtype = torch.float32, **more: Any) -> Tensor:
    name, options = CASES[case]
    options = options | more
    rewards = torch.tensor(samples.rewards, dtype=dtype)
    lengths = torch.tensor(samples.lengths, dtype=torch.long)
    if name == "gdpo":
        rewards = torch.stack([rewards, torch.tensor(samples.second, dtype=dtype)], 1)
    elif name == "max_rl":
        rewards = rewards.abs()
    elif name == "remax":
        options["greedy"] = torch.tensor(samples.greedy, dtype=dtype)
    return ESTIMATORS[name](rewards, torch.tensor(samples.groups, dtype=torch.long), lengths=lengths, **options)


def theirs(case: str, samples: Samples) -> list[float]:
    name, options = CASES[case]
    rewards: Any = samples.rewards
    if name == "gdpo":
        rewards = list(zip(samples.rewards, samples.second, strict=True))
    elif name == "max_rl":
        rewards = [abs(r) for r in rewards]
    elif name == "remax":
        options = options | {"greedy": samples.greedy}
    elif name == "opo":
        options = options | {"lengths": samples.lengths}
    return plain.ADVANTAGES[name](rewards, samples.groups, **options)


def close(case: str, found: Tensor, expected: Tensor | list[float]) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5, msg=lambda text: f"{case}: {text}")


# --- the formulas --------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(drawn(st.one_of(EIGHTHS, ANY)))
def test_advantages_equal_a_plain_loop_over_ragged_groups(samples):
    for case in CASES:
        found = ours(case, samples)
        assert found.dtype == torch.float32
        close(case, found, theirs(case, samples))


@given(drawn(EIGHTHS), st.sampled_from([1e6, -1e6]))
def test_one_huge_reward_does_not_spoil_the_others(samples, huge):
    for case in CASES:
        samples = replace(samples, rewards=[huge, *samples.rewards[1:]])
        close(case, ours(case, samples), theirs(case, samples))


def test_three_samples_by_hand():
    """Rewards 1 0 0, lengths 1 2 3; the greedy completion earned 1."""
    samples = Samples([1.0, 0.0, 0.0], [4, 4, 4], [1, 2, 3], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0])
    third, sample, population = 1 / 3, (1 / 3) ** 0.5, (2 / 9) ** 0.5  # the two deviations of 1 0 0
    for case, expected in {
        "grpo none": [2 * third, -third, -third],
        "grpo": [2 * third / sample, -third / sample, -third / sample],
        "dr_grpo": [2 * third, -third, -third],
        "rloo": [1.0, -0.5, -0.5],
        "reinforce_pp population": [2 * third / population, -third / population, -third / population],
        "reinforce_pp_baseline none": [2 * third, -third, -third],
        "opo": [5 / 6, -1 / 6, -1 / 6],  # baseline 1·1 / (1 + 2 + 3)
        "grpo_passk": [1.0, 0.0, 0.0],
        "gdpo": [third / sample, -2 * third / sample, third / sample],  # the second component is 0 0 1
        "max_rl": [2.0, -1.0, -1.0],
        "remax": [0.0, -1.0, -1.0],
        "raw": [1.0, 0.0, 0.0],
    }.items():
        assert ours(case, samples).tolist() == pytest.approx(expected, abs=1e-5), case


def test_one_right_of_two_is_one_deviation_away():
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    assert grpo(rewards, groups, std="sample", eps=0.0).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert grpo(rewards, groups, std="population", eps=0.0).tolist() == [1.0, -1.0]
    assert grpo(rewards, groups, std="none").tolist() == [0.5, -0.5]


def test_groups_are_found_by_id_and_not_by_position():
    found = grpo(torch.tensor([1.0, 5.0, 0.0, 7.0]), torch.tensor([1, 2, 1, 2]), std="none")
    assert found.tolist() == [0.5, -1.0, -0.5, 1.0]


def test_gdpo_tells_apart_what_the_sum_of_components_cannot():
    """A first sample that misses both goals beside a second that meets one, or both."""
    groups = torch.tensor([0, 0])
    one, both = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert grpo(one.sum(1), groups).tolist() == pytest.approx(grpo(both.sum(1), groups).tolist(), rel=1e-5)
    assert gdpo(both, groups).tolist() == pytest.approx([2 * a for a in gdpo(one, groups).tolist()], rel=1e-5)


def test_gdpo_of_one_component_is_grpo():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 0])
    assert torch.equal(gdpo(rewards, groups), grpo(rewards, groups))
    assert torch.equal(gdpo(rewards[:, None], groups), grpo(rewards, groups))


def test_two_that_share_the_best_add_nothing_to_the_best_of_the_group():
    groups = torch.zeros(4, dtype=torch.long)
    assert grpo_passk(torch.tensor([3.0, 1.0, 3.0, 0.0]), groups).tolist() == [0, 0, 0, 0]
    assert grpo_passk(torch.tensor([3.0, 1.0, 2.5, 0.0]), groups).tolist() == [0.5, 0, 0, 0]


def test_completions_of_equal_length_give_opo_the_plain_mean():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 2.0]), torch.tensor([0, 0, 0, 1])
    for length in (0, 1, 50):
        found = opo(rewards, groups, lengths=torch.full((4,), length))
        assert found.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.0])


def test_equal_rewards_teach_opo_exactly_nothing_where_their_weighted_mean_is_not_exact():
    """In double precision 0.3 · 1 + 0.3 · 2 + 0.3 · 4 is not 0.3 · 7."""
    rewards = torch.full((3,), 0.3, dtype=torch.float64)
    assert opo(rewards, torch.tensor([0, 0, 0]), lengths=torch.tensor([1, 2, 4])).tolist() == [0, 0, 0]


def test_a_prompt_without_any_success_has_no_likelihood_to_raise():
    assert max_rl(torch.zeros(4), torch.tensor([0, 0, 0, 0])).tolist() == [0, 0, 0, 0]


def test_where_the_greedy_completion_has_no_verdict_remax_learns_nothing():
    found = ESTIMATORS["remax"](torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), greedy=torch.tensor([math.nan, 1.0]))
    assert found.tolist() == [0, -1]


# --- what changes nothing, and what changes only the scale ---------------------------------------------------------------


@given(drawn(EIGHTHS), st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(samples, rng):
    for case in CASES:
        order = list(range(len(samples.rewards)))
        rng.shuffle(order)
        close(case, ours(case, samples.at(order)), ours(case, samples)[order])


@given(drawn(EIGHTHS), st.permutations(range(5)))
def test_group_ids_are_only_names(samples, names):
    for case in CASES:
        code = {group: 1000 * name - 7 for group, name in zip(sorted(set(samples.groups)), names, strict=False)}
        close(case, ours(case, replace(samples, groups=[code[g] for g in samples.groups])), ours(case, samples))


@given(drawn(EIGHTHS), st.integers(-100, 100))
def test_adding_the_same_to_all_rewards_changes_nothing(samples, shift):
    for case in [c for c in CASES if c not in ("max_rl", "raw")]:
        columns = {name: [r + shift for r in getattr(samples, name)] for name in ("rewards", "greedy", "second")}
        close(case, ours(case, replace(samples, **columns)), ours(case, samples))


@given(drawn(EIGHTHS), st.sampled_from([0.125, 3.0, 64.0]))
def test_advantages_grow_with_the_rewards_unless_a_deviation_or_a_mean_is_divided_out(samples, factor):
    for case in [c for c in CASES if c != "gdpo whiten"]:  # which divides noise by noise where its components cancel
        name, options = CASES[case]
        relative = {"grpo": "sample", "reinforce_pp": "sample", "reinforce_pp_baseline": "sample", "gdpo": "sample"}
        divided = name == "max_rl" or options.get("std", relative.get(name, "none")) != "none"
        tiny = {"eps": 1e-12} if divided else {}
        columns = {name: [r * factor for r in getattr(samples, name)] for name in ("rewards", "greedy", "second")}
        grown = ours(case, replace(samples, **columns), **tiny)
        close(case, grown, ours(case, samples, **tiny) * (1.0 if divided else factor))


@given(drawn(EIGHTHS))
def test_the_advantages_of_a_group_add_up_to_nothing(samples):
    for case in [c for c in WITHIN_GROUPS if c not in ("opo", "grpo_passk", "grpo_passk sample")]:
        found = ours(case, samples).tolist()
        for own in plain.members(samples.groups):
            assert sum(found[i] for i in own) == pytest.approx(0, abs=1e-4)


@given(drawn(EIGHTHS))
def test_the_advantages_of_a_batch_add_up_to_nothing(samples):
    for case in WHOLE_BATCH:
        assert ours(case, samples).sum() == pytest.approx(0, abs=1e-4)


# --- nothing to learn ----------------------------------------------------------------------------------------------------

FLAT = [0.0, 1.0, 0.1, -0.7, 1 / 3, 1e8]  # in double precision, the mean of six times 0.1 is not 0.1
EITHER = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@EITHER
@pytest.mark.parametrize("value", FLAT)
@pytest.mark.parametrize("case", [*WITHIN_GROUPS, *WHOLE_BATCH])
def test_a_batch_of_equal_rewards_teaches_exactly_nothing(case, value, dtype):
    samples = Samples([value] * 7, [2, 0, 2, 2, 2, 2, 2], [1, 2, 3, 4, 5, 6, 7], [0.0] * 7, [-value] * 7)
    assert ours(case, samples, dtype).tolist() == [0.0] * 7


def beside_another_group(value: float) -> Samples:
    rewards = [value] * 6 + [0.1, 0.2, 0.7, 0.1]
    return Samples(rewards, [5] * 6 + [-1] * 4, [1, 2, 3, 4, 5, 6, 1, 1, 1, 1], [0.0] * 10, rewards)


@EITHER
@pytest.mark.parametrize("value", FLAT)
@pytest.mark.parametrize("case", WITHIN_GROUPS)
def test_a_group_of_equal_rewards_teaches_exactly_nothing_beside_one_that_teaches(case, value, dtype):
    found = ours(case, beside_another_group(value), dtype)
    assert found[:6].tolist() == [0.0] * 6
    assert found[6:].any()


@pytest.mark.parametrize("case", ["reinforce_pp_baseline", "reinforce_pp_baseline none", "gdpo whiten"])
def test_a_group_of_equal_rewards_stays_at_exactly_nothing_where_another_leaves_rounding_behind(case):
    rewards = [0.1, 0.1, 0.6, 0.0, 0.4, 0.8, 0.7]
    found = ours(case, Samples(rewards, [0, 0, 1, 1, 1, 1, 1], [1] * 7, [0.0] * 7, rewards))
    assert found[:2].tolist() == [0, 0]


@pytest.mark.parametrize("case", WITHIN_GROUPS)
def test_a_group_of_one_teaches_exactly_nothing(case):
    found = ours(case, Samples([0.1, 0.3, 0.7], [5, 9, 9], [4, 1, 2], [0.0] * 3, [0.3, 0.1, 0.2]))
    assert found[0] == 0
    assert found[1:].any()


@pytest.mark.parametrize("case", CASES)
def test_a_batch_without_samples_has_no_advantages(case):
    found = ours(case, Samples([], [], [], [], []))
    assert (found.shape, found.dtype) == ((0,), torch.float32)


@pytest.mark.parametrize(("case", "value"), [("grpo", 1.0), ("grpo_passk sample", 1.0), ("max_rl", 0.0)])
def test_equal_rewards_teach_nothing_with_an_eps_of_zero_too(case, value):
    assert ours(case, Samples([value] * 2, [0, 0], [1, 1], [0.0] * 2, [0.0] * 2), eps=0.0).tolist() == [0, 0]


# --- kinds of numbers ----------------------------------------------------------------------------------------------------


@given(drawn(ANY))
def test_half_precision_rewards_are_computed_in_full_precision(samples):
    for case in CASES:
        rounded = {
            name: torch.tensor(getattr(samples, name)).bfloat16().tolist() for name in ("rewards", "greedy", "second")
        }
        found = ours(case, samples, dtype=torch.bfloat16)
        assert found.dtype == torch.float32
        assert torch.equal(found, ours(case, replace(samples, **rounded)))


def test_whole_number_and_yes_or_no_rewards_are_understood():
    groups = torch.tensor([0, 0])
    assert grpo(torch.tensor([1, 0]), groups, std="none").tolist() == [0.5, -0.5]
    assert rloo(torch.tensor([True, False]), groups).tolist() == [1, -1]


def test_no_gradient_flows_back_through_an_advantage():
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    assert not any(f(rewards, torch.tensor([0, 0])).requires_grad for f in (grpo, rloo, max_rl))


def test_the_table_holds_what_it_names():
    assert all(function.__name__ == name for name, function in ESTIMATORS.items())
    assert set(ESTIMATORS) == set(plain.ADVANTAGES) == {name for name, _ in CASES.values()}


# --- bad input -----------------------------------------------------------------------------------------------------------

ONES, PAIR = torch.ones(2), torch.tensor([0, 0])


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(name, bad):
    with pytest.raises(ValueError, match=rf"^{name}: rewards\[1\] is {bad}"):
        ESTIMATORS[name](torch.tensor([0.0, bad]), PAIR)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize(
    ("rewards", "groups", "options", "told"),
    [
        (ONES, torch.tensor([0, 0, 0]), {}, r"rewards \[2\] and groups \[3\]"),
        (torch.zeros(2, 1, 1), PAIR, {}, r"\[2, 1, 1\]"),
        (torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.long), {}, r"groups \[2, 1\]"),
        (ONES, torch.tensor([0.0, 1.0]), {}, r"integer ids; they are torch.float32"),
        (ONES, PAIR, {"lengths": torch.tensor([1, 2, 3])}, r"lengths \[1, 2, 3\] must be \[2\]"),
        (ONES, PAIR, {"lengths": torch.tensor([1, -2])}, r"lengths \[1, -2\]"),
        (ONES, PAIR, {"tau": 3}, r"unknown option tau=3; known: "),
    ],
)
def test_what_does_not_fit_any_estimator_is_refused_with_its_value(name, rewards, groups, options, told):
    with pytest.raises(ValueError, match=rf"^{name}: .*{told}"):
        ESTIMATORS[name](rewards, groups, **options)


@pytest.mark.parametrize(
    ("name", "rewards", "options", "told"),
    [
        ("grpo", ONES, {"std": "unbiased"}, "std is 'unbiased'; known: sample, population, none"),
        ("grpo_passk", ONES, {"std": "biased"}, "std is 'biased'"),
        ("gdpo", ONES, {"std": "mean"}, "std is 'mean'"),
        ("reinforce_pp", ONES, {"std": "batch"}, "std is 'batch'"),
        ("reinforce_pp_baseline", ONES, {"std": ""}, "std is ''"),
        ("dr_grpo", ONES, {"std": "sample"}, "unknown option std='sample'; known: none"),
        ("grpo", torch.zeros(2, 2), {}, r"rewards \[2, 2\]"),
        ("gdpo", torch.tensor([[0.0, math.nan], [0.0, 0.0]]), {}, r"rewards\[0, 1\] is nan"),
        ("gdpo", torch.zeros(2, 2), {"weights": [1.0, 2.0, 3.0]}, r"weights \[1.0, 2.0, 3.0\] .* \[2, 2\]"),
        ("gdpo", torch.zeros(2, 2), {"weights": 2.0}, r"weights 2.0 "),
        ("opo", ONES, {}, "lengths is None"),
        ("remax", ONES, {}, r"greedy is None; it must be \[2\]"),
        ("remax", ONES, {"greedy": torch.zeros(3)}, r"greedy is \[3\]; it must be \[2\]"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(name, rewards, options, told):
    with pytest.raises(ValueError, match=f"^{name}: .*{told}"):
        ESTIMATORS[name](rewards, PAIR, **options)


@pytest.mark.parametrize(
    ("name", "rewards", "options"),
    [
        ("grpo", ONES, {"eps": -1.0}),
        ("grpo", ONES, {"eps": math.nan}),
        ("gdpo", torch.zeros(2, 0), {}),
        ("gdpo", torch.zeros(2, 2), {"weights": [1.0, math.nan]}),
        ("opo", ONES, {"lengths": torch.tensor([1.0, math.nan])}),
        ("remax", ONES, {"greedy": torch.tensor([1.0, math.inf])}),
    ],
)
def test_an_option_that_makes_advantages_meaningless_is_refused(name, rewards, options):
    with pytest.raises(ValueError, match=f"^{name}: "):
        ESTIMATORS[name](rewards, PAIR, **options)


# --- compute_grpo_outcome_advantage: the function people migrate from -----------------------------------------------------

SAMPLES = st.lists(st.tuples(EIGHTHS, st.integers(0, 5)), min_size=1, max_size=24)
UIDS = ["a"] * 4 + ["b"] * 4


def worked_example(length: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, four responses each, rewards 1 0 1 0 and 0 0 0 1 at the last token."""
    rewards = torch.zeros(8, length)
    rewards[:, -1] = torch.tensor([1.0, 0, 1, 0, 0, 0, 0, 1])
    return rewards, torch.ones(8, length)


def test_the_worked_example_comes_out():
    rewards, mask = worked_example()
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, UIDS)
    half = 0.5 / (1 / 3) ** 0.5  # 1 0 1 0: mean 1/2, deviation sqrt(1/3)
    expected = [half, -half, half, -half, -0.5, -0.5, -0.5, 1.5]  # 0 0 0 1: mean 1/4, deviation 1/2
    assert advantages.shape == (8, 3)
    for column in advantages.T.tolist():
        assert column == pytest.approx(expected, abs=1e-5)


def test_advantages_are_returned_twice():
    rewards, mask = worked_example()
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, UIDS)
    assert advantages is returns
    assert advantages.abs().sum() > 0


@pytest.mark.parametrize(
    "index",
    [
        UIDS,
        np.array(UIDS, dtype=object),
        np.array([7] * 4 + [3] * 4),
        torch.tensor([7] * 4 + [3] * 4),
        tuple(UIDS),
    ],
    ids=["list", "object array", "int array", "tensor", "tuple"],
)
def test_the_index_may_be_of_any_kind(index):
    rewards, mask = worked_example()
    expected, _ = compute_grpo_outcome_advantage(rewards, mask, UIDS)
    assert torch.equal(compute_grpo_outcome_advantage(rewards, mask, index)[0], expected)


def test_the_score_is_the_sum_of_the_token_rewards():
    spread = torch.tensor([[0.25, 0.25, 0.5], [0.0, 0.5, -0.5]])
    final = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    mask = torch.ones(2, 3)
    assert torch.equal(
        compute_grpo_outcome_advantage(spread, mask, ["a", "a"])[0],
        compute_grpo_outcome_advantage(final, mask, ["a", "a"])[0],
    )


def test_masked_tokens_have_no_advantage():
    rewards, mask = worked_example()
    mask[0, 2] = mask[5, 1:] = 0
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, UIDS)
    assert advantages[0, 2] == 0
    assert advantages[5, 1:].tolist() == [0, 0]
    assert (advantages[mask.bool()] != 0).all()


def test_a_response_alone_keeps_its_own_reward():
    rewards, mask = torch.tensor([[0.0, 3.0], [0.0, 1.0], [0.0, 0.0]]), torch.ones(3, 2)
    index = ["alone", "pair", "pair"]
    assert compute_grpo_outcome_advantage(rewards, mask, index)[0][0].tolist() == pytest.approx([3.0, 3.0])
    raw = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)[0]
    assert raw[:, 0].tolist() == [3.0, 0.5, -0.5]


def test_epsilon_is_added_to_the_deviation():
    rewards, mask = torch.tensor([[1.0], [0.0], [2.0]]), torch.ones(3, 1)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, ["a", "a", "b"], epsilon=1.0)
    deviation = 0.5**0.5
    assert advantages[:, 0].tolist() == pytest.approx([0.5 / (deviation + 1), -0.5 / (deviation + 1), 2.0 / (1 + 1)])


def test_whole_number_token_rewards_have_fractional_advantages():
    rewards, mask = torch.tensor([[0, 1], [0, 0]]), torch.ones(2, 2)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, ["a", "a"], norm_adv_by_std_in_grpo=False)
    assert advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5]]


def test_no_gradient_flows_into_the_rewards():
    rewards, mask = worked_example()
    assert not compute_grpo_outcome_advantage(rewards.requires_grad_(), mask, UIDS)[0].requires_grad


@pytest.mark.parametrize(("shape", "count"), [((2, 4), 2), ((2, 3), 3)])
def test_disagreeing_shapes_are_refused(shape, count):
    with pytest.raises(ValueError, match="do not agree"):
        compute_grpo_outcome_advantage(torch.zeros(2, 3), torch.ones(*shape), ["a"] * count)


def plain_outcome(token_rewards, mask, index, epsilon, norm):
    scores = [sum(row) for row in token_rewards]
    members = defaultdict(list)
    for score, key in zip(scores, index, strict=True):
        members[key].append(score)
    out = []
    for score, key, row in zip(scores, index, mask, strict=True):
        own = members[key]
        mean, deviation = 0.0, 1.0
        if len(own) > 1:
            mean = sum(own) / len(own)
            deviation = math.sqrt(sum((s - mean) ** 2 for s in own) / (len(own) - 1))
        advantage = (score - mean) / (deviation + epsilon) if norm else score - mean
        out.append([advantage * m for m in row])
    return out


@given(SAMPLES, st.booleans(), st.sampled_from([1e-6, 0.1]), st.integers(1, 4))
def test_the_function_equals_a_plain_loop(samples, norm, epsilon, length):
    rng = np.random.default_rng(len(samples))
    rewards = np.zeros((len(samples), length))
    rewards[np.arange(len(samples)), rng.integers(0, length, len(samples))] = [r for r, _ in samples]
    mask = (rng.random((len(samples), length)) < 0.7).astype(float)
    index = [f"uid-{g}" for _, g in samples]
    found, _ = compute_grpo_outcome_advantage(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(mask, dtype=torch.float32),
        index,
        epsilon=epsilon,
        norm_adv_by_std_in_grpo=norm,
    )
    expected = plain_outcome(rewards.tolist(), mask.tolist(), index, epsilon, norm)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)
