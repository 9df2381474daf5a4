"""What tests of real processes share: a small configuration and one private Ray for all of them."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.config_load import load

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Config]:
    """`tiny("policy.ranks=1")` is configs/tiny_cpu.yaml with overrides."""
    return lambda *overrides: load(ROOT / "configs" / "tiny_cpu.yaml", overrides)


@pytest.fixture(scope="session")
def model() -> str:
    """The warm-started tiny model of seed 0."""
    from rlsys.tiny import model_folder

    return str(model_folder(0))


@pytest.fixture(scope="session")
def ray(tiny: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from launch.local_ray import ray_session

    with ray_session(tiny(), tmp_path_factory.mktemp("ray")) as session:
        yield session


@pytest.fixture
def spawn(ray: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`spawn(PolicyRank, config, 0)` starts an actor that is killed after the test."""
    actors = []

    def start(
        kind: type,
        config: Config,
        *arguments: Any,
        environment: dict[str, str] | None = None,
        ray_options: dict[str, Any] | None = None,
    ) -> Any:
        options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": environment or {"OMP_NUM_THREADS": "1"}}}
        options |= ray_options or {}
        actors.append(ray.remote(kind).options(**options).remote(config, *arguments, str(tmp_path)))
        return actors[-1]

    yield start
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def changed() -> Callable[..., Config]:
    """`changed(config, "policy", ranks=1)` is a copy with some fields of a section replaced."""

    def change(config: Config, section: str, **fields: Any) -> Config:
        return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **fields)})

    return change
