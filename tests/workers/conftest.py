"""Shared by tests of real processes: a small configuration, one private Ray, and workers that are slow to start."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import plain_worker
import pytest
import reusable_ranks

from rlsys.checks import load_checked
from rlsys.config.schema import Config
from workers.fleet.watchdog import Watchdog
from workers.learner.critic import CriticGroup
from workers.learner.policy import PolicyGroup
from workers.rollout.engine_settings import CPU_ENVIRONMENT
from workers.rollout.rollout_group import RolloutGroup
from workers.rollout.rollout_worker import RolloutWorker
from workers.start.worker_forkserver import ENGINES, MODELS, fork_command

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Config]:
    """`tiny("policy.ranks=1")` is configs/tiny_cpu.yaml with overrides."""
    return lambda *overrides: load_checked(ROOT / "configs" / "tiny_cpu.yaml", overrides)


@pytest.fixture(scope="session")
def model() -> str:
    """The warm-started tiny model of seed 0."""
    from rlsys.tasks.zigzag import model_folder

    return str(model_folder(0))


@pytest.fixture(scope="session")
def session(tiny: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from launch.ray_session.connect import ray_session

    with ray_session(tiny(), tmp_path_factory.mktemp("ray")) as session:
        yield session


@pytest.fixture(scope="session")
def ray(session: Any) -> Any:
    return session.ray


@pytest.fixture(scope="session")
def worker_options(session: Any) -> Callable[[dict[str, str] | None], dict[str, Any]]:
    """`worker_options(environment)` returns Ray's options for a worker that is forked as in a run."""

    def options(environment: dict[str, str] | None) -> dict[str, Any]:
        kind = ENGINES if environment == CPU_ENVIRONMENT else MODELS
        command = fork_command(session.forkserver_dir, kind)
        variables = environment or {"OMP_NUM_THREADS": "1"}
        return {"num_cpus": 0, "runtime_env": {"env_vars": variables, "py_executable": command}}

    return options


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logs of the shared workers."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def shared_actor(ray: Any, worker_options: Callable[..., Any], logs: Path) -> Iterator[Callable[..., Any]]:
    """`shared_actor("policy-0 of 2", ReusablePolicyRank, config, 0)` returns the same actor to every test."""
    actors: dict[str, Any] = {}
    ray.cloudpickle.register_pickle_by_value(reusable_ranks)  # workers cannot import tests

    def get(key: str, kind: type, config: Config, index: int) -> Any:
        if key not in actors:
            actors[key] = ray.remote(kind).options(**worker_options(None)).remote(config, index, str(logs))
        return actors[key]

    yield get
    for actor in actors.values():
        ray.kill(actor)


class NoEngines:
    """Stands for the engines when a test needs none."""

    can_sleep = False

    def __init__(self, watchdog: Watchdog):
        self.watchdog = watchdog

    def connect(self, info: Any) -> None:
        pass

    def load_weights(self, update: Any, sending: dict[str, Any]) -> dict[str, Any]:
        return self.watchdog.gather(sending, "sending weights")

    def replacements_paused(self) -> Any:
        return nullcontext()


@pytest.fixture(scope="session")
def policy(shared_actor: Callable[..., Any], model: str, logs: Path) -> Callable[..., PolicyGroup]:
    """`policy(config)` returns a policy as at the start of a run. It replaces the last one with as many ranks."""

    def start(config: Config, engines: Any = None, transport: str = "shared_memory") -> PolicyGroup:
        def rank(name: str) -> Any:
            kind, index = reusable_ranks.ReusablePolicyRank, int(name.split("-")[1])
            return shared_actor(f"{name} of {config.policy.ranks}", kind, config, index)

        group = PolicyGroup(config, rank, Watchdog(logs))
        group.call_all("set_config", config)
        group.start(model, transport)
        group.connect(engines or NoEngines(Watchdog(logs)))
        return group

    return start


@pytest.fixture(scope="session")
def critic(shared_actor: Callable[..., Any], model: str, logs: Path) -> Callable[[Config], CriticGroup]:
    """`critic(config)` returns a critic as at the start of a run."""

    def start(config: Config) -> CriticGroup:
        def rank(name: str) -> Any:
            kind, index = reusable_ranks.ReusableCriticRank, int(name.split("-")[1])
            return shared_actor(f"{name} of {config.critic.ranks}", kind, config, index)

        group = CriticGroup(config, rank, Watchdog(logs))
        group.call_all("set_config", config)
        group.start(model)
        return group

    return start


@pytest.fixture(scope="module")
def engines(
    ray: Any, worker_options: Callable[..., Any], tiny: Callable[..., Config], model: str, logs: Path
) -> Iterator[Callable[..., RolloutGroup]]:
    """`engines("rollout.engines=1")` returns the same engines to every test of a file, with the weights of the test before.

    They end with the file: each that only waits takes 2.4 % of a core.
    """
    groups: dict[tuple[str, ...], RolloutGroup] = {}
    actors: list[Any] = []

    def start(*overrides: str, transport: str = "shared_memory") -> RolloutGroup:
        key, config = (*overrides, transport), tiny(*overrides)

        def engine(name: str) -> Any:
            kind = ray.remote(RolloutWorker).options(**worker_options(CPU_ENVIRONMENT))
            actors.append(kind.remote(config, int(name.split("-")[1]), str(logs)))
            return actors[-1]

        if key not in groups:
            groups[key] = RolloutGroup(config, engine, Watchdog(logs))
            groups[key].start(model, transport, 7 + config.rollout.max_new_tokens)
        return groups[key]

    yield start
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def spawn(ray: Any, worker_options: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`spawn(PolicyRank, config, 0)` starts an actor that is killed after the test."""
    actors = []

    def start(
        kind: type,
        config: Config,
        *arguments: Any,
        environment: dict[str, str] | None = None,
        ray_options: dict[str, Any] | None = None,
    ) -> Any:
        options = worker_options(environment) | (ray_options or {})
        actors.append(ray.remote(kind).options(**options).remote(config, *arguments, str(tmp_path)))
        return actors[-1]

    yield start
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def start_worker(ray: Any, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """`start_worker("a-0")` starts a `PlainWorker` that is killed after the test."""
    actors = []
    ray.cloudpickle.register_pickle_by_value(plain_worker)

    def start(name: str) -> Any:
        actors.append(ray.remote(plain_worker.PlainWorker).options(num_cpus=0).remote(name, str(tmp_path)))
        return actors[-1]

    yield start
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def changed() -> Callable[..., Config]:
    """`changed(config, "policy", ranks=1)` returns a copy with some fields of a section replaced."""

    def change(config: Config, section: str, **fields: Any) -> Config:
        return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **fields)})

    return change
