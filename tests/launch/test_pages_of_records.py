"""Pages say what records say: their tables and sentences are compared with what was measured."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from records import ROOT, listed

from rlsys.runs.samples import write_samples
from rlsys.types import Batch, Prompt, Sample

sys.path.append(str(ROOT / "tests" / "bench"))
sys.path.append(str(ROOT / "tests" / "bench" / "biases"))
sys.path.append(str(ROOT / "tests" / "bench" / "trl"))
import bias_runs
import compare
import episode_demos
import family_record
import real
import recipes


def page(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_table_of_recipes_is_that_of_the_record() -> None:
    lines = recipes.RESULTS.read_text().splitlines()
    assert recipes.table([json.loads(line) for line in lines]) in page("configs/README.md")


@pytest.mark.parametrize("name", ["guess", "calculator"])
def test_the_demos_of_episodes_solve_what_the_page_says(name: str) -> None:
    record = json.loads(episode_demos.RECORD.read_text())
    runs = [r for r in record if r["demo"] == f"{name}_cpu" and r["overrides"] != episode_demos.OUTCOME_ALONE]
    ends = [[100 * [*run["solved"].values()][i] for run in runs] for i in (0, -1)]
    (row,) = re.findall(
        rf"^\|`{name}_cpu.yaml`\|(\d[^|]*) % → ([^|]*) %\|(\d+) → (\d+) %\|", page("configs/README.md"), re.M
    )
    shown = [[*map(int, seeds.split(", ")), int(shuffled)] for seeds, shuffled in zip(row[:2], row[2:], strict=True)]
    assert shown == [pytest.approx(shares, abs=0.55) for shares in ends], "rounded, and in the record too"


def test_the_page_has_the_game_without_a_score_per_guess() -> None:
    record = json.loads(episode_demos.RECORD.read_text())
    shares = [[*r["solved"].values()] for r in record if r["overrides"] == episode_demos.OUTCOME_ALONE]
    assert shares
    *middle, last = (f"{100 * share:.0f}" for share in shares[0][1:])
    assert f"{', '.join(middle)} and {last} %" in page("configs/README.md")


# --- biases -----------------------------------------------------------------------------------------------------------

Curves = dict[str, list[float]]


def curves_of(comparison: str) -> dict[str, list[Curves]]:
    """By choice, each with three seeds."""
    choices: dict[str, dict[int, Curves]] = {}
    for line in page("tests/bench/biases/runs.jsonl").splitlines():
        run = json.loads(line)
        if run["comparison"] == comparison:
            choices.setdefault(run["choice"], {})[run["seed"]] = run["curves"]
    assert choices
    assert all(seeds.keys() == {0, 1, 2} for seeds in choices.values())
    return {choice: [*seeds.values()] for choice, seeds in choices.items()}


def changes(curves: list[Curves], name: str) -> list[float]:
    return [one[name][-1] - one[name][0] for one in curves]


def test_with_sequence_mean_wrong_answers_become_longer_and_right_ones_shorter() -> None:
    curves = curves_of("length")
    assert min(changes(curves["sequence_mean"], "tokens of wrong answers")) > 1
    assert max(changes(curves["sequence_mean"], "tokens of right answers")) < -1
    assert min(changes(curves["constant"], "tokens of right answers")) > 1
    assert max(changes(curves["constant"], "tokens of wrong answers")) < -1


def test_without_the_deviation_even_digits_are_learned_and_with_it_not() -> None:
    curves = curves_of("difficulty")
    assert min(changes(curves["std: none"], "share of even digits")) > 0.3
    assert max(changes(curves["std: sample"], "share of even digits")) < 0
    for with_deviation, without in zip(curves["std: sample"], curves["std: none"], strict=True):
        assert without["mean reward"][-1] > with_deviation["mean reward"][-1]


def test_the_table_of_modes_shows_every_setting_that_was_run() -> None:
    """A choice whose runs do not show what one hoped for stands there too."""
    mine = [r for r in map(json.loads, bias_runs.RESULTS.read_text().splitlines()) if r["comparison"] == "two_modes"]
    assert {r["choice"] for r in mine} <= set(bias_runs.COMPARISONS["two_modes"].choices)
    assert bias_runs.table(mine) in page("rlsys/algorithms/BIASES.md")


@pytest.mark.parametrize("mode_reward", [0.2, 0.5])
def test_degrpo_is_compared_with_grpo_under_the_same_reward_of_a_mode(mode_reward: float) -> None:
    grpo, degrpo = (
        {o.partition("=")[0]: o for o in bias_runs.COMPARISONS["two_modes"].choices[f"{method}, think {mode_reward}"]}
        for method in ("GRPO", "DeGRPO")
    )
    assert grpo["algorithm.control_tokens"] == degrpo["algorithm.control_tokens"]
    assert set(grpo) - set(degrpo) == {"algorithm.advantage", "algorithm.normalize", "algorithm.control_weight"}


# --- TRL --------------------------------------------------------------------------------------------------------------


def test_the_page_says_how_many_rounds_stand_behind_a_comparison_with_trl() -> None:
    rows = [row for row in page("tests/bench/README.md").splitlines() if "compare.py --" in row]
    assert rows
    for row in rows:
        (rounds,) = re.findall(r"--rounds (\d)", row)
        assert f"{['one', 'two', 'three', 'four', 'five'][int(rounds) - 1]} round" in row


def test_finished_rounds_are_kept_while_code_and_options_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = "abc1234:0123456"
    monkeypatch.setattr(compare, "ROUNDS", tmp_path / "rounds.json")
    monkeypatch.setattr(compare, "stamp", lambda measurement: now)
    monkeypatch.setattr(compare, "current", lambda results, _: [one for one in results if one.get("commit") == now])
    options = argparse.Namespace(case="small", steps=8, warm_up=3, only=compare.SIDES)
    assert compare.saved_rates(options) == {}
    compare.save_rates(options, {"rlsys, a": [2.0], "TRL, b": []})
    compare.save_rates(options, {"rlsys, a": [2.0, 3.0], "TRL, b": [1.0]})
    assert compare.saved_rates(options) == {"rlsys, a": [2.0, 3.0], "TRL, b": [1.0]}
    alone = argparse.Namespace(**vars(options) | {"only": ["TRL"]})
    assert compare.saved_rates(alone) == {"TRL, b": [1.0]}
    compare.save_rates(alone, {"TRL, b": [1.0, 1.5]})
    assert compare.saved_rates(options) == {"rlsys, a": [2.0, 3.0], "TRL, b": [1.0, 1.5]}
    assert compare.saved_rates(argparse.Namespace(**vars(options) | {"steps": 9})) == {}
    now = "abc1235:9123456"
    assert compare.saved_rates(options) == {}


# --- families ---------------------------------------------------------------------------------------------------------


def test_the_engines_of_the_table_of_families_are_those_that_ran() -> None:
    """`yes` and `sync.verify=false` only where an engine sampled and a whole run was right; `no` where one did not."""
    record = family_record.read_record()
    if record.keys() != family_record.PARTS.keys():
        assert "families.json" in listed()
        return
    rows = [row.strip("|").split("|") for row in page("rlsys/models/README.md").splitlines() if row.startswith("|`")]
    columns = {name.strip(" `"): engines for names, _, _, engines in rows for name in names.split(",")}
    runs = {name: "ok" for name in columns if record["runs"]["families"].get(name) == "ok"}
    shown = {name for name, engines in columns.items() if engines in ("yes", "`sync.verify=false`")}
    assert shown == runs.keys()
    sampled = {name for name, answer in record["engines"]["families"].items() if answer == "samples"}
    assert shown - {"llama4_text"} <= sampled, "engines run Llama 4 only in whole runs"
    assert {name for name, engines in columns.items() if engines == "no"} <= record["engines"]["families"].keys()


REPORT = """<testsuites><testsuite>
<testcase name="test_a[gpt2]"><properties><property name="answer" value="samples"/></properties></testcase>
<testcase name="test_a[mamba]"/>
<testcase name="test_a[opt]"><skipped message="no tiny model by common sizes&#10;more"/></testcase>
<testcase name="test_a[bloom]"><failure message="assert 1 == 2"/></testcase>
<testcase name="test_without_a_family"/>
</testsuite></testsuites>"""


def test_a_family_that_fails_or_is_newly_skipped_does_not_enter_the_record(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    answers = family_record.answers(tmp_path / "report.xml")
    assert answers == {
        "gpt2": "samples",
        "mamba": "ok",
        "opt": "skipped: no tiny model by common sizes",
        "bloom": "failure: assert 1 == 2",
    }
    result = {"families": answers}
    assert family_record.problems(result, {}) == ["bloom: failure: assert 1 == 2"]
    assert family_record.problems(result, {"families": {"opt": "skipped: other words"}}) == [
        "bloom: failure: assert 1 == 2"
    ]
    assert family_record.problems(result, {"families": {"opt": "ok"}})[0].startswith("opt: skipped")


# --- Gemma 3 270M -----------------------------------------------------------------------------------------------------


def test_the_table_of_gemma_is_that_of_the_record() -> None:
    if [*(record := real.read_record())] == [*real.RUNS]:
        assert real.table(record) in page("configs/README.md")
    else:
        assert "real.json" in listed()


def make_run(folder: Path, ends: dict[str, float]) -> Path:
    """A run as `rlsys train` leaves it, of two prompts a task; half of them were right before."""
    lines: list[dict[str, Any]] = []
    (folder / "samples").mkdir(parents=True)
    for step in (0, 10):
        line: dict[str, Any] = {"step": step}
        prompts, samples, rewards = [], [], []
        for task, end in ends.items():
            accuracy = end if step else 0.5
            name = f"eval/{task}/accuracy"
            line |= {name: accuracy, f"{name}/low": accuracy - 0.1, f"{name}/high": accuracy + 0.1}
            for i in range(2):
                prompts.append(Prompt(f"{task}:{i}#{step}", task, f"example\n{task} {i} =", [1], {}))
                rewards.append(float(i < 2 * accuracy))
                samples.append(
                    Sample(prompts[-1].uid, 0, f" {step}", np.ones(1, np.int32), np.zeros(1, np.float32), "stop", step)
                )
        groups = np.arange(len(samples))
        batch = Batch(prompts, samples, groups, np.array(rewards, np.float32), [{} for _ in samples])
        write_samples(folder / "samples" / f"eval-{step:06d}.parquet", batch)
        lines += [line, {"step": step + 1, "loss": 0.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_record_has_what_a_run_left(tmp_path: Path) -> None:
    ends = dict.fromkeys(real.TASKS, 0.5) | {"sort": 1.0}
    results = real.results_of(make_run(tmp_path, ends))
    assert results["tasks"]["max"] == {"prompts": 2, "accuracy": {"0": [0.5, 0.4, 0.6], "10": [0.5, 0.4, 0.6]}}
    assert results["tasks"]["sort"]["accuracy"]["10"] == [1.0, 0.9, 1.1]
    assert results["became_right"] == [["sort 1 =", "0", "10"]]


def test_the_table_has_a_column_for_each_run(tmp_path: Path) -> None:
    runs = [
        real.results_of(make_run(tmp_path / str(i), dict.fromkeys(real.TASKS, end))) for i, end in enumerate((0.9, 0.2))
    ]
    facts = {"commit": "abc1234:0123456", "seconds": 1234}
    text = real.table(dict(zip(("seed 0", "shuffled rewards"), (facts | run for run in runs), strict=True)))
    assert "|task|prompts|before|seed 0|shuffled rewards|\n" in text
    assert "|max|2|50 (40–60)|90 (80–100)|20 (10–30)|\n" in text
    assert "|mean of tasks||50|90|20|\n|minutes|||21|21|\n" in text
    assert text.count("`abc1234:0123456`") == 2
