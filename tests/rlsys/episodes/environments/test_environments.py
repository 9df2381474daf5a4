"""What all environments have in common: names, missing packages, seeds."""

import json
import sys

import pytest

from rlsys.episodes.environments import environment_name, is_environment, load_environment
from rlsys.episodes.environments.package import row_seed
from rlsys.errors import ConfigError


@pytest.mark.parametrize(
    ("spec", "environment", "name"),
    [
        ("gymnasium:FrozenLake-v1", True, "FrozenLake-v1"),
        ("gymnasium:my_envs:Lake-v0", True, "Lake-v0"),
        ("openenv:https://host:8000/env", True, "openenv"),
        ("my_games.gymnasium:play", False, "play"),
        ("gymnasium.py:play", False, "play"),
        ("gymnasium", False, "gymnasium"),
    ],
)
def test_what_stands_before_the_colon_names_the_package(spec, environment, name):
    assert is_environment(spec) is environment
    assert environment_name(spec) == name


@pytest.mark.parametrize(
    ("package", "spec"),
    [
        ("gymnasium", "gymnasium:FrozenLake-v1"),
        ("openenv", "openenv:http://127.0.0.1:1"),
        ("textarena", "textarena:TowerOfHanoi-v0"),
        ("verifiers", "verifiers:my_taskset"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(package, spec, monkeypatch):
    for module in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{spec} needs the package {package}: pip install 'rlsys\[{package}\]'"):
        load_environment(spec, {})


def test_a_row_without_a_seed_has_one_that_follows_from_it():
    assert row_seed({"seed": 7}) == 7
    seeds = {row_seed({"prompt": "Play.", "level": level}) for level in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**31 for seed in seeds), "as every package takes it"
    assert row_seed({"a": 1, "b": None}) == row_seed(json.loads('{"b": null, "a": 1}')), "not from the order of fields"


@pytest.mark.parametrize("seed", [-1, 1.5, "7", True])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ValueError, match=r"the row's seed is .*it must be a whole number of 0 or more"):
        row_seed({"seed": seed})
