"""Which worker gets which GPUs: bundles of a Ray placement group. Pure arithmetic: `placement` reserves them, `plan` draws them.

    separate     a bundle each for rollout-0, rollout-1, …, policy-0, …, critic-0, …, the reference, reward models
    colocated    a bundle for rollout-0 and the ranks of policy and critic that share its GPUs, and so on; the reference is in the first

A bundle lies on one node; bundles that follow each other lie together as far as they can. On CPU nothing is reserved.
"""

import math
from dataclasses import dataclass

from rlsys.config.schema import Config
from rlsys.rewards.settings import reward_services, worker_name


@dataclass(frozen=True)
class Bundle:
    """What must be on one node, and who has which of its GPUs.

    `Bundle(2, {"rollout-0": [0, 1], "policy-0": [0], "policy-1": [1]}, "rollout.engines (1) × rollout.tensor_parallel (2)")`
    """

    gpus: float
    workers: dict[str, list[int]]
    reason: str

    @property
    def resources(self) -> dict[str, float]:
        return {"GPU": self.gpus, "CPU": 1}

    def __str__(self) -> str:
        return f"{' with '.join(self.workers)} ({self.reason}) needs {format_count(self.gpus, 'GPU')} and 1 CPU on one node"


def make_bundles(config: Config, training: bool) -> list[Bundle]:
    """In the order in which they should lie together."""
    models = []
    for number, service in enumerate(reward_services(config)):
        if service.gpus:
            name = next(name for functions in service.functions.values() for name in functions)
            workers = {worker_name(number, 0): list(range(math.ceil(service.gpus)))}
            models.append(Bundle(service.gpus, workers, f"gpus ({service.gpus:g}) of reward model {name}"))
    if config.cluster.device == "cpu":
        return models
    return (colocated_bundles if config.cluster.placement == "colocated" else separate_bundles)(
        config, training
    ) + models


def separate_bundles(config: Config, training: bool) -> list[Bundle]:
    found = engine_bundles(config)
    if not training:
        return found
    ranks = {"policy": config.policy.ranks, "critic": critic_ranks(config)}
    for role, number in ranks.items():
        found += [Bundle(1, {f"{role}-{i}": [0]}, f"{role}.ranks ({number})") for i in range(number)]
    if gpus := reference_gpus(config):
        found.append(Bundle(gpus, {"reference": [0]}, f"reference.gpus ({gpus:g})"))
    return found


def colocated_bundles(config: Config, training: bool) -> list[Bundle]:
    found = engine_bundles(config)
    if training:
        shared = [(bundle, gpu) for bundle in found for gpu in range(config.rollout.tensor_parallel)]
        ranks = {"policy": config.policy.ranks, "critic": critic_ranks(config)}
        for role, number in ranks.items():
            for i, (bundle, gpu) in enumerate(shared[:number]):
                bundle.workers[f"{role}-{i}"] = [gpu]
        if reference_gpus(config):
            found[0].workers["reference"] = [0]
    return found


def engine_bundles(config: Config) -> list[Bundle]:
    number, size = config.rollout.engines, config.rollout.tensor_parallel
    why = f"rollout.engines ({number}) × rollout.tensor_parallel ({size})"
    return [Bundle(size, {f"rollout-{i}": list(range(size))}, why) for i in range(number)]


def reference_gpus(config: Config) -> float:
    return config.reference.gpus if config.reference.kl_coef > 0 else 0.0


def critic_ranks(config: Config) -> int:
    return config.critic.ranks if config.algorithm.advantage == "gae" else 0


def count_other_gpus(config: Config) -> int:
    """GPUs of who is neither an engine nor beside one, nor a rank of the policy: critic, reference, reward models."""
    own = [
        b
        for b in make_bundles(config, training=True)
        if not any(w.startswith(("rollout-", "policy-")) for w in b.workers)
    ]
    return math.ceil(sum(b.gpus for b in own))


def describe_total(wanted: list[Bundle]) -> str:
    """`All together need 12 GPUs: rollout.engines (2) × rollout.tensor_parallel (4) 8, policy.ranks (4) 4`"""
    parts: dict[str, float] = {}
    for bundle in wanted:
        parts[bundle.reason] = parts.get(bundle.reason, 0) + bundle.gpus
    return f"All together need {format_count(sum(parts.values()), 'GPU')}: " + ", ".join(
        f"{w} {g:g}" for w, g in parts.items()
    )


def format_count(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"
