"""`rlsys check`: what it compares, and what it prints."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from launch.tools.check import (
    TOLERANCES,
    CheckedUpdate,
    UpdateTrial,
    pack_budgets,
    print_updates,
    random_batch,
    rank_counts,
)
from rlsys.checks import load_checked
from rlsys.config.schema import Config
from rlsys.types import Prompt, Sample

GUESS = Path(__file__).parents[3] / "configs" / "guess_cpu.yaml"

PROMPTS = [Prompt(f"p{i}", "made", "", [2, 3, 4, 5][: 2 + i], {}) for i in range(3)]


REFERENCE = CheckedUpdate(1, 1, 0, Config().policy.tokens_per_pack, 0.25, 0.0, 0.0, "lm.model.norm.weight")


def line(
    whole: float = 3e-7, worst: float = 9e-7, loss: float = 0.25, name: str = "lm.model.norm.weight"
) -> CheckedUpdate:
    return CheckedUpdate(2, 2, 3, 4096, loss, whole, worst, name)


def print_check(*lines: CheckedUpdate) -> tuple[int, str]:
    text = io.StringIO()
    code = print_updates(
        UpdateTrial(Config(), random_batch(Config(), PROMPTS, 13)),
        [REFERENCE, *lines],
        12.3,
        Console(file=text, width=100),
    )
    return code, text.getvalue()


def test_a_mini_batch_is_always_the_same_and_has_only_tokens_of_the_model():
    one, other = (random_batch(Config(), PROMPTS, 13) for _ in range(2))
    assert len(one.samples) == 12
    for a, b in zip(one.samples, other.samples, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert 0 <= a.tokens.min() <= a.tokens.max() < 13
    assert len(set(one.lengths)) > 3, "completions of many lengths"
    assert np.array_equal(one.rewards, other.rewards)
    assert one.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_columns_are_near_the_scored_ones_so_that_ratios_are_about_one():
    trial = UpdateTrial(Config(), random_batch(Config(), PROMPTS, 13))
    scored = -np.ones(int(trial.batch.lengths.sum()), dtype=np.float32)
    trial.fill_columns(scored)
    assert trial.columns.old is not None
    assert 0 < np.abs(trial.columns.old - scored).mean() < 0.2
    assert trial.columns.ref is None, "reference.kl_coef is 0"
    [[pack]] = trial.packs(1, 100_000)
    assert len(pack.columns.advantages) == len(scored)


@pytest.mark.parametrize(
    ("own", "expected"), [(50, [20, 50, 150]), (20, [20, 150]), (4096, [20, 37, 4096])], ids=["cuts", "least", "all"]
)
def test_budgets_are_the_least_the_configured_and_one_more(own, expected):
    assert pack_budgets([20] * 7 + [10], own) == expected


def test_rank_counts_are_one_two_and_the_configured_as_far_as_gpus_go():
    assert rank_counts(2, None) == [1, 2]
    assert rank_counts(8, None) == [1, 2, 8]
    assert rank_counts(8, 4) == [1, 2]
    assert rank_counts(1, 1) == [1]


def test_equal_gradients_are_exit_code_0():
    code, text = print_check(line(), line(worst=9.9e-5))
    assert code == 0
    assert "✓ all 3 ways to compute the update give the same one" in text
    assert " norm" in text
    assert "12 sequences" in text


@pytest.mark.parametrize(
    "bad", [line(whole=2e-5), line(worst=2e-4), line(loss=0.26), line(whole=np.inf), line(loss=np.nan)]
)
def test_a_different_gradient_is_exit_code_1_and_its_line_is_marked(bad):
    code, text = print_check(line(), bad)
    assert code == 1
    assert "✗ 1 of 3 ways to compute the update give another one" in text
    assert text.count("✓") == 2


def test_the_table_fits_eighty_columns():
    text = io.StringIO()
    trial = UpdateTrial(Config(), random_batch(Config(), PROMPTS, 13))
    print_updates(
        trial, [REFERENCE, line(name="lm.model.layers.1.self_attn.k_proj.weight")], 12.3, Console(file=text, width=80)
    )
    [row] = [row.split() for row in text.getvalue().splitlines() if "k_proj" in row]
    assert row == ["2", "2", "3", "4,096", "0.250000", "3.0e-07", "9.0e-07", "✓", "1.self_attn.k_proj"]


def test_other_cuts_have_the_same_turns_after_the_same_tokens():
    config = load_checked(GUESS)
    trial = UpdateTrial(config, random_batch(config, PROMPTS, 13))
    assert {s.turn_count for s in trial.batch.samples} == {3, 4, 5}
    assert any(after < turn - 1 for s in trial.batch.samples for turn, after in enumerate(s.continued_turns))
    cuts = [trial.cut_again(number).batch.samples for number in range(3)]
    for sample, *others in zip(trial.batch.samples, *cuts, strict=True):
        for other in others:
            assert whole_turns(other) == whole_turns(sample)
            assert np.array_equal(other.logprobs, sample.logprobs)
    assert any(a.continued_turns != b.continued_turns for a, b in zip(trial.batch.samples, cuts[0], strict=True))


def whole_turns(sample: Sample) -> list[tuple[list[int], int]]:
    """All tokens up to the end of each turn, and how many of them are its own."""
    ends: list[list[int]] = [[]]
    for (observation, own), after in zip(sample.turns, sample.continued_turns, strict=True):
        ends.append([*ends[after + 1], *observation.tolist(), *own.tolist()])
    return [(end, len(own)) for end, (_, own) in zip(ends[1:], sample.turns, strict=True)]


def test_cuts_have_a_column_where_there_are_episodes():
    cut = replace(line(name="lm.model.layers.1.self_attn.k_proj.weight"), cuts=20)
    _, text = print_check(line(), cut)
    rows = [row.split() for row in text.splitlines() if " 4,096 " in row and "✓" in row]
    assert [row[4] for row in rows[1:]] == ["0.250000", "20"]
    assert "cuts: how many other cuts of the same episodes were tried" in text
    assert "cuts" not in print_check(line())[1]


def test_bfloat16_has_coarser_tolerances():
    assert line(whole=0.03, worst=0.05).within_tolerance("bfloat16", 0.25)
    assert not line(whole=0.03, worst=0.05).within_tolerance("float32", 0.25)
    assert all(a < b for a, b in zip(TOLERANCES["float32"], TOLERANCES["bfloat16"], strict=True))
