"""The table of roles: what every row promises to those that loop over it."""

from pathlib import Path
from pkgutil import resolve_name

import pytest

from launch.roles import ROLES, StartFacts, describe_workers, role_of, roles_of, worker_names
from rlsys.config.loading import load_config
from rlsys.config.schema import Config

ROOT = Path(__file__).parents[2]
EVERYTHING = (
    *("algorithm.advantage=gae", "reference={kl_coef: 0.1, ranks: 2}", "models={judge: {path: 'builtin:tiny'}}"),
    *("models.judge.engines=2", "episode.play=builtin:guess"),
    "reward.functions={zigzag: 1.0, grader: {function: model, path: m}}",
)


def config(*overrides: str) -> Config:
    return load_config(ROOT / "configs" / "tiny_cpu.yaml", overrides)


@pytest.mark.parametrize("name", ROLES)
def test_a_role_names_classes_that_exist(name: str) -> None:
    role = ROLES[name]
    assert isinstance(resolve_name(role.worker), type)
    assert callable(resolve_name(role.group).start)
    assert not role.ray_options or resolve_name(role.ray_options)
    assert list(ROLES).index(name) > max((list(ROLES).index(other) for other in role.needs), default=-1)


def test_a_run_with_every_role_names_each_worker_once() -> None:
    c = config(*EVERYTHING)
    assert set(roles_of(c, training=True)) == set(ROLES)
    names = worker_names(c)
    assert len(set(names)) == len(names)
    for role in ROLES.values():
        assert {id(role_of(worker.name)) for worker in role.workers(c)} == {id(role)}


def test_an_evaluation_has_no_learners_but_frozen_engines() -> None:
    assert set(roles_of(config(*EVERYTHING), training=False)) == {"rollout", "reward", "episode", "model"}


def test_the_note_at_the_start_counts_all_workers() -> None:
    assert describe_workers(config(), training=True) == (
        "2 rollout engines, 2 reward workers, 2 policy ranks, a reference"
    )
    assert describe_workers(config(*EVERYTHING), training=True) == (
        "2 rollout engines, 2 reward workers, 2 episode workers, 2 engines of judge, 2 policy ranks, "
        "2 reference ranks, 1 critic ranks"
    )
    assert describe_workers(config(*EVERYTHING), training=False) == (
        "2 rollout engines, 2 reward workers, 2 episode workers, 2 engines of judge"
    )


@pytest.mark.parametrize("name", ROLES)
def test_a_group_is_told_as_much_at_its_start_as_it_takes(name: str) -> None:
    import inspect

    facts = StartFacts("m", "r", "shared_memory", 128, 17, {"judge": "j"})
    inspect.signature(resolve_name(ROLES[name].group).start).bind(None, *ROLES[name].start(facts))


def test_the_page_says_what_the_loss_of_each_role_means() -> None:
    page = (ROOT / "workers" / "README.md").read_text()
    table = page.partition("|worker|what happens when it is lost|\n")[2].partition("\n\n")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines()[1:]]
    named = {"policy": "policy", "critic": "critic", "rollout": "engine", "model": "frozen engine"}
    for name, role in ROLES.items():
        texts = [text for workers, text in rows if named.get(name, name) in workers]
        assert any(("run restarts" in text) == role.restarts_run for text in texts), name
