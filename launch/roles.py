"""The kinds of workers of a run: who they are, what they need, and what the loss of one means. Pure data.

Starting, waiting, placing, describing and planning loop over this table. A row here and its classes are a new role
(workers/README.md, "Add a role").
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rlsys.config.derived import has_engines, reference_names, runs_eagerly
from rlsys.config.schema import Config
from rlsys.episodes.settings import plays
from rlsys.rewards.asking import engine_name
from rlsys.rewards.settings import reward_services, worker_name
from workers.rollout.engine_settings import engine_environment
from workers.start.gpu_environment import rank_environment
from workers.start.worker_forkserver import ENGINES, MODELS


@dataclass(frozen=True)
class Worker:
    """`Worker("reward-1-0", (1, 0), gpus=0.5, reason="gpus (0.5) of reward model grader")`"""

    name: str  # its role, and numbers
    numbers: tuple[Any, ...]  # the arguments of its class between `config` and `logs`
    gpus: float = 0.0
    reason: str = ""  # the options that ask for these GPUs


@dataclass(frozen=True)
class StartFacts:
    """What workers are told at their start. It is found while their processes import libraries."""

    model: str  # directory or hub name
    reference_model: str
    transport: str  # of weights
    window: int  # of the model; 0: not known
    longest_sequence: int  # tokens of a prompt and its completion
    models: dict[str, str]  # directory or hub name of each of `models`


@dataclass(frozen=True)
class Role:
    """One kind of workers. Classes are named as `module:Class`, and imported when a worker starts."""

    worker: str  # the class of the actor: `Class(config, *numbers, logs)`
    group: str  # the class through which the driver calls them all: `Class(config, spawn, watchdog, *needs)`
    workers: Callable[[Config], list[Worker]]
    label: Callable[[Config], str]  # as the note at the start counts them; empty: the run does without the role
    start: Callable[[StartFacts], tuple[Any, ...]]  # the arguments of `group.start`
    on_loss: Literal["replaced", "the run restarts"] = "replaced"  # restarts: its ranks share a state, files and a port
    learner: bool = False  # only training has it; colocated, its workers are on the engines' GPUs
    needs: tuple[str, ...] = ()  # roles above in the table whose groups the group gets
    environment: Callable[[Config], dict[str, str]] = lambda config: {}
    forked_by: str = ""  # the kind of fork server that starts it on one machine
    ray_options: str = ""  # more options of its actors: `function(config)`, as `module:function`
    too_large: str = "Use fewer."  # a way out if no node has the GPUs that one worker needs
    without_gpus: str = "use cluster.device=cpu"  # a way out if no node has a GPU

    @property
    def restarts_run(self) -> bool:
        return self.on_loss == "the run restarts"


def number_workers(role: str, count: int, gpus: float = 0.0, reason: str = "") -> list[Worker]:
    """`critic-0`, `critic-1`, …, alike"""
    return [Worker(f"{role}-{i}", (i,), gpus, reason) for i in range(count)]


def on_gpus(c: Config, gpus: float) -> float:
    return gpus if c.cluster.device == "gpu" else 0.0


def list_policy_ranks(c: Config) -> list[Worker]:
    return number_workers("policy", c.policy.ranks, on_gpus(c, 1), f"policy.ranks ({c.policy.ranks})")


def list_critic_ranks(c: Config) -> list[Worker]:
    ranks = c.critic.ranks if c.algorithm.advantage == "gae" else 0
    return number_workers("critic", ranks, on_gpus(c, 1), f"critic.ranks ({ranks})")


def list_reference_ranks(c: Config) -> list[Worker]:
    gpus, reason = on_gpus(c, c.reference.place != "cpu"), f"reference.ranks ({c.reference.ranks})"
    return [Worker(name, (i,), gpus, reason) for i, name in enumerate(reference_names(c))]


def list_engines(c: Config) -> list[Worker]:
    engines, size = c.rollout.engines * has_engines(c), c.rollout.tensor_parallel
    reason = f"rollout.engines ({engines}) × rollout.tensor_parallel ({size})"
    return number_workers("rollout", engines, on_gpus(c, size), reason)


def list_reward_workers(c: Config) -> list[Worker]:
    """Those of the pool, and one for each reward model, which may have a GPU on a cluster that computes on CPUs."""
    workers = []
    for number, service in enumerate(reward_services(c) if has_engines(c) else []):
        first = next(name for functions in service.functions.values() for name in functions)
        reason = f"gpus ({service.gpus:g}) of reward model {first}"
        names = [worker_name(number, i) for i in range(service.workers)]
        workers += [Worker(name, (number, i), service.gpus, reason) for i, name in enumerate(names)]
    return workers


def list_frozen_engines(c: Config) -> list[Worker]:
    return [
        Worker(engine_name(name, i), (name, i), on_gpus(c, 1), f"models.{name}.engines ({model.engines})")
        for name, model in c.models.items()
        for i in range(model.engines)
    ]


def label_frozen_engines(c: Config) -> str:
    """`an engine of judge, 2 engines of teacher`"""
    counts = {name: model.engines for name, model in c.models.items()}
    return ", ".join(f"{'an engine' if n == 1 else f'{n} engines'} of {name}" for name, n in counts.items())


def label_engines(c: Config) -> str:
    """Nothing if the run has none."""
    if not has_engines(c):
        return ""
    with_graphs = " with CUDA graphs" if c.cluster.device == "gpu" else " with compiled layers"
    layers = "" if runs_eagerly(c) else with_graphs
    return f"{c.rollout.engines} rollout engines{of_threads(c.rollout.threads)}{layers}"


def label_references(c: Config) -> str:
    count = len(reference_names(c))
    return "a reference" if count == 1 else f"{count} reference ranks" * bool(count)


def of_threads(count: int) -> str:
    return f" of {count} threads" if count > 1 else ""


# In the order in which they start. Ray starts one for each core at a time.
ROLES = {
    "policy": Role(
        worker="workers.learner.policy:PolicyRank",
        group="workers.learner.policy:PolicyGroup",
        workers=list_policy_ranks,
        label=lambda c: f"{c.policy.ranks} policy ranks{of_threads(c.policy.threads)}",
        start=lambda facts: (facts.model, facts.transport),
        on_loss="the run restarts",
        learner=True,
        environment=rank_environment,
        forked_by=MODELS,
    ),
    "reference": Role(
        worker="workers.learner.reference:ReferenceWorker",
        group="workers.learner.reference:Reference",
        workers=list_reference_ranks,
        label=label_references,
        start=lambda facts: (facts.reference_model, facts.model),
        learner=True,
        needs=("policy",),
        environment=rank_environment,
        forked_by=MODELS,
    ),
    "critic": Role(
        worker="workers.learner.critic:CriticRank",
        group="workers.learner.critic:CriticGroup",
        workers=list_critic_ranks,
        label=lambda c: f"{c.critic.ranks} critic ranks" if list_critic_ranks(c) else "",
        start=lambda facts: (facts.model,),
        on_loss="the run restarts",
        learner=True,
        environment=rank_environment,
        forked_by=MODELS,
    ),
    "rollout": Role(
        worker="workers.rollout.rollout_worker:RolloutWorker",
        group="workers.rollout.rollout_group:RolloutGroup",
        workers=list_engines,
        label=label_engines,
        start=lambda facts: (facts.model, facts.transport, facts.longest_sequence),
        environment=engine_environment,
        forked_by=ENGINES,
        too_large="An engine runs on one node: use rollout.tensor_parallel={largest:g} or less.",
    ),
    "reward": Role(
        worker="workers.reward.pool:RewardWorker",
        group="workers.reward.pool:RewardPool",
        workers=list_reward_workers,
        label=lambda c: f"{c.reward.workers} reward workers" if has_engines(c) else "",
        start=lambda facts: (),
        ray_options="workers.reward.pool:ray_options",
        too_large="A reward model computes on one GPU: give it gpus 1 or less.",
        without_gpus="give the reward model gpus 0, the CPU",
    ),
    "episode": Role(
        worker="workers.episodes.worker:EpisodeWorker",
        group="workers.turns.episode_workers:EpisodeWorkers",
        workers=lambda c: number_workers("episode", c.episode.workers if plays(c) else 0),
        label=lambda c: f"{c.episode.workers} episode workers" if plays(c) else "",
        start=lambda facts: (facts.model, facts.window),
        ray_options="workers.episodes.worker:ray_options",
    ),
    "model": Role(
        worker="workers.frozen.engine:FrozenEngine",
        group="workers.frozen.engines:FrozenEngines",
        workers=list_frozen_engines,
        label=label_frozen_engines,
        start=lambda facts: (facts.models,),
        environment=engine_environment,
        forked_by=ENGINES,
    ),
}


def roles_of(config: Config, training: bool) -> dict[str, Role]:
    """The roles that take part in a run, or in an evaluation alone, in the order in which they start."""
    return {name: r for name, r in ROLES.items() if (training or not r.learner) and r.label(config)}


def in_placing_order(roles: dict[str, Role]) -> dict[str, Role]:
    """Engines, the ranks that send them weights, and then those that only wait for work."""
    order = sorted(roles, key=lambda name: (name != "rollout", not roles[name].learner, not roles[name].restarts_run))
    return {name: roles[name] for name in order}


def in_reading_order(roles: dict[str, Role]) -> dict[str, Role]:
    """What an evaluation has too, and then what only training has."""
    return {name: roles[name] for name in sorted(roles, key=lambda name: roles[name].learner)}


def worker_names(config: Config) -> list[str]:
    """All workers of a run, in the order in which they start."""
    return [worker.name for role in roles_of(config, training=True).values() for worker in role.workers(config)]


def count_workers(role: str, config: Config) -> int:
    return len(ROLES[role].workers(config))


def count_gpus(role: str, config: Config) -> float:
    return sum(worker.gpus for worker in ROLES[role].workers(config))


def role_of(worker: str) -> Role:
    """By a worker's name: `rollout-1` is an engine."""
    return ROLES[worker.partition("-")[0]]


def describe_workers(config: Config, training: bool) -> str:
    """`2 rollout engines, 2 reward workers, 2 policy ranks, a reference`"""
    return ", ".join(role.label(config) for role in in_reading_order(roles_of(config, training)).values())
