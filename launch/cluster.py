"""Builds a run out of its parts. The only file that knows all workers, their order of start and their arguments.

Slow imports come after Ray and the fork servers have begun to start, and run meanwhile.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from launch.models import find_policy_model, find_reference_model
from launch.placement import choose_transport, reserve_gpus
from launch.ray_session.connect import address_for_ray_cli, metrics_urls, ray_session
from launch.ray_session.leftovers import remove_leftovers
from launch.ray_session.session import RaySession
from rlsys.config.derived import has_reference_worker, runs_eagerly
from rlsys.config.schema import Config
from rlsys.episodes.settings import plays
from rlsys.errors import ConfigError
from rlsys.interfaces import Rewards, Rollout
from rlsys.models.config_json import ModelLimits
from rlsys.runs.progress import Note
from workers.fleet.process_registry import clear_registry, read_process_info, remove_shared_memory
from workers.fleet.watchdog import Watchdog
from workers.start.gpu_environment import rank_environment
from workers.start.imports import pause_garbage_collection
from workers.start.ports import port_is_taken
from workers.start.worker_forkserver import ENGINES, MODELS, fork_command

if TYPE_CHECKING:
    from workers.episodes.pool import EpisodePool
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
    rollout: "RolloutGroup"
    rewards: "RewardPool"
    policy: "PolicyGroup | None"
    reference: "Reference | PolicyWithoutAdapters | None"
    critic: "CriticGroup | None"
    episodes: "EpisodePool | None" = None

    @pause_garbage_collection()
    def wait_until_ready(self, longest_sequence: int) -> "RunningCluster":
        """Waits until every worker has its model, and connects policy and engines.

        `longest_sequence`: tokens of a prompt and its completion.
        """
        starts: list[Callable[[], None]] = [self.rewards.start]
        starts += [partial(self.episodes.start, self.model, self.limits.window)] if self.episodes else []
        starts += [partial(self.policy.start, self.model, self.transport)] if self.policy else []
        starts += [partial(self.reference.start, self.reference_model, self.model)] if self.reference else []
        starts += [partial(self.critic.start, self.model)] if self.critic else []
        starts += [partial(self.rollout.start, self.model, self.transport, longest_sequence)]
        if self.config.cluster.placement == "colocated":
            for start in starts:  # an engine measures at its start how much of its GPU is free
                start()
        else:
            run_concurrently(starts)
        if self.policy:
            self.policy.connect(self.rollout)
        self.note(f"ready; weights travel by {self.transport}" if self.policy else "ready")
        return self

    @property
    def sampler(self) -> Rollout:
        """The engines, and the episode workers where there are any."""
        from workers.episodes.episode_rollout import EpisodeRollout

        return EpisodeRollout(self.rollout, self.episodes) if self.episodes else self.rollout

    @property
    def judge(self) -> Rewards:
        return self.rewards

    def require_run_directory(self) -> None:
        """Raises `ConfigError` if a rank cannot see the run directory, where it writes its part of a checkpoint."""
        assert self.policy is not None
        ranks = {"policy": self.config.policy.ranks, "critic": self.config.critic.ranks if self.critic else 0}
        names = [f"{role}-{i}" for role, number in ranks.items() for i in range(number)]
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
    remove_leftovers()  # they may hold a port
    for role, port in (("policy", config.policy.port), ("critic", config.critic.port)):
        if training and port and port_is_taken(port):
            raise ConfigError(
                f"{role}.port: port {port} is taken on this machine. Choose another, or 0 for any free one."
            )
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
    from workers.episodes import worker as episode_worker
    from workers.episodes.pool import EpisodePool
    from workers.learner.critic import CriticGroup, CriticRank
    from workers.learner.policy import PolicyGroup, PolicyRank
    from workers.learner.reference import PolicyWithoutAdapters, Reference, ReferenceWorker, reference_number
    from workers.reward.pool import RAY_OPTIONS, RewardPool, RewardWorker, worker_numbers
    from workers.rollout.engine_settings import engine_environment
    from workers.rollout.rollout_group import RolloutGroup
    from workers.rollout.rollout_worker import RolloutWorker

    place = reserve_gpus(ray, config, training, watchdog.note)
    needs_reference = training and has_reference_worker(config)
    needs_critic = training and config.algorithm.advantage == "gae"
    watchdog.note(f"starting {describe_workers(config, training, needs_reference, needs_critic)}")
    learner_env = rank_environment(config)
    # Ray starts as many at a time as there are cores, in this order. Engines take longest, for their imports.
    ranks = actors.make_spawner(PolicyRank, place, learner_env, forked_by=MODELS)
    policy = PolicyGroup(config, ranks, watchdog) if training else None
    scorer = actors.make_spawner(ReferenceWorker, place, learner_env, reference_number, MODELS)
    reference: Reference | PolicyWithoutAdapters | None = None
    if policy and config.reference.kl_coef > 0:
        reference = Reference(config, scorer, watchdog, policy) if needs_reference else PolicyWithoutAdapters(policy)
    critic_ranks = actors.make_spawner(CriticRank, place, learner_env, forked_by=MODELS)
    critic = CriticGroup(config, critic_ranks, watchdog) if needs_critic else None
    engines = actors.make_spawner(RolloutWorker, place, engine_environment(config), forked_by=ENGINES)
    rollout = RolloutGroup(config, engines, watchdog)
    judges = actors.make_spawner(RewardWorker, lambda name: RAY_OPTIONS | place(name), {}, worker_numbers)
    rewards = RewardPool(config, judges, watchdog)
    players = actors.make_spawner(
        episode_worker.EpisodeWorker, lambda name: episode_worker.RAY_OPTIONS | place(name), {}
    )
    episodes = EpisodePool(config, players, watchdog) if plays(config) else None

    nodes = sum(node["Alive"] for node in ray.nodes())
    path, tokenizer, limits = find_policy_model(config, model, nodes, watchdog)
    reference_path = path
    if needs_reference and config.reference.path:
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
        rollout=rollout,
        rewards=rewards,
        episodes=episodes,
        policy=policy,
        reference=reference,
        critic=critic,
    )


def describe_workers(config: Config, training: bool, has_reference: bool, has_critic: bool) -> str:
    """`2 rollout engines, 2 reward workers, 2 policy ranks, a reference`"""
    with_graphs = " with CUDA graphs" if config.cluster.device == "gpu" else " with compiled layers"
    engines, ranks, references = config.rollout, config.policy, config.reference.ranks
    return (
        f"{engines.engines} rollout engines{of_threads(engines.threads)}{'' if runs_eagerly(config) else with_graphs}"
        f", {config.reward.workers} reward workers"
        + (f", {config.episode.workers} episode workers" if plays(config) else "")
        + (f", {ranks.ranks} policy ranks{of_threads(ranks.threads)}" if training else "")
        + (f", {'a reference' if references == 1 else f'{references} reference ranks'}" if has_reference else "")
        + (f", {config.critic.ranks} critic ranks" if has_critic else "")
    )


def of_threads(count: int) -> str:
    return f" of {count} threads" if count > 1 else ""
