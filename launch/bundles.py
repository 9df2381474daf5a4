"""Which worker gets which GPUs, as bundles of a Ray placement group. Pure arithmetic.

    separate     a bundle for each of rollout-0, rollout-1, …, policy-0, …, critic-0, …, the reference's ranks, reward
                 models
    colocated    a bundle for rollout-0 and the ranks of policy, critic and reference that share its GPUs, and so on

A bundle lies on one node. Consecutive bundles lie together as far as possible. On CPU nothing is reserved.
`placement` reserves the bundles, and `plan` draws them.
"""

import math
from dataclasses import dataclass

from rlsys.config.derived import reference_names
from rlsys.config.schema import Config
from rlsys.rewards.settings import reward_services, worker_name


@dataclass(frozen=True)
class Bundle:
    """GPUs that must lie on one node, and the GPUs among them that each worker uses.

    `Bundle(2, {"rollout-0": [0, 1], "policy-0": [0], "policy-1": [1]}, "rollout.engines (1) × …")`
    """

    gpus: float
    workers: dict[str, list[int]]
    reason: str  # the options that ask for it

    @property
    def resources(self) -> dict[str, float]:
        return {"GPU": self.gpus, "CPU": 1}

    def __str__(self) -> str:
        resources = f"{format_count(self.gpus, 'GPU')} and 1 CPU on one node"
        return f"{' with '.join(self.workers)} ({self.reason}) needs {resources}"


def make_bundles(config: Config, training: bool) -> list[Bundle]:
    """All bundles of a run, in the order in which they should lie together."""
    models = reward_model_bundles(config)
    if config.cluster.device == "cpu":
        return models
    make = colocated_bundles if config.cluster.placement == "colocated" else separate_bundles
    return make(config, training) + models


def reward_model_bundles(config: Config) -> list[Bundle]:
    bundles = []
    for number, service in enumerate(reward_services(config)):
        if service.gpus:
            name = next(name for functions in service.functions.values() for name in functions)
            workers = {worker_name(number, 0): list(range(math.ceil(service.gpus)))}
            bundles.append(Bundle(service.gpus, workers, f"gpus ({service.gpus:g}) of reward model {name}"))
    return bundles


def separate_bundles(config: Config, training: bool) -> list[Bundle]:
    bundles = engine_bundles(config)
    if not training:
        return bundles
    for role, ranks in rank_counts(config).items():
        bundles += [Bundle(1, {f"{role}-{i}": [0]}, f"{role}.ranks ({ranks})") for i in range(ranks)]
    if gpus := config.reference.gpus:
        reason = f"reference.ranks ({config.reference.ranks}) × reference.gpus ({gpus:g})"
        bundles += [Bundle(gpus, {name: [0]}, reason) for name in reference_names(config)]
    return bundles


def colocated_bundles(config: Config, training: bool) -> list[Bundle]:
    bundles = engine_bundles(config)
    if training:
        gpus = [(bundle, gpu) for bundle in bundles for gpu in range(config.rollout.tensor_parallel)]
        for role, ranks in rank_counts(config).items():
            for i, (bundle, gpu) in enumerate(gpus[:ranks]):
                bundle.workers[f"{role}-{i}"] = [gpu]
        if config.reference.gpus:
            for (bundle, gpu), name in zip(gpus, reference_names(config), strict=False):
                bundle.workers[name] = [gpu]
    return bundles


def engine_bundles(config: Config) -> list[Bundle]:
    engines, size = config.rollout.engines, config.rollout.tensor_parallel
    reason = f"rollout.engines ({engines}) × rollout.tensor_parallel ({size})"
    return [Bundle(size, {f"rollout-{i}": list(range(size))}, reason) for i in range(engines)]


def rank_counts(config: Config) -> dict[str, int]:
    return {"policy": config.policy.ranks, "critic": critic_ranks(config)}


def critic_ranks(config: Config) -> int:
    return config.critic.ranks if config.algorithm.advantage == "gae" else 0


def reference_gpus(config: Config) -> float:
    return config.reference.gpus * len(reference_names(config))


def count_other_gpus(config: Config) -> int:
    """GPUs of critic, reference and reward models that have a bundle of their own."""

    def holds_engine_or_policy(bundle: Bundle) -> bool:
        return any(worker.startswith(("rollout-", "policy-")) for worker in bundle.workers)

    return math.ceil(sum(b.gpus for b in make_bundles(config, training=True) if not holds_engine_or_policy(b)))


def describe_total(bundles: list[Bundle]) -> str:
    """`All together need 12 GPUs: rollout.engines (2) × rollout.tensor_parallel (4) 8, policy.ranks (4) 4`"""
    parts: dict[str, float] = {}
    for bundle in bundles:
        parts[bundle.reason] = parts.get(bundle.reason, 0) + bundle.gpus
    listed = ", ".join(f"{reason} {gpus:g}" for reason, gpus in parts.items())
    return f"All together need {format_count(sum(parts.values()), 'GPU')}: {listed}"


def format_count(number: float, noun: str) -> str:
    """`1 GPU`, `2 GPUs`"""
    return f"{number:g} {noun}{'' if number == 1 else 's'}"
