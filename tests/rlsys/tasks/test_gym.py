"""Tasks of reasoning_gym, against the real package."""

import json
import sys

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from rlsys.config.schema import DataSource, RewardFunction
from rlsys.config.shorthand import parse_entries, shorten_entries
from rlsys.data.origin import Origin, locate_data
from rlsys.data.readers import read_rows
from rlsys.errors import ConfigError
from rlsys.rewards.gym import reasoning_gym as reward
from rlsys.tasks import gym


def read(task: str, **options: object) -> list[dict[str, object]]:
    origin = Origin(f"reasoning_gym:{task}", options=json.dumps(options))
    rows = [row.fields for row in read_rows(origin, locate_data(origin))]
    return json.loads(json.dumps(rows))  # as they come back from disk


def test_rows_are_the_questions_of_the_package():
    rows = read("chain_sum", size=5, seed=3, max_terms=3)
    package = list(reasoning_gym.create_dataset("chain_sum", size=5, seed=3, max_terms=3))
    assert [(r["prompt"], r["answer"]) for r in rows] == [(q["question"], q["answer"]) for q in package]
    assert {r["source"] for r in rows} == {"chain_sum"}
    assert rows != read("chain_sum", size=5, seed=4, max_terms=3)


@pytest.mark.parametrize("task", sorted(set(DATASETS) - {"composite", "game_of_life_halting", "sokoban"}))
def test_the_score_is_that_of_the_package(task):
    """Right answers, wrong ones and half right ones; the row has been JSON meanwhile. Making a sokoban takes 14 s."""
    [row] = read(task, size=1, seed=11)
    dataset = reasoning_gym.create_dataset(task, size=1, seed=11)
    for answer in [str(row["answer"] or ""), "7", f"{row['answer']} or so"]:
        try:
            expected = dataset.score_answer(answer.strip(), dataset[0])
        except Exception:
            expected = 0.0
        got = reward(f"Let me see. <answer>1</answer> No: <answer>{answer}</answer>", row["reasoning_gym"])
        assert float(got) == pytest.approx(expected)
        assert reward(answer, row["reasoning_gym"]) == got, "without tags the whole completion counts"


def test_tasks_can_be_mixed_by_the_package():
    parts = [{"name": "chain_sum", "weight": 2, "config": {"max_terms": 3}}, {"name": "leg_counting"}]
    rows = read("composite", size=20, datasets=parts)
    assert len({row["prompt"].split()[0] for row in rows}) == 2
    assert [reward(row["answer"], row["reasoning_gym"]) for row in rows] == [1] * 20
    assert max(reward("none", row["reasoning_gym"]) for row in rows) < 1


def test_a_score_that_takes_any_answer_for_right_is_refused():
    """The package compares texts as truth values: every text but the empty one is true."""
    [row] = read("game_of_life_halting", size=1)
    dataset = gym.make_dataset(*row["reasoning_gym"][:2])
    assert dataset.score_answer("no idea", dataset[0]) == 1
    with pytest.raises(ValueError, match="game_of_life_halting: the package's score takes any answer for right"):
        reward(row["answer"], row["reasoning_gym"])


def test_an_answer_in_another_form_is_wrong_but_a_broken_score_is_a_failure(monkeypatch):
    [row] = read("prime_factorization", size=1)
    dataset = gym.make_dataset(*row["reasoning_gym"][:2])
    with pytest.raises(ValueError, match="invalid literal"):
        dataset.score_answer("two times two", dataset[0])
    assert reward("two times two", row["reasoning_gym"]) == 0
    monkeypatch.setattr(type(dataset), "score_answer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reward("2", row["reasoning_gym"])


def test_partial_credit_comes_through():
    [row] = read("chain_sum", size=1, seed=0)
    dataset = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)
    partial = dataset.score_answer(f"it is {row['answer']}", dataset[0])
    assert 0 < partial < 1
    assert reward(f"<answer>it is {row['answer']}</answer>", row["reasoning_gym"]) == pytest.approx(partial)
    assert reward(f"<b>{row['answer']}</b>", row["reasoning_gym"], tag="b") == 1


def test_settings_of_an_entry_are_options_of_the_task_and_its_score_is_the_reward():
    entries = parse_entries("data.train", {"reasoning_gym:chain_sum": {"size": 20, "weight": 2, "max_terms": 3}})
    assert entries == {
        "reasoning_gym:chain_sum": DataSource(
            "reasoning_gym:chain_sum",
            weight=2.0,
            options={"size": 20, "max_terms": 3},
            reward={"reasoning_gym": RewardFunction(function="reasoning_gym")},
        )
    }
    assert parse_entries("data.train", shorten_entries(entries)) == entries
    named = parse_entries("data.train", {"sums": {"path": "reasoning_gym:chain_sum", "reward": "exact"}})
    assert list(named["sums"].reward) == ["exact"]
    with pytest.raises(ValueError, match="has no setting `size`"):
        parse_entries("data.train", {"sums.jsonl": {"size": 20}})


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_sums", {}, "reasoning_gym:chain_sums does not exist; tasks: .*chain_sum"),
        ("chain_sum", {"terms": 3}, "reasoning_gym:chain_sum: .*terms"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "reasoning_gym:chain_sum: .*max_terms"),
    ],
)
def test_what_the_package_does_not_have_is_refused(task, options, message):
    with pytest.raises(ConfigError, match=message):
        locate_data(Origin(f"reasoning_gym:{task}", options=json.dumps(options)))


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    gym.make_dataset.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"needs the package reasoning_gym: pip install 'rlsys\[gym\]'"):
        locate_data(Origin("reasoning_gym:chain_sum"))


def test_rows_of_other_data_have_no_such_score():
    with pytest.raises(ValueError, match="judges rows of reasoning_gym:TASK only"):
        reward("1")
