import pytest

from rlsys.runs.best_step import BestStep

ONE_SOURCE = {"reward/mean": 0.5, "eval/easy/accuracy": 0.25, "eval/easy/accuracy/low": 0.1, "eval/easy/pass@2": 0.5}
TWO_SOURCES = ONE_SOURCE | {"eval/hard/accuracy": 0.125, "eval/all/accuracy": 0.1875}


def best_of(metric: str, values: tuple[float, ...]) -> tuple[list[int], BestStep]:
    """The steps that were the best when they came, and the best of all."""
    best, steps = BestStep(metric), []
    for step, value in enumerate(values):
        after = best.after(step, {metric.removeprefix("-"): value})
        steps += [step] if after != best else []
        best = after
    return steps, best


def test_a_step_that_is_better_than_all_before_it_is_the_best():
    steps, best = best_of("eval/easy/accuracy", (0.5, 0.25, 0.5, 0.75))
    assert (steps, best.step, best.value) == ([0, 3], 3, 0.75)
    assert best.after(4, {"reward/mean": 9.0}) == best


def test_where_less_is_better_the_lowest_is():
    steps, best = best_of("-eval/all/accuracy", (0.5, 0.75, 0.25))
    assert (steps, best.value) == ([0, 2], -0.25)


@pytest.mark.parametrize(("metric", "value"), [("eval/all/accuracy", 0.25), ("eval/all/pass@2", 0.5)])
def test_with_one_source_its_own_metric_stands_for_all(metric, value):
    best = BestStep(metric).after(1, ONE_SOURCE)
    assert (best.step, best.value) == (1, value)
    assert not best.explain_missing(ONE_SOURCE)


def test_with_several_sources_the_metric_over_all_counts():
    assert BestStep("eval/all/accuracy").after(1, TWO_SOURCES).value == 0.1875


def test_a_metric_that_no_evaluation_has_is_named_with_similar_ones():
    problem = BestStep("eval/al/acuracy").explain_missing(TWO_SOURCES)
    assert "no evaluation has a metric eval/al/acuracy; it has eval/all/accuracy" in problem
    assert "eval.datasets is empty" in BestStep("eval/all/accuracy").explain_missing({"reward/mean": 1.0})
    assert not BestStep("reward/mean").explain_missing(TWO_SOURCES), "a training step has it"
    assert not BestStep("").explain_missing(TWO_SOURCES)
