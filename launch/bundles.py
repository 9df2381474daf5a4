"""Which worker gets which GPUs: bundles of a Ray placement group. Pure arithmetic: `placement` reserves them, `plan` draws them.

    separate     a bundle each for rollout-0, rollout-1, …, policy-0, …, critic-0, …, the reference, reward models
    colocated    a bundle of one GPU for rollout-0, policy-0 and critic-0 together, and so on; the reference is in the first

A bundle lies on one node; bundles that follow each other lie together as far as they can. On CPU nothing is reserved.
"""

from dataclasses import dataclass

from rlsys.config import Config, ConfigError
from rlsys.rewards.settings import services, worker_name

REFERENCE_SHARE = 0.2  # at most, of a GPU that engine and policy share. Shares of one GPU are Ray's bookkeeping only


@dataclass(frozen=True)
class Bundle:
    """What must be on one node, and who shares it. Bundle(4, {"rollout-0": 4}, "rollout.tensor_parallel (4)")"""

    gpus: float
    workers: dict[str, float]  # how much of the GPUs Ray counts as whose
    why: str

    @property
    def resources(self) -> dict[str, float]:
        return {"GPU": self.gpus, "CPU": 1}

    def __str__(self) -> str:
        return f"{' with '.join(self.workers)} ({self.why}) needs {count(self.gpus, 'GPU')} and 1 CPU on one node"


def bundles(config: Config, training: bool) -> list[Bundle]:
    """In the order in which they should lie together."""
    models = [
        Bundle(service.gpus, {worker_name(number, 0): service.gpus}, "a reward model")
        for number, service in enumerate(services(config))
        if service.gpus
    ]
    if config.cluster.device == "cpu":
        return models
    return (colocated if config.cluster.placement == "colocated" else separate)(config, training) + models


def separate(config: Config, training: bool) -> list[Bundle]:
    size = config.rollout.tensor_parallel
    why = f"rollout.engines ({config.rollout.engines}) × rollout.tensor_parallel ({size})"
    found = [Bundle(size, {f"rollout-{i}": size}, why) for i in range(config.rollout.engines)]
    if not training:
        return found
    ranks = {"policy": config.policy.ranks, "critic": critic_ranks(config)}
    for role, number in ranks.items():
        found += [Bundle(1, {f"{role}-{i}": 1}, f"{role}.ranks ({number})") for i in range(number)]
    if gpus := reference_gpus(config):
        found.append(Bundle(gpus, {"reference": gpus}, f"reference.gpus ({gpus:g})"))
    return found


def colocated(config: Config, training: bool) -> list[Bundle]:
    if config.rollout.tensor_parallel > 1:
        raise ConfigError(
            "cluster.placement colocated with rollout.tensor_parallel > 1 is not supported; use one engine per GPU, or separate."
        )
    critics = critic_ranks(config) * training
    each = 0.25 if critics else 0.4
    why = f"rollout.engines ({config.rollout.engines})"
    found = [Bundle(1, {f"rollout-{i}": each}, why) for i in range(config.rollout.engines)]
    if training:
        for i, bundle in enumerate(found):
            bundle.workers[f"policy-{i}"] = each
        for i, bundle in enumerate(found[:critics]):
            bundle.workers[f"critic-{i}"] = each
        if gpus := reference_gpus(config):
            found[0].workers["reference"] = min(gpus, REFERENCE_SHARE)
    return found


def reference_gpus(config: Config) -> float:
    return config.reference.gpus if config.reference.kl_coef > 0 else 0.0


def critic_ranks(config: Config) -> int:
    return config.critic.ranks if config.algorithm.advantage == "gae" else 0


def together(wanted: list[Bundle]) -> str:
    """`All together need 12 GPUs: rollout.engines (2) × rollout.tensor_parallel (4) 8, policy.ranks (4) 4`"""
    parts: dict[str, float] = {}
    for bundle in wanted:
        parts[bundle.why] = parts.get(bundle.why, 0) + bundle.gpus
    return f"All together need {count(sum(parts.values()), 'GPU')}: " + ", ".join(
        f"{w} {g:g}" for w, g in parts.items()
    )


def count(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"
