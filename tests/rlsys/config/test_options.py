"""Options of functions, filled from the configuration."""

from dataclasses import dataclass

import pytest

from rlsys.algorithms.corrections import CORRECTIONS
from rlsys.algorithms.losses import LOSSES
from rlsys.config.methods import AlgorithmConfig, CorrectionConfig
from rlsys.config.options import select_options


@dataclass
class Section:
    low: float | None = 0.5
    high: float | None = None
    other: int = 3


def test_a_function_gets_the_options_it_names_and_no_others():
    def function(values, *, low, other=1):
        return low, other

    assert select_options(function, Section()) == {"low": 0.5, "other": 3}


def test_null_leaves_the_function_s_own_default():
    def function(values, *, low=0.1, high=0.9):
        return low, high

    assert function([], **select_options(function, Section(low=None))) == (0.1, 0.9)


def test_positional_arguments_are_not_options():
    assert select_options(lambda low, high: None, Section(high=2.0)) == {}


def test_more_may_be_given_than_the_section_has():
    def function(values, *, low, greedy=None):
        return low, greedy

    assert select_options(function, Section(), greedy=[1], weights=[2]) == {"low": 0.5, "greedy": [1]}
    assert select_options(function, Section(), greedy=None) == {"low": 0.5}


def test_wrapped_functions_still_show_their_options():
    assert select_options(LOSSES["ppo_clip"], AlgorithmConfig(clip_high=0.28, dual_clip=3.0)) == {
        "clip_high": 0.28,
        "dual_clip": 3.0,
    }
    assert select_options(LOSSES["reinforce"], AlgorithmConfig()) == {}
    assert select_options(CORRECTIONS["icepop"], CorrectionConfig(low=0.4, high=3.0)) == {"low": 0.4, "high": 3.0}


@pytest.mark.parametrize("name", LOSSES)
def test_by_default_every_loss_keeps_its_own_defaults(name):
    assert select_options(LOSSES[name], AlgorithmConfig()) == {}
