"""Builds a run out of its parts: who is started where, in what order, and what each is told. The only file that knows all."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.local_ray import Session, address_for_commands, ray_session, remove_leftovers
from rlsys import tiny
from rlsys.config import Config, ConfigError
from rlsys.progress import Note
from rlsys.rewards.settings import services
from workers.critic import CriticGroup, CriticRank
from workers.nursery import ENGINES, MODELS, executable
from workers.policy import PolicyGroup, PolicyRank
from workers.process import port_is_taken
from workers.reference import Reference, ReferenceWorker
from workers.reward import OPTIONS, RewardPool, RewardWorker, numbers
from workers.rollout import RolloutGroup, RolloutWorker
from workers.waiting import Watch


@dataclass
class Cluster:
    """The workers of a run, coming up. Evaluation alone has no policy, reference or critic."""

    config: Config
    note: Note
    model: str  # directory or hub name
    tokenizer: Any
    window: int  # tokens the model can see; 0: it does not say
    transport: str
    address: str  # of the Ray cluster
    rollout: RolloutGroup
    rewards: RewardPool
    policy: PolicyGroup | None
    reference: Reference | None
    critic: CriticGroup | None

    def ready(self, longest_prompt: int) -> "Cluster":
        """Waits until every worker has its model, and connects policy and engines."""
        self.rewards.start()
        if self.policy:
            self.policy.start(self.model, self.transport)
        if self.reference:
            self.reference.start(self.model)
        if self.critic:
            self.critic.start(self.model)
        self.rollout.start(self.model, self.transport, longest_prompt)
        if self.policy:
            self.policy.connect(self.rollout)
        self.note(f"ready; weights travel by {self.transport}" if self.policy else "ready")
        return self


@contextlib.contextmanager
def started(config: Config, watch: Watch, *, model: str = "", training: bool = True) -> Iterator[Cluster]:
    """Starts Ray and all workers; ends all of them on the way out, whatever the way out is."""
    remove_leftovers()  # they may hold a port
    for role, port in (("policy", config.policy.port), ("critic", config.critic.port)):
        if training and port and port_is_taken(port):
            raise ConfigError(
                f"{role}.port: port {port} is taken on this machine. Choose another, or 0 for any free one."
            )
    watch.note("starting Ray")
    with ray_session(config, watch.logs) as session:
        address = address_for_commands(session.ray)
        watch.note(f"Ray is at {address}; to look inside: RAY_AUTH_MODE=token ray list actors --address {address}")
        actors = Actors(session, config, watch)
        try:
            with session.looked_after(watch.stop):
                yield _spawn(session.ray, config, watch, actors, model, training)
        finally:
            watch.stop.end()
            actors.end()


class Actors:
    """Every actor of the run, by the name of its worker."""

    def __init__(self, session: Session, config: Config, watch: Watch):
        self.ray, self.nursery, self.config, self.logs = session.ray, session.nursery, config, str(watch.logs)
        self.all: list[Any] = []
        self.started: Counter[str] = Counter()

    def spawner(
        self,
        kind: type,
        options: Callable[[str], dict[str, Any]],
        environment: dict[str, str],
        numbers: Callable[[str], Iterable[int]] = lambda name: map(int, name.split("-")[1:]),
        born: str = "",
    ) -> Callable[[str], Any]:
        """`spawn("rollout-1")` starts a worker of this kind; and again, where the one before it was lost.

        `born` is the kind of nursery that it comes from, where there is one.
        """
        runtime: dict[str, Any] = {"env_vars": environment}
        if born and self.nursery:
            runtime["py_executable"] = executable(self.nursery, born)

        def spawn(name: str) -> Any:
            self.started[name] += 1
            again = f"-again-{self.started[name] - 1}" if self.started[name] > 1 else ""
            settings = {"name": f"rlsys-{name}{again}", "num_cpus": 0, "runtime_env": runtime}
            actor = (
                self.ray.remote(kind).options(**settings | options(name)).remote(self.config, *numbers(name), self.logs)
            )
            self.all.append(actor)
            return actor

        return spawn

    def end(self) -> None:
        for actor in self.all:
            with contextlib.suppress(self.ray.exceptions.RayError):
                self.ray.kill(actor)


def _spawn(ray: Any, config: Config, watch: Watch, actors: Actors, model: str, training: bool) -> Cluster:
    """Actors first, so that their slow imports run while the driver finds the model and reads the tokenizer."""
    from workers.engines import CPU_ENVIRONMENT, GPU_ENVIRONMENT

    cpu = config.cluster.device == "cpu"
    places = _placement(ray, config, training)
    referenced = training and config.reference.kl_coef > 0
    criticised = training and config.algorithm.advantage == "gae"
    watch.note(
        f"starting {config.rollout.engines} rollout engines, {config.reward.workers} reward workers"
        + (f", {config.policy.ranks} policy ranks" if training else "")
        + (", a reference" if referenced else "")
        + (f", {config.critic.ranks} critic ranks" if criticised else "")
    )
    threads = {"OMP_NUM_THREADS": str(config.policy.threads)} if cpu else {}
    gpus = [service.gpus for service in services(config)]

    def judging(name: str) -> dict[str, Any]:
        return OPTIONS | places.reward(gpus[numbers(name)[0]])

    # As many as there are cores come up at a time, in this order; engines import most.
    rank = actors.spawner(PolicyRank, places.rank, threads, born=MODELS)
    policy = PolicyGroup(config, rank, watch) if training else None
    scorer = actors.spawner(ReferenceWorker, lambda _: places.reference(), threads, born=MODELS)
    reference = Reference(config, scorer, watch) if referenced else None
    critics = actors.spawner(CriticRank, places.critic, threads, born=MODELS)
    critic = CriticGroup(config, critics, watch) if criticised else None
    engine = actors.spawner(RolloutWorker, places.engine, CPU_ENVIRONMENT if cpu else GPU_ENVIRONMENT, born=ENGINES)
    rollout = RolloutGroup(config, engine, watch)
    rewards = RewardPool(config, actors.spawner(RewardWorker, judging, {}, numbers), watch)

    path = model or find_model(config, watch.note)
    return Cluster(
        config,
        watch.note,
        model=path,
        tokenizer=load_tokenizer(path, config),
        window=load_window(path, config),
        transport=choose_transport(ray, config),
        address=address_for_commands(ray),
        rollout=rollout,
        rewards=rewards,
        policy=policy,
        reference=reference,
        critic=critic,
    )


def find_model(config: Config, note: Note) -> str:
    """The model as a directory; the built-in one is made on first use."""
    if config.model.path == "builtin:tiny":
        return str(tiny.model_folder(config.run.seed, note))
    return (
        str(Path(config.model.path).expanduser())
        if Path(config.model.path).expanduser().is_dir()
        else config.model.path
    )


def load_tokenizer(path: str, config: Config) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except Exception as error:
        raise ConfigError(
            f"model.path: no tokenizer could be loaded from {path}: {' '.join(str(error).split())[:300]}"
        ) from None


def load_window(path: str, config: Config) -> int:
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    return int(getattr(settings, "max_position_embeddings", 0) or 0)  # not every architecture has one


def choose_transport(ray: Any, config: Config) -> str:
    """`auto`: within a GPU, between GPUs, within a host, or between hosts."""
    if config.sync.transport != "auto":
        return config.sync.transport
    if config.cluster.device == "gpu":
        return "cuda_ipc" if config.cluster.placement == "colocated" else "nccl"
    return "shared_memory" if len([n for n in ray.nodes() if n["Alive"]]) == 1 else "object_store"


@dataclass
class Places:
    """Ray options of each role. On CPU everything fits everywhere; on GPUs each process has its place in a placement group."""

    group: Any = None
    tensor_parallel: int = 1
    engine_gpus: float = 0.0
    rank_gpus: float = 0.0
    rank_offset: int = 0
    critic_gpus: float = 0.0
    critic_offset: int = 0
    reference_gpus: float = 0.0

    def engine(self, name: str) -> dict[str, Any]:
        return self._at(name, 0, self.engine_gpus)

    def rank(self, name: str) -> dict[str, Any]:
        return self._at(name, self.rank_offset, self.rank_gpus)

    def critic(self, name: str) -> dict[str, Any]:
        return self._at(name, self.critic_offset, self.critic_gpus)

    def reference(self) -> dict[str, Any]:
        return {"num_gpus": self.reference_gpus} if self.reference_gpus else {}

    def reward(self, gpus: float) -> dict[str, Any]:
        return {"num_gpus": gpus} if gpus else {"scheduling_strategy": "SPREAD"}

    def _at(self, name: str, offset: int, gpus: float) -> dict[str, Any]:
        if self.group is None:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = offset + int(name.rpartition("-")[2])
        return {
            "num_gpus": gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle),
        }


def _placement(ray: Any, config: Config, training: bool) -> Places:
    if config.cluster.device == "cpu":
        return Places()
    r, p = config.rollout, config.policy
    colocated = config.cluster.placement == "colocated"
    if colocated and r.tensor_parallel > 1:
        raise ConfigError(
            "cluster.placement colocated with rollout.tensor_parallel > 1 is not supported; use one engine per GPU, or separate."
        )
    critics = config.critic.ranks * (training and config.algorithm.advantage == "gae")
    engine_bundles = [{"GPU": r.tensor_parallel, "CPU": 1}] * r.engines
    bundles = engine_bundles + ([] if colocated or not training else [{"GPU": 1, "CPU": 1}] * (p.ranks + critics))
    models = sum(service.gpus for service in services(config))
    need = sum(b["GPU"] for b in bundles) + config.reference.gpus * (training and not colocated) + models
    have = ray.cluster_resources().get("GPU", 0)
    if need > have:
        raise ConfigError(
            f"rollout.engines ({r.engines}) × rollout.tensor_parallel ({r.tensor_parallel})"
            + ("" if colocated or not training else f" + policy.ranks ({p.ranks})")
            + (f" + critic.ranks ({critics})" if critics and not colocated else "")
            + (f" + reward models ({models:g})" if models else "")
            + f" needs {need:g} GPUs; the cluster has {have:g}. Use fewer, or cluster.placement colocated."
        )
    group = ray.util.placement_group(bundles, strategy="PACK")
    ready, _ = ray.wait([group.ready()], timeout=config.cluster.start_timeout_s)
    if not ready:
        raise ConfigError(
            f"the cluster could not place {bundles} within cluster.start_timeout_s; `ray status` shows what is in use."
        )
    if colocated:  # shares of a GPU are Ray's bookkeeping only
        each = 0.25 if critics else 0.4
        return Places(group, 1, each, each, 0, each, 0, min(config.reference.gpus, 0.2))
    return Places(
        group,
        r.tensor_parallel,
        engine_gpus=r.tensor_parallel,
        rank_gpus=1,
        rank_offset=r.engines,
        critic_gpus=1,
        critic_offset=r.engines + p.ranks,
        reference_gpus=config.reference.gpus,
    )
