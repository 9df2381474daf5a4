import pytest

from rlsys.runs.best_step import BestStep

OF_ONE = {"reward/mean": 0.5, "eval/easy/accuracy": 0.25, "eval/easy/accuracy/low": 0.1, "eval/easy/pass@2": 0.5}
OF_TWO = OF_ONE | {"eval/hard/accuracy": 0.125, "eval/all/accuracy": 0.1875}


def test_a_step_that_is_better_than_all_before_it_is_the_best():
    best = BestStep("eval/easy/accuracy")
    assert [best.update(step, {"eval/easy/accuracy": x}) for step, x in enumerate((0.5, 0.25, 0.5, 0.75))] == [
        True,
        False,
        False,
        True,
    ]
    assert (best.step, best.value) == (3, 0.75)
    assert not best.update(4, {"reward/mean": 9.0})


def test_where_less_is_better_the_lowest_is():
    best = BestStep("-eval/all/accuracy")
    assert [best.update(step, {"eval/all/accuracy": x}) for step, x in enumerate((0.5, 0.75, 0.25))] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(("figure", "value"), [("eval/all/accuracy", 0.25), ("eval/all/pass@2", 0.5)])
def test_of_one_source_the_figure_of_all_is_its_own(figure, value):
    best = BestStep(figure)
    assert best.update(1, OF_ONE)
    assert best.value == value
    assert not best.explain_missing(OF_ONE)


def test_of_several_sources_the_figure_of_all_is_that_of_all():
    best = BestStep("eval/all/accuracy")
    assert best.update(1, OF_TWO)
    assert best.value == 0.1875


def test_a_figure_that_no_evaluation_has_is_named_with_those_that_are_like_it():
    assert "no evaluation has a figure eval/al/acuracy; it has eval/all/accuracy" in BestStep(
        "eval/al/acuracy"
    ).explain_missing(OF_TWO)
    assert "eval.datasets is empty" in BestStep("eval/all/accuracy").explain_missing({"reward/mean": 1.0})
    assert not BestStep("reward/mean").explain_missing(OF_TWO), "a training step has it"
    assert not BestStep("").explain_missing(OF_TWO)
