"""The schema: its options, and the names that it lists."""

import dataclasses
import inspect
from pathlib import Path

import pytest

from rlsys.algorithms import advantages, corrections, kl, losses
from rlsys.batching import packing
from rlsys.checks import values
from rlsys.checks.methods import CORRECTION_BOUNDS
from rlsys.config import loading, methods
from rlsys.config.schema import Config
from rlsys.config.transports import TRANSPORTS

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def leaves(section: object, prefix: str = "") -> list[tuple[str, object]]:
    found = []
    for name, value in ((f.name, getattr(section, f.name)) for f in dataclasses.fields(section)):
        found += leaves(value, f"{prefix}{name}.") if dataclasses.is_dataclass(value) else [(prefix + name, value)]
    return found


def test_the_defaults_fit_together(read):
    assert read("").algorithm.advantage == "grpo"


def test_configurations_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().trainer.steps = 3


def test_the_names_listed_are_the_names_there_are():
    from workers.sync import ENDS

    assert set(methods.ADVANTAGES) == {"gae", *advantages.ESTIMATORS}, "gae has a critic and a file of its own"
    assert set(methods.LOSSES) == set(losses.LOSSES)
    assert set(methods.CORRECTIONS) == set(corrections.CORRECTIONS)
    assert set(methods.KL_ESTIMATORS) == set(kl.ESTIMATORS)
    assert set(TRANSPORTS) == set(ENDS)


METHODS = [
    *((methods.ADVANTAGES, name, f) for name, f in advantages.ESTIMATORS.items()),
    *((methods.LOSSES, name, f) for name, f in losses.LOSSES.items()),
    *((methods.CORRECTIONS, name, f) for name, f in corrections.CORRECTIONS.items()),
]


@pytest.mark.parametrize(("listed", "name", "function"), METHODS, ids=[name for _, name, _ in METHODS])
def test_the_options_listed_of_a_method_are_those_its_function_has(listed, name, function):
    keywords = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    from_the_loop = {"lengths", "greedy", "weights"}
    assert set(listed[name]) == {*keywords} - from_the_loop


def test_every_option_of_a_method_is_a_field_that_may_be_null():
    defaults = Config()
    for section, table in (
        (defaults.algorithm, methods.ADVANTAGES | methods.LOSSES),
        (defaults.correction, methods.CORRECTIONS),
    ):
        for option in {option for options in table.values() for option in options}:
            assert getattr(section, option) is None, option


def test_group_relative_methods_are_known_advantages():
    assert {*methods.ADVANTAGES} - {*methods.GROUP_RELATIVE} == {"reinforce_pp", "remax", "raw", "gae"}


def test_the_bounds_known_of_corrections_are_those_of_their_functions():
    both = {}
    for name, function in corrections.CORRECTIONS.items():
        defaults = {p.name: p.default for p in inspect.signature(function).parameters.values()}
        if {"low", "high"} <= {*defaults}:
            both[name] = (defaults["low"], defaults["high"])
    assert both == CORRECTION_BOUNDS


def test_hints_name_the_recipes_of_methods_on_the_tiny_model():
    files = {path.stem for path in CONFIGS if not path.stem.endswith(("_gpu", "_cpu"))}
    assert {*values.RECIPES} == files


def test_the_normalizers_listed_are_those_the_packing_knows():
    import torch

    for name in methods.NORMALIZERS:
        assert len(packing.token_weights(torch.tensor([2]), name, constant=2)) == 2
    with pytest.raises(ValueError, match=", ".join(methods.NORMALIZERS)):
        packing.token_weights(torch.tensor([2]), "")


def test_flatten_names_every_option_once():
    assert list(loading.flatten(Config())) == list(dict(leaves(Config())))
    named = {"reward.functions": {"zigzag": 1.0}, "data.train": {"builtin:zigzag": None}, "eval.datasets": {}}
    assert loading.flatten(Config()) == dict(leaves(Config())) | named


def test_there_are_at_most_150_options():
    assert len(leaves(Config())) <= 150
