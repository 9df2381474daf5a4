import math
from dataclasses import dataclass, replace
from typing import Any

import plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.algorithms.advantages import ESTIMATORS, gdpo, grpo, grpo_passk, max_rl, opo, rloo


@dataclass(frozen=True)
class Samples:
    """The inputs of all estimators, one value per sample."""

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
    "reinforce_pp none": ("reinforce_pp", {"std": "none"}),
    "reinforce_pp samples": ("reinforce_pp", {"whiten_over": "samples"}),
    "reinforce_pp samples population": ("reinforce_pp", {"whiten_over": "samples", "std": "population"}),
    "reinforce_pp_baseline": ("reinforce_pp_baseline", {}),
    "reinforce_pp_baseline none": ("reinforce_pp_baseline", {"std": "none"}),
    "reinforce_pp_baseline samples": ("reinforce_pp_baseline", {"whiten_over": "samples"}),
    "reinforce_pp_baseline samples none": ("reinforce_pp_baseline", {"whiten_over": "samples", "std": "none"}),
    "opo": ("opo", {}),
    "grpo_passk": ("grpo_passk", {}),
    "grpo_passk none": ("grpo_passk", {"std": "none"}),
    "gdpo": ("gdpo", {}),
    "gdpo unwhitened": ("gdpo", {"whiten": False}),
    "gdpo weights": ("gdpo", {"weights": [0.5, -2.0], "std": "population", "whiten": False}),
    "max_rl": ("max_rl", {}),
    "remax": ("remax", {}),
    "raw": ("raw", {}),
}
ABSOLUTE = ("remax", "raw")  # do not compare samples with each other
OVER_SAMPLES = ("reinforce_pp samples", "reinforce_pp samples population")
OVER_TOKENS = (
    *("reinforce_pp", "reinforce_pp population", "reinforce_pp none"),
    *("reinforce_pp_baseline", "reinforce_pp_baseline none"),
)
WHOLE_BATCH = (*OVER_SAMPLES, *OVER_TOKENS)  # compare across groups
WITHIN_GROUPS = [case for case in CASES if case not in (*ABSOLUTE, *WHOLE_BATCH)]

EIGHTHS = st.integers(-40, 40).map(lambda n: n / 8)  # exact: equal rewards are equal, different ones far apart
ANY = st.floats(-100, 100, width=32)


def draw_samples(rewards: st.SearchStrategy[float]) -> st.SearchStrategy[Samples]:
    """Draws ragged groups in any order, with ids that have gaps and may be negative; completions may be empty."""
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
    elif name == "opo" or name.startswith("reinforce_pp"):
        options = options | {"lengths": samples.lengths}
    return plain.ADVANTAGES[name](rewards, samples.groups, **options)


def assert_close(case: str, result: Tensor, expected: Tensor | list[float]) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5, msg=lambda text: f"{case}: {text}")


# --- the formulas -----------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(draw_samples(st.one_of(EIGHTHS, ANY)))
def test_advantages_equal_a_plain_loop_over_ragged_groups(samples):
    for case in CASES:
        result = ours(case, samples)
        assert result.dtype == torch.float32
        assert_close(case, result, theirs(case, samples))


@given(draw_samples(EIGHTHS), st.sampled_from([1e6, -1e6]))
def test_one_huge_reward_does_not_change_the_other_advantages(samples, huge):
    for case in CASES:
        samples = replace(samples, rewards=[huge, *samples.rewards[1:]])
        assert_close(case, ours(case, samples), theirs(case, samples))


def test_three_samples_by_hand():
    """Rewards 1 0 0, lengths 1 2 3, reward 1 of the greedy completion."""
    samples = Samples([1.0, 0.0, 0.0], [4, 4, 4], [1, 2, 3], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0])
    third, sample, population = 1 / 3, (1 / 3) ** 0.5, (2 / 9) ** 0.5  # the two deviations of 1 0 0
    for case, expected in {
        "grpo none": [2 * third, -third, -third],
        "grpo": [2 * third / sample, -third / sample, -third / sample],
        "dr_grpo": [2 * third, -third, -third],
        "rloo": [1.0, -0.5, -0.5],
        "reinforce_pp samples population": [2 * third / population, -third / population, -third / population],
        "reinforce_pp none": [5 / 6, -1 / 6, -1 / 6],  # one token of six has reward 1
        "reinforce_pp population": [5**0.5, -(5**-0.5), -(5**-0.5)],  # their deviation is √(1/6 · 5/6)
        "reinforce_pp_baseline samples none": [2 * third, -third, -third],
        "reinforce_pp_baseline none": [5 / 6, -1 / 6, -1 / 6],  # 2/3 - 1/6 · 2/3 + 5/6 · 1/3
        "opo": [5 / 6, -1 / 6, -1 / 6],  # baseline 1·1 / (1 + 2 + 3)
        "grpo_passk": [1.0 / sample, 0.0, 0.0],
        "grpo_passk none": [1.0, 0.0, 0.0],
        "gdpo unwhitened": [third / sample, -2 * third / sample, third / sample],  # the second component is 0 0 1
        "gdpo": [third**0.5, -2 * third**0.5, third**0.5],  # 1 -2 1 over their deviation, √3
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
    result = grpo(torch.tensor([1.0, 5.0, 0.0, 7.0]), torch.tensor([1, 2, 1, 2]), std="none")
    assert result.tolist() == [0.5, -1.0, -0.5, 1.0]


def test_gdpo_distinguishes_components_with_the_same_sum():
    """The first sample fails both components; the second fulfils one of them, or both."""
    groups = torch.tensor([0, 0])
    one, both = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert grpo(one.sum(1), groups).tolist() == pytest.approx(grpo(both.sum(1), groups).tolist(), rel=1e-5)
    unwhitened = gdpo(one, groups, whiten=False).tolist()
    assert gdpo(both, groups, whiten=False).tolist() == pytest.approx([2 * a for a in unwhitened], rel=1e-5)


def test_gdpo_of_one_component_is_grpo_before_it_is_whitened():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 0])
    assert torch.equal(gdpo(rewards, groups, whiten=False), grpo(rewards, groups))
    assert torch.equal(gdpo(rewards[:, None], groups, whiten=False), grpo(rewards, groups))


def test_two_samples_that_share_the_best_reward_have_no_passk_advantage():
    groups = torch.zeros(4, dtype=torch.long)
    assert grpo_passk(torch.tensor([3.0, 1.0, 3.0, 0.0]), groups).tolist() == [0, 0, 0, 0]
    assert grpo_passk(torch.tensor([3.0, 1.0, 2.5, 0.0]), groups, std="none").tolist() == [0.5, 0, 0, 0]


def test_completions_of_equal_length_give_opo_the_plain_mean():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 2.0]), torch.tensor([0, 0, 0, 1])
    for length in (0, 1, 50):
        result = opo(rewards, groups, lengths=torch.full((4,), length))
        assert result.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.0])


def test_equal_rewards_give_opo_exactly_0_despite_an_inexact_weighted_mean():
    """In double precision 0.3 · 1 + 0.3 · 2 + 0.3 · 4 is not 0.3 · 7."""
    rewards = torch.full((3,), 0.3, dtype=torch.float64)
    assert opo(rewards, torch.tensor([0, 0, 0]), lengths=torch.tensor([1, 2, 4])).tolist() == [0, 0, 0]


def test_max_rl_is_0_for_a_prompt_without_any_success():
    assert max_rl(torch.zeros(4), torch.tensor([0, 0, 0, 0])).tolist() == [0, 0, 0, 0]


def test_remax_is_0_where_the_greedy_completion_has_no_reward():
    result = ESTIMATORS["remax"](torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), greedy=torch.tensor([math.nan, 1.0]))
    assert result.tolist() == [0, -1]


# --- invariances ------------------------------------------------------------------------------------------------------


@given(draw_samples(EIGHTHS), st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(samples, rng):
    for case in CASES:
        order = list(range(len(samples.rewards)))
        rng.shuffle(order)
        assert_close(case, ours(case, samples.at(order)), ours(case, samples)[order])


@given(draw_samples(EIGHTHS), st.permutations(range(5)))
def test_group_ids_are_only_names(samples, names):
    for case in CASES:
        code = {group: 1000 * name - 7 for group, name in zip(sorted(set(samples.groups)), names, strict=False)}
        assert_close(case, ours(case, replace(samples, groups=[code[g] for g in samples.groups])), ours(case, samples))


@given(draw_samples(EIGHTHS), st.integers(-100, 100))
def test_adding_the_same_to_all_rewards_changes_nothing(samples, shift):
    for case in [c for c in CASES if c not in ("max_rl", "raw")]:
        columns = {name: [r + shift for r in getattr(samples, name)] for name in ("rewards", "greedy", "second")}
        assert_close(case, ours(case, replace(samples, **columns)), ours(case, samples))


@given(draw_samples(EIGHTHS), st.sampled_from([0.125, 3.0, 64.0]))
def test_advantages_scale_with_rewards_unless_divided_by_a_statistic(samples, factor):
    for case in [c for c in CASES if c != "gdpo"]:  # its components may cancel: noise over noise
        name, options = CASES[case]
        relative = ("grpo", "reinforce_pp", "reinforce_pp_baseline", "grpo_passk", "gdpo")
        divided = name == "max_rl" or options.get("std", "sample" if name in relative else "none") != "none"
        tiny = {"eps": 1e-12} if divided else {}
        columns = {name: [r * factor for r in getattr(samples, name)] for name in ("rewards", "greedy", "second")}
        grown = ours(case, replace(samples, **columns), **tiny)
        assert_close(case, grown, ours(case, samples, **tiny) * (1.0 if divided else factor))


@given(draw_samples(EIGHTHS))
def test_the_advantages_of_a_group_add_up_to_0(samples):
    for case in [c for c in WITHIN_GROUPS if c not in ("opo", "grpo_passk", "grpo_passk none")]:
        result = ours(case, samples).tolist()
        for group in plain.members(samples.groups):
            assert sum(result[i] for i in group) == pytest.approx(0, abs=1e-4)


@given(draw_samples(EIGHTHS))
def test_the_advantages_of_a_batch_add_up_to_0(samples):
    for case in OVER_SAMPLES:
        assert ours(case, samples).sum() == pytest.approx(0, abs=1e-4)
    for case in OVER_TOKENS if any(samples.lengths) else ():
        assert ours(case, samples).double() @ torch.tensor(samples.lengths).double() == pytest.approx(0, abs=1e-3)


# --- advantages of exactly 0 ------------------------------------------------------------------------------------------

FLAT = [0.0, 1.0, 0.1, -0.7, 1 / 3, 1e8]  # in double precision, the mean of six times 0.1 is not 0.1
EITHER = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@EITHER
@pytest.mark.parametrize("value", FLAT)
@pytest.mark.parametrize("case", [*WITHIN_GROUPS, *WHOLE_BATCH])
def test_a_batch_of_equal_rewards_has_advantages_of_exactly_0(case, value, dtype):
    samples = Samples([value] * 7, [2, 0, 2, 2, 2, 2, 2], [1, 2, 3, 4, 5, 6, 7], [0.0] * 7, [-value] * 7)
    assert ours(case, samples, dtype).tolist() == [0.0] * 7


def beside_another_group(value: float) -> Samples:
    rewards = [value] * 6 + [0.1, 0.2, 0.7, 0.1]
    return Samples(rewards, [5] * 6 + [-1] * 4, [1, 2, 3, 4, 5, 6, 1, 1, 1, 1], [0.0] * 10, rewards)


@EITHER
@pytest.mark.parametrize("value", FLAT)
@pytest.mark.parametrize("case", WITHIN_GROUPS)
def test_a_group_of_equal_rewards_is_exactly_0_beside_an_informative_group(case, value, dtype):
    result = ours(case, beside_another_group(value), dtype)
    assert result[:6].tolist() == [0.0] * 6
    assert result[6:].any()


@pytest.mark.parametrize("case", ["reinforce_pp_baseline samples", "reinforce_pp_baseline samples none", "gdpo"])
def test_a_group_of_equal_rewards_is_exactly_0_despite_rounding_in_another(case):
    rewards = [0.1, 0.1, 0.6, 0.0, 0.4, 0.8, 0.7]
    result = ours(case, Samples(rewards, [0, 0, 1, 1, 1, 1, 1], [1] * 7, [0.0] * 7, rewards))
    assert result[:2].tolist() == [0, 0]


@pytest.mark.parametrize("case", WITHIN_GROUPS)
def test_a_group_of_one_has_an_advantage_of_exactly_0(case):
    result = ours(case, Samples([0.1, 0.3, 0.7], [5, 9, 9], [4, 1, 2], [0.0] * 3, [0.3, 0.1, 0.2]))
    assert result[0] == 0
    assert result[1:].any()


@pytest.mark.parametrize("case", CASES)
def test_a_batch_without_samples_has_no_advantages(case):
    result = ours(case, Samples([], [], [], [], []))
    assert (result.shape, result.dtype) == ((0,), torch.float32)


@pytest.mark.parametrize(("case", "value"), [("grpo", 1.0), ("grpo_passk", 1.0), ("max_rl", 0.0)])
def test_equal_rewards_have_no_advantage_with_an_eps_of_0_either(case, value):
    assert ours(case, Samples([value] * 2, [0, 0], [1, 1], [0.0] * 2, [0.0] * 2), eps=0.0).tolist() == [0, 0]


# --- number types -----------------------------------------------------------------------------------------------------


@given(draw_samples(ANY))
def test_half_precision_rewards_are_computed_in_full_precision(samples):
    for case in CASES:
        rounded = {
            name: torch.tensor(getattr(samples, name)).bfloat16().tolist() for name in ("rewards", "greedy", "second")
        }
        result = ours(case, samples, dtype=torch.bfloat16)
        assert result.dtype == torch.float32
        assert torch.equal(result, ours(case, replace(samples, **rounded)))


def test_integer_and_boolean_rewards_are_accepted():
    groups = torch.tensor([0, 0])
    assert grpo(torch.tensor([1, 0]), groups, std="none").tolist() == [0.5, -0.5]
    assert rloo(torch.tensor([True, False]), groups).tolist() == [1, -1]


def test_no_gradient_flows_back_through_an_advantage():
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    assert not any(f(rewards, torch.tensor([0, 0])).requires_grad for f in (grpo, rloo, max_rl))


def test_the_table_holds_what_it_names():
    assert all(function.__name__ == name for name, function in ESTIMATORS.items())
    assert set(ESTIMATORS) == set(plain.ADVANTAGES) == {name for name, _ in CASES.values()}


# --- bad input --------------------------------------------------------------------------------------------------------

ONES, PAIR = torch.ones(2), torch.tensor([0, 0])


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_index(name, bad):
    with pytest.raises(ValueError, match=rf"^{name}: rewards\[1\] is {bad}"):
        ESTIMATORS[name](torch.tensor([0.0, bad]), PAIR)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize(
    ("rewards", "groups", "options", "message"),
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
def test_wrong_inputs_are_refused_by_every_estimator_with_their_value(name, rewards, groups, options, message):
    with pytest.raises(ValueError, match=rf"^{name}: .*{message}"):
        ESTIMATORS[name](rewards, groups, **options)


@pytest.mark.parametrize(
    ("name", "rewards", "options", "message"),
    [
        ("grpo", ONES, {"std": "unbiased"}, "std is 'unbiased'; known: sample, population, none"),
        ("grpo_passk", ONES, {"std": "biased"}, "std is 'biased'"),
        ("gdpo", ONES, {"std": "mean"}, "std is 'mean'"),
        ("reinforce_pp", ONES, {"std": "batch"}, "std is 'batch'"),
        ("reinforce_pp_baseline", ONES, {"std": ""}, "std is ''"),
        ("reinforce_pp", ONES, {"whiten_over": "groups"}, "whiten_over is 'groups'; known: tokens, samples"),
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
def test_a_wrong_option_is_refused_with_its_value(name, rewards, options, message):
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
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
