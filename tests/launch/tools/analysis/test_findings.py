"""Each check on metrics where it must report a finding, and on metrics where it must not."""

import dataclasses

import pytest

from launch.tools.analysis import findings
from launch.tools.analysis.findings import CHECKS, RunData, check_descriptions
from rlsys.config.schema import Config, EpisodeConfig, TrainerConfig

STEPS = 20
CONFIG = Config(trainer=TrainerConfig(prompts_per_step=4, samples_per_prompt=2))


def ramp(first: float, last: float, steps: int = STEPS) -> list[float]:
    return [first + (last - first) * i / (steps - 1) for i in range(steps)]


def make_run(events=(), config=CONFIG, busy=None, **figures) -> RunData:
    """`make_run(**{"reward/mean": [0, 1]})`: by name, a value per step from 1 on; None if a line lacks it."""
    count = max((len(values) for values in figures.values()), default=0)
    lines = [{"step": i + 1} | {n: v[i] for n, v in figures.items() if v[i] is not None} for i in range(count)]
    event_lines = [{"time": 1.0, "event": kind, **facts} for kind, facts in events]
    return dataclasses.replace(RunData.from_events(lines, event_lines, config), busy_share=busy or {})


def run_check(check: str, *arguments, **figures) -> list[findings.Finding]:
    return [f for f in findings.run_checks(make_run(*arguments, **figures)) if f.check == check]


def held_out(first: float, last: float, half: float = 0.02) -> dict[str, list[float | None]]:
    """An accuracy at the first and the last step, with its interval."""
    nothing = [None] * (STEPS - 2)
    name = "eval/easy/accuracy"
    return {
        name: [first, *nothing, last],
        f"{name}/low": [first - half, *nothing, last - half],
        f"{name}/high": [first + half, *nothing, last + half],
    }


TOOLS = dataclasses.replace(CONFIG, episode=EpisodeConfig(tools=["python", "my_tools.py:search", {"mcp": {}}]))
RISING = {"reward/mean": ramp(0.1, 0.9)}
# For each check: metrics and events with its problem, and without.
CASES = {
    "ended_badly": (
        {"events": [("stop", {"cause": "OSError: no space left", "step": 3})]},
        {"events": [("stop", {"cause": "stop requested", "step": 3})]},
    ),
    "skipped_updates": (
        {"update/skipped": [0.0, 1.0, 0.0]},
        {"update/skipped": [0.0, 0.0, 0.0]},
    ),
    "stalled_workers": (
        {"events": [("stall", {"doing": "update", "waiting_for": ["policy-1"], "seconds": 1800})]},
        {"events": [("sync", {"version": 1})]},
    ),
    "lost_workers": (
        {"events": [("replaced", {"worker": "rollout-1", "cause": "it was killed"})]},
        {"events": [("resume", {"step": 4})]},
    ),
    "wrong_weights": (
        {"events": [("wrong weights", {"worker": "rollout-0", "cause": "1 of 26 tensors differ: lm_head"})]},
        {"events": [("sync", {"version": 4})]},
    ),
    "failed_rewards": (
        {"reward/failed": [0.0, 2.0], "failure/timeout": [None, 2.0]},
        {"reward/failed": [0.0, 0.0]},
    ),
    "only_training_improves": (
        RISING | held_out(0.40, 0.41),
        RISING | held_out(0.40, 0.80),
    ),
    "accuracy_drop": (
        {"eval/easy/accuracy": [0.2, 0.7, 0.5], "eval/easy/accuracy/high": [0.25, 0.75, 0.55]},
        {"eval/easy/accuracy": [0.2, 0.7, 0.66], "eval/easy/accuracy/high": [0.25, 0.75, 0.71]},
    ),
    "nothing_learned": (
        {"reward/mean": [0.4, 0.5] * 10},
        {"reward/mean": ramp(0.4, 0.9)},
    ),
    "entropy_collapse": (
        {"entropy": [2.0] * 10 + [0.1] * 10},
        {"entropy": ramp(2.0, 0.8)},
    ),
    "explosion": (
        {"kl": ramp(0.0, 1.5), "grad_norm": ramp(0.5, 112.0), "reward/mean": [0.3] * 20},
        {"kl": ramp(0.0, 0.2), "grad_norm": ramp(0.1, 2.0), "reward/mean": [0.3] * 20},
    ),
    "no_spread": (
        {"groups/equal": [0.0] * 10 + [3.0] * 10, "reward/mean": [0.95] * 20},
        {"groups/equal": [3.0] * 10 + [1.0] * 10},
    ),
    "dead_component": (
        {"reward/component/format": [0.0] * 8, "reward/component/exact": ramp(0, 1, 8)},
        {"reward/component/format": [0.0] * 7 + [0.1]},
    ),
    "truncation": (
        {"length/truncated": ramp(0.0, 0.4)},
        {"length/truncated": [0.3] * 20},
    ),
    "cut_episodes": (
        {"episode/turns": [8.0] * 20, "length/truncated": [0.95] * 20, "episode/finish/turns": [0.9] * 20},
        {"episode/turns": [8.0] * 20, "length/truncated": [0.5] * 20, "episode/finish/turns": [0.5] * 20},
    ),
    "slow_environments": (
        {"busy": {"rollout-0": 0.2}, "episode/turns": [2.0], "time/rollout": [0.8], "time/step": [1.0]},
        {"busy": {"rollout-0": 0.7}, "episode/turns": [2.0], "time/rollout": [0.8], "time/step": [1.0]},
    ),
    "unreadable_calls": (
        {"episode/unreadable_calls": [1.0] * 3, "episode/tool_calls": [2.0] * 3},
        {"episode/unreadable_calls": [1.0] * 10 + [0.5] * 10, "episode/tool_calls": [2.0] * 20},
    ),
    "unused_tools": (
        {"config": TOOLS, "episode/turns": [2.0] * 8, "episode/tool_calls/python": [0.5] * 8},
        {"config": TOOLS, "episode/turns": [2.0] * 8}
        | {"episode/tool_calls/python": [0.5] * 8, "episode/tool_calls/search": [None] * 7 + [0.1]},
    ),
    "mismatch_grows": (
        {"mismatch/mean_abs": ramp(1e-5, 8e-4)},
        {"mismatch/mean_abs": ramp(1e-6, 2e-5)},  # grown, but still rounding
    ),
    "heavy_clipping": (
        {"clip_fraction": [0.02] * 10 + [0.35] * 10},
        {"clip_fraction": [0.35] * 10 + [0.02] * 10},
    ),
    "idle_engine": (
        {"busy": {"rollout-0": 0.6, "rollout-1": 0.1, "policy-0": 0.0}},
        {"busy": {"rollout-0": 0.6, "rollout-1": 0.5, "policy-0": 0.0}},
    ),
    "lower_throughput": (
        {"tokens_per_second": ramp(1000, 300)},
        {"tokens_per_second": ramp(1000, 900)},
    ),
}  # fmt: skip


def test_every_check_is_tested_and_has_a_description():
    assert [check.__name__ for check in CHECKS] == list(CASES)
    assert all(text.endswith(".") for text in check_descriptions())


@pytest.mark.parametrize("check", CASES)
def test_a_check_reports_its_problem(check):
    reported = run_check(check, **CASES[check][0])
    assert reported, "no finding"
    assert all(f.title and f.text for f in reported)


@pytest.mark.parametrize("check", CASES)
def test_a_check_is_silent_without_its_problem(check):
    assert run_check(check, **CASES[check][1]) == []


@pytest.mark.parametrize("check", CASES)
def test_a_check_is_silent_about_a_run_that_has_just_started(check):
    assert run_check(check) == []
    assert (
        run_check(check, **{"reward/mean": [0.5], "entropy": [0.0], "length/truncated": [1.0], "groups/equal": [1.0]})
        == []
    )


def test_evidence_names_figures_steps_and_samples():
    failed = {"reward/failed": [0.0, 2.0, 0.0, 1.0], "failure/timeout": [None, 2.0, None, 1.0]}
    [finding] = run_check("failed_rewards", **failed, **{"reward/requested": [8.0] * 4})
    assert finding.figures == ("reward/failed", "failure/timeout")
    assert finding.steps == (2, 4)
    assert finding.samples == {"failure": "timeout", "set": "step"}
    assert "3 reward verdicts failed" in finding.title
    assert "9.38 % of all, in steps 2 and 4 (timeout 3)" in finding.text  # 3 of 4 x 8


def test_few_failures_are_a_note_and_many_a_warning():
    few = {"reward/failed": [0.0] * 19 + [1.0], "reward/requested": [8.0] * 20}
    assert [f.tone for f in run_check("failed_rewards", **few)] == ["note"]
    assert [
        f.tone for f in run_check("failed_rewards", **{"reward/failed": [1.0, 0.0], "reward/requested": [8.0] * 2})
    ] == ["warning"]
    many = {"reward/failed": [4.0, 4.0], "reward/requested": [1000.0, 600.0]}  # with dropped groups of dynamic sampling
    [finding] = run_check("failed_rewards", **many)
    assert finding.tone == "note"
    assert "0.5 % of all" in finding.text


def test_failed_verdicts_of_an_evaluation_are_reported():
    evaluated = {"eval/easy/failed": [100.0, 0.0], "eval/hard/failed": [10.0, 0.0], "eval/all/failed": [110.0, 0.0]}
    samples = {"eval/easy/samples": [128.0] * 2, "eval/hard/samples": [128.0] * 2, "eval/all/samples": [256.0] * 2}
    reasons = {"eval/failure/timeout": [110.0, None]}
    [finding] = run_check("failed_rewards", **{"reward/failed": [0.0, 0.0]}, **evaluated, **samples, **reasons)
    assert (finding.tone, finding.title) == ("warning", "110 held-out verdicts failed")
    assert "21.5 % of all, in step 1 (timeout 110)" in finding.text
    assert finding.figures == ("eval/easy/failed", "eval/hard/failed", "eval/failure/timeout")
    assert finding.samples == {"failure": "timeout", "set": "eval"}


@pytest.mark.parametrize("check", CASES)
def test_samples_of_a_step_are_training_samples(check):
    for finding in run_check(check, **CASES[check][0]):
        assert not finding.samples or "step" not in finding.samples or finding.samples["set"] == "step"


def test_equal_rewards_matter_only_to_group_relative_methods():
    equal = {"groups/equal": [4.0] * STEPS}
    assert run_check("no_spread", **equal)
    gae = dataclasses.replace(CONFIG, algorithm=dataclasses.replace(CONFIG.algorithm, advantage="gae"))
    assert not [f for f in findings.run_checks(make_run(config=gae, **equal)) if f.check == "no_spread"]


def test_problems_come_before_warnings():
    events = [
        ("replaced", {"worker": "reward-0", "cause": "x"}),
        ("stop", {"cause": "NothingToLearn: all groups are equal"}),
    ]
    assert [f.tone for f in findings.run_checks(make_run(events))] == ["problem", "warning"]


def test_only_the_held_out_set_that_does_not_improve_is_reported():
    flat = {name.replace("easy", "hard"): values for name, values in held_out(0.3, 0.3).items()}
    [finding] = run_check("only_training_improves", **RISING, **held_out(0.4, 0.9), **flat)
    assert "accuracy on hard does not" in finding.title
    assert finding.figures == ("reward/mean", "eval/hard/accuracy")


def test_a_shuffled_reward_is_named_as_the_reason():
    shuffled = dataclasses.replace(CONFIG, reward=dataclasses.replace(CONFIG.reward, shuffle=True))
    [finding] = run_check("nothing_learned", [], shuffled, **{"reward/mean": [0.5] * 20})
    assert "reward.shuffle is on" in finding.text


def test_a_falling_reward_has_a_title_of_its_own():
    [finding] = run_check("nothing_learned", **{"reward/mean": ramp(0.9, 0.1)})
    assert finding.title == "The reward falls"


def test_a_reward_that_cannot_rise_is_not_reported():
    level = {"reward/mean": [0.4, 0.5] * 10}
    dynamic = dataclasses.replace(CONFIG, dynamic_sampling=dataclasses.replace(CONFIG.dynamic_sampling, enabled=True))
    assert run_check("nothing_learned", [], dynamic, **level) == []
    assert run_check("nothing_learned", **{"reward/mean": [0.985, 0.995] * 10}) == []
    assert run_check("nothing_learned", **{"reward/mean": [3.2, 3.1] * 10}), "of a score that goes beyond 1"
    assert run_check("nothing_learned", **level, **held_out(0.4, 0.6)) == []
    assert run_check("nothing_learned", **level, **held_out(0.4, 0.41)), "within its interval"


def test_an_explosion_is_reported_only_if_the_reward_does_not_rise():
    kl = {"kl": [0.0] * 5 + [0.8] * 15}
    assert [f.title for f in run_check("explosion", **kl)] == ["kl explodes"]
    assert run_check("explosion", **kl, **RISING) == run_check("explosion", **kl, **held_out(0.4, 0.6)) == []
    [finding] = run_check("explosion", **CASES["explosion"][0])
    assert finding.title == "kl and grad_norm explode"
    assert finding.figures == ("kl", "grad_norm", "entropy", "reward/mean")


def test_completions_cut_from_the_start_are_reported():
    [finding] = run_check("truncation", **{"length/truncated": [1.0] * 20})
    assert finding.title == "Nearly all completions are cut"
    assert "100 % of the completions reach" in finding.text


def test_episodes_that_are_cut_are_reported_by_the_limit_that_most_of_them_reach():
    shares = {"episode/finish/turns": ramp(0.0, 0.5), "episode/finish/window": [0.1] * 20}
    cut = {"episode/turns": [8.0] * 20, "length/truncated": ramp(0.1, 0.6)} | shares
    assert run_check("truncation", **cut) == []
    [finding] = run_check("cut_episodes", **cut)
    assert finding.title == "Episodes are cut more often"
    assert "most often at episode.max_turns." in finding.text
    assert finding.figures == ("episode/finish/turns", "episode/finish/window", "episode/turns")
    assert finding.samples == {"step": 20, "finish": "turns", "set": "step"}
    [finding] = run_check("cut_episodes", **cut | {"episode/finish/length": [0.6] * 20})
    assert "most often at rollout.max_new_tokens." in finding.text
    assert run_check("cut_episodes", **{"length/truncated": [1.0] * 20}) == [], "single answers"


def test_calls_that_cannot_be_read_name_the_parser_in_use():
    hermes = dataclasses.replace(CONFIG, episode=EpisodeConfig(tool_parser="hermes"))
    some = {"episode/unreadable_calls": [0.5, 0.9, 1.0, None] * 5}
    assert run_check("unreadable_calls", [], hermes, **some) == [], "four fifths"
    [finding] = run_check("unreadable_calls", [], hermes, **{"episode/unreadable_calls": [0.95, None]})
    assert finding.title == "Hardly any tool call can be read"
    assert "95 % of the calls" in finding.text
    assert "episode.tool_parser (hermes)" in finding.text


def test_tools_that_are_never_called_are_named_unless_no_call_can_be_read():
    nothing = {"episode/turns": [1.0] * 8}
    [finding] = run_check("unused_tools", [], TOOLS, **nothing)
    assert finding.title == "python and search: never called"
    assert run_check("unused_tools", [], TOOLS, **nothing, **{"episode/unreadable_calls": [1.0] * 8}) == []
    assert run_check("unused_tools", [], TOOLS, **{"episode/turns": [1.0] * 7}) == [], "too early to tell"


def test_without_a_configuration_the_other_checks_still_report():
    reported = findings.run_checks(
        make_run([], None, **{"entropy": [2.0] * 10 + [0.1] * 10, "reward/failed": [1.0] * 20})
    )
    assert {f.check for f in reported} == {"entropy_collapse", "failed_rewards"}


def test_metrics_that_are_not_finite_are_ignored():
    values = [2.0] * 10 + [0.1] * 10
    values[3] = float("nan")
    assert run_check("entropy_collapse", entropy=values)


@pytest.mark.parametrize("broken", [None, "much", True])
def test_metrics_that_are_not_numbers_are_ignored_by_every_check(broken):
    figures = {name: values for metrics, _ in CASES.values() for name, values in metrics.items() if "/" in name}
    lines = [{"step": i + 1} | dict.fromkeys(figures, broken) for i in range(STEPS)]
    assert findings.run_checks(RunData(lines, config=CONFIG)) == []
    good = [line | {"eval/easy/accuracy": 0.2 + 0.1 * (i == 0)} for i, line in enumerate(lines)]
    assert [f.check for f in findings.run_checks(RunData(good, config=CONFIG))] == ["accuracy_drop"], (
        "without an interval"
    )
