"""Starts the workers of a run, role by role as `launch/roles.py` lists them, and waits until all are ready.

Slow imports come after Ray and the fork servers have begun to start, and run meanwhile.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from launch.models import find_model, find_policy_model, find_reference_model
from launch.placement import choose_transport, reserve_gpus
from launch.ray_session.connect import address_for_ray_cli, metrics_urls, ray_session
from launch.ray_session.leftovers import remove_leftovers
from launch.ray_session.session import RaySession
from launch.roles import ROLES, Role, StartFacts, describe_workers, roles_of
from rlsys.config.derived import policy_is_reference
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.interfaces import Rewards
from rlsys.models.config_json import ModelLimits
from rlsys.runs.progress import Note
from workers.fleet.process_registry import clear_registry, read_process_info, remove_shared_memory
from workers.fleet.watchdog import Watchdog
from workers.start.imports import pause_garbage_collection
from workers.start.worker_forkserver import fork_command

if TYPE_CHECKING:
    from workers.learner.critic import CriticGroup
    from workers.learner.policy import PolicyGroup
    from workers.learner.reference import PolicyWithoutAdapters, Reference
    from workers.reward.pool import RewardPool
    from workers.rollout.rollout_group import RolloutGroup


@dataclass
class RunningCluster:
    """The workers of a run while they start and run. An evaluation alone has no policy, reference or critic."""

    config: Config
    note: Note
    model: str  # directory or hub name
    reference_model: str  # the same of the reference
    tokenizer: Any
    limits: ModelLimits
    transport: str
    address: str  # of the Ray cluster
    metrics_urls: list[str]  # pages of its nodes for Prometheus
    groups: dict[str, Any]  # by role: what the driver calls its workers through

    @pause_garbage_collection()
    def wait_until_ready(self, longest_sequence: int) -> "RunningCluster":
        """Waits until every worker has its model, and connects policy and engines.

        `longest_sequence`: tokens of a prompt and its completion.
        """
        models = {name: find_model(model.path, self.config, self.note) for name, model in self.config.models.items()}
        facts = StartFacts(
            self.model, self.reference_model, self.transport, self.limits.window, longest_sequence, models
        )
        # Learners late and engines last: an engine measures at its start how much of its GPU is free.
        order = sorted(self.groups, key=lambda name: (name == "rollout", ROLES[name].learner))
        starts = [partial(self.groups[name].start, *ROLES[name].start(facts)) for name in order]
        if self.config.cluster.placement == "colocated":
            for start in starts:
                start()
        else:
            run_concurrently(starts)
        if self.policy and "rollout" in self.groups:
            self.policy.connect(self.rollout)
        if episode_workers := self.groups.get("episode"):
            self.rollout.play_with(episode_workers)
        self.note(f"ready; weights travel by {self.transport}" if self.policy and "rollout" in self.groups else "ready")
        return self

    @property
    def rollout(self) -> "RolloutGroup":
        return self.groups["rollout"]  # type: ignore[no-any-return]

    @property
    def rewards(self) -> "RewardPool":
        return self.groups["reward"]  # type: ignore[no-any-return]

    @property
    def policy(self) -> "PolicyGroup | None":
        return self.groups.get("policy")

    @property
    def reference(self) -> "Reference | PolicyWithoutAdapters | None":
        return self.groups.get("reference")

    @property
    def critic(self) -> "CriticGroup | None":
        return self.groups.get("critic")

    @property
    def judge(self) -> Rewards:
        return self.rewards

    def require_run_directory(self) -> None:
        """Raises `ConfigError` if a rank cannot see the run directory, where it writes its part of a checkpoint."""
        assert self.policy is not None
        writers = [ROLES[name] for name in self.groups if ROLES[name].restarts_run]
        names = [worker.name for role in writers for worker in role.workers(self.config)]
        if blind := [name for name in names if read_process_info(name, self.policy.watchdog.logs) is None]:
            raise ConfigError(
                f"run.dir: {', '.join(blind)} cannot write to {self.policy.watchdog.logs.parent}: another node has no "
                "such directory, or has its own. Put run.dir on storage that all nodes see."
            )


def run_concurrently(starts: Sequence[Callable[[], None]]) -> None:
    """Returns when all are done. If one fails, raises its error without waiting for the others."""
    pool = ThreadPoolExecutor(len(starts), thread_name_prefix="start")
    try:
        for done in as_completed([pool.submit(start) for start in starts]):
            done.result()
    finally:
        pool.shutdown(wait=False)


# Decides `policy.gradient_checkpointing` for these GPUs: config, `ray.nodes()`, a note -> config
ChooseCheckpointing = Callable[[Config, Sequence[dict[str, Any]], Note], Config]


@contextlib.contextmanager
def running_cluster(
    config: Config, watchdog: Watchdog, choose_checkpointing: ChooseCheckpointing | None, *, model: str = ""
) -> Iterator[RunningCluster]:
    """Starts Ray and all workers, and ends all of them afterwards. Without `choose_checkpointing`: none that train."""
    training = choose_checkpointing is not None
    remove_leftovers()  # they hold memory
    watchdog.note("starting Ray")
    clear_registry(watchdog.logs)
    with ray_session(config, watchdog.logs) as session:
        address = address_for_ray_cli(session.ray)
        watchdog.note(f"Ray is at {address}; to look inside: RAY_AUTH_MODE=token ray list actors --address {address}")
        if choose_checkpointing and config.cluster.device == "gpu":
            config = choose_checkpointing(config, session.ray.nodes(), watchdog.note)
        actors = Actors(session, config, watchdog)
        try:
            with session.monitored(watchdog.stop):
                yield _start_workers(session.ray, config, watchdog, actors, model, training)
        finally:
            watchdog.stop.end_now()
            actors.kill_all()


class Actors:
    """All Ray actors of the run."""

    def __init__(self, session: RaySession, config: Config, watchdog: Watchdog):
        self.ray, self.forkserver_dir = session.ray, session.forkserver_dir
        self.config, self.logs = config, watchdog.logs
        self.actors: list[Any] = []
        self.start_counts: Counter[str] = Counter()  # by name of the worker

    def make_spawner(
        self,
        kind: type,
        options: Callable[[str], dict[str, Any]],
        environment: dict[str, str],
        numbers: Callable[[str], Iterable[int]] = lambda name: map(int, name.split("-")[1:]),
        forked_by: str = "",
    ) -> Callable[[str], Any]:
        """Returns `spawn`: `spawn("rollout-1")` starts a worker of this kind, or a new one in place of a lost one.

        `options` gives the Ray options of a worker, and `numbers` the numbers in its name, which its class takes.
        `forked_by` names the kind of fork server for the worker, if there are fork servers.
        """
        command = (
            {"py_executable": fork_command(self.forkserver_dir, forked_by)} if forked_by and self.forkserver_dir else {}
        )

        def spawn(name: str) -> Any:
            self.start_counts[name] += 1
            suffix = f"-again-{self.start_counts[name] - 1}" if self.start_counts[name] > 1 else ""
            ray_options = options(name)
            env_vars = environment | ray_options.pop("runtime_env", {}).get("env_vars", {})
            runtime_env = command | {"env_vars": env_vars}
            settings = {"name": f"rlsys-{name}{suffix}", "num_cpus": 0, "runtime_env": runtime_env}
            settings["enable_task_events"] = False  # Ray would keep the last 100,000 calls: 9 to 17 MiB per 100 steps
            settings |= ray_options
            actor = self.ray.remote(**settings)(kind).remote(self.config, *numbers(name), str(self.logs))
            self.actors.append(actor)
            return actor

        return spawn

    def spawner_of(self, role: Role, place: Callable[[str], dict[str, Any]]) -> Callable[[str], Any]:
        """Returns `spawn` for the workers of a role. `place` gives the Ray options that put a worker on its node."""
        ray_options = resolve_name(role.ray_options)(self.config) if role.ray_options else {}
        numbers = {worker.name: worker.numbers for worker in role.workers(self.config)}
        return self.make_spawner(
            resolve_name(role.worker),
            lambda name: ray_options | place(name),
            role.environment(self.config),
            numbers.__getitem__,
            role.forked_by,
        )

    def kill_all(self) -> None:
        for actor in self.actors:
            with contextlib.suppress(self.ray.exceptions.RayError):
                self.ray.kill(actor)
        with contextlib.suppress(self.ray.exceptions.RayError):
            remove_shared_memory(self.start_counts, self.logs)


@pause_garbage_collection()
def _start_workers(
    ray: Any, config: Config, watchdog: Watchdog, actors: Actors, model: str, training: bool
) -> RunningCluster:
    """Starts the actors first: their slow imports run while the driver finds the model and reads the tokenizer."""
    place = reserve_gpus(ray, config, training, watchdog.note)
    watchdog.note(f"starting {describe_workers(config, training)}")
    groups: dict[str, Any] = {}
    for name, role in roles_of(config, training).items():
        needed = [groups[other] for other in role.needs]
        groups[name] = resolve_name(role.group)(config, actors.spawner_of(role, place), watchdog, *needed)
    if training and policy_is_reference(config):
        from workers.learner.reference import PolicyWithoutAdapters

        groups["reference"] = PolicyWithoutAdapters(groups["policy"])

    nodes = sum(node["Alive"] for node in ray.nodes())
    path, tokenizer, limits = find_policy_model(config, model, nodes, watchdog)
    reference_path = path
    if "reference" in groups and config.reference.path:
        reference_path, limits = find_reference_model(config, tokenizer, limits, watchdog.note)
    return RunningCluster(
        config,
        watchdog.note,
        model=path,
        reference_model=reference_path,
        tokenizer=tokenizer,
        limits=limits,
        transport=choose_transport(config, nodes),
        address=address_for_ray_cli(ray),
        metrics_urls=metrics_urls(ray),
        groups=groups,
    )
