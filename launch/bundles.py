"""Which worker gets which GPUs, as bundles of a Ray placement group. Pure arithmetic.

    separate     a bundle for each of rollout-0, rollout-1, …, policy-0, …, critic-0, …, the reference's ranks, reward
                 models
    colocated    a bundle for rollout-0 and the ranks of policy, critic and reference that share its GPUs, and so on

A bundle lies on one node. Consecutive bundles lie together as far as possible. On CPU nothing is reserved.
`placement` reserves the bundles, and `plan` draws them.
"""

import math
from dataclasses import dataclass

from launch.roles import in_placing_order, roles_of
from rlsys.config.schema import Config


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
    """All bundles of a run, in the order in which they should lie together: ranks that send weights next to the engines."""
    bundles: list[Bundle] = []
    for role in in_placing_order(roles_of(config, training)).values():
        workers = [worker for worker in role.workers(config) if worker.gpus]
        if role.learner and config.cluster.placement == "colocated":
            of_engines = [(bundle, gpu) for bundle in bundles for gpu in range(int(bundle.gpus))]
            for (bundle, gpu), worker in zip(of_engines, workers, strict=False):
                bundle.workers[worker.name] = [gpu]
        else:
            bundles += [Bundle(w.gpus, {w.name: list(range(math.ceil(w.gpus)))}, w.reason) for w in workers]
    return bundles


def count_other_gpus(config: Config) -> int:
    """GPUs other than those of engines and policy: of critic, reference and reward models that have a bundle of their own."""

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
