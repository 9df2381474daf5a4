"""Short forms of reward functions, data sets and trackers."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config.schema import DataSource, HeldOutSource, RewardFunction
from rlsys.config.shorthand import parse_entries, shorten_entries, update_entries


def test_functions_may_be_a_name_a_list_or_a_mapping():
    one = {"exact": RewardFunction(1.0, "exact")}
    assert parse_entries("reward.functions", "exact") == parse_entries("reward.functions", ["exact"]) == one
    assert parse_entries("reward.functions", {"exact": None}) == parse_entries("reward.functions", {"exact": 1}) == one


def test_what_is_no_field_is_an_option_of_the_function():
    found = parse_entries("reward.functions", {"length": {"weight": 0.5, "at_most": 200, "deadline_s": 3}})
    assert found == {"length": RewardFunction(0.5, "length", 3.0, {"at_most": 200})}


def test_an_option_may_stand_under_options_too():
    given = {"f.py:f": {"options": {"weight": 3}, "strict": True}}
    assert parse_entries("reward.functions", given)["f.py:f"].options == {"weight": 3, "strict": True}


def test_one_function_may_be_used_twice_under_two_names():
    found = parse_entries(
        "reward.functions", {"short": {"function": "length", "at_most": 10}, "long": {"function": "length"}}
    )
    assert [(name, f.function) for name, f in found.items()] == [("short", "length"), ("long", "length")]


def test_a_data_set_may_be_a_path_a_weight_or_settings():
    assert parse_entries("data.train", "a.jsonl") == {"a.jsonl": DataSource("a.jsonl")}
    found = parse_entries(
        "data.train", {"a.jsonl": 0.7, "sums": {"path": "b.csv", "weight": 0.3, "prompt_key": "question"}}
    )
    assert found == {
        "a.jsonl": DataSource("a.jsonl", weight=0.7),
        "sums": DataSource("b.csv", weight=0.3, prompt_key="question"),
    }


def test_a_data_set_may_have_reward_functions_of_its_own():
    found = parse_entries(
        "eval.datasets", {"aime": {"path": "a.jsonl", "samples": 8, "temperature": 1, "reward": "math"}}
    )
    own = {"math": RewardFunction(1.0, "math")}
    assert found == {"aime": HeldOutSource("a.jsonl", reward=own, samples=8, temperature=1.0)}


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("reward.functions", 3, "`reward.functions` must be a mapping of names to weights"),
        ("reward.functions", ["exact", "exact"], "`reward.functions` has exact more than once"),
        ("reward.functions", {"exact": True}, "`reward.functions.exact` must be a number, its weight, or a mapping"),
        (
            "reward.functions",
            {"exact": {"weight": "much"}},
            "`reward.functions.exact.weight` must be a number; it is 'much'",
        ),
        ("reward.functions", {"f": {"options": 3}}, "`reward.functions.f.options` must be a mapping"),
        ("data.train", {"a": {"template_options": 3}}, "`data.train.a.template_options` must be a mapping; it is 3"),
        ("data.train", {"a": {"wieght": 1}}, "`data.train.a` has no setting `wieght`. Did you mean `weight`?"),
        ("data.train", {"a": {"samples": 1}}, "`data.train.a` has no setting `samples`. It may have path, weight"),
        ("eval.datasets", {"a": 3}, "`eval.datasets.a` must be a mapping of settings; it is 3"),
        ("eval.datasets", {"a": {"samples": 1.5}}, "`eval.datasets.a.samples` must be a whole number, or null"),
        (
            "eval.datasets",
            {"a": {"reward": {"math": "x"}}},
            "`eval.datasets.a.reward.math` must be a number, its weight",
        ),
    ],
)
def test_errors_are_sentences(key, value, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse_entries(key, value)


def test_one_setting_can_be_replaced():
    before = parse_entries("reward.functions", {"exact": 0.5, "my.py:f": {"strict": True}})
    assert update_entries("reward.functions", before, "exact", 2)["exact"].weight == 2.0
    assert update_entries("reward.functions", before, "contains", 2)["contains"] == RewardFunction(2.0, "contains")
    assert update_entries("reward.functions", before, "exact.weight", 3)["exact"].weight == 3.0
    found = update_entries("reward.functions", before, "my.py:f.strict", False)
    assert found["my.py:f"] == RewardFunction(1.0, "my.py:f", None, {"strict": False})
    sets = parse_entries("eval.datasets", {"aime": {"path": "a.jsonl"}})
    assert update_entries("eval.datasets", sets, "aime.samples", 8)["aime"] == HeldOutSource("a.jsonl", samples=8)


NAMES = st.sampled_from(["exact", "my.py:f", "a.jsonl", "builtin:zigzag"])
OPTIONS = st.dictionaries(
    st.sampled_from(["pattern", "weight", "n"]), st.none() | st.integers() | st.text(), max_size=2
)
FUNCTIONS = st.builds(RewardFunction, st.floats(-9, 9), NAMES, st.none() | st.floats(0, 9), OPTIONS)
SETS = st.builds(
    HeldOutSource,
    path=NAMES,
    source=st.sampled_from(["", "sums"]),
    system=st.none() | st.sampled_from(["", "Be brief."]),
    template_options=st.none() | OPTIONS,
    max_new_tokens=st.none() | st.integers(1, 9),
    reward=st.dictionaries(NAMES, FUNCTIONS, max_size=2),
    samples=st.none() | st.integers(1, 9),
)


@given(st.dictionaries(NAMES, FUNCTIONS))
def test_the_short_form_of_functions_reads_the_same(functions):
    assert parse_entries("reward.functions", shorten_entries(functions)) == functions


@given(st.dictionaries(NAMES, SETS))
def test_the_short_form_of_data_sets_reads_the_same(sets):
    assert parse_entries("eval.datasets", shorten_entries(sets)) == sets
