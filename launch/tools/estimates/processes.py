"""What every process of a run holds in memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from launch.roles import in_placing_order, roles_of
from launch.tools.estimates.engine import engine_memory, frozen_engine_memory
from launch.tools.estimates.learner import learner_memory
from launch.tools.estimates.memory import IMPORT_MIB, MIB, Parts, ProcessMemory, SequenceLengths
from launch.tools.estimates.scorers import reference_memory, reward_model_memory
from rlsys.config.schema import Config
from rlsys.models.shapes import ModelShape
from rlsys.rewards.settings import reward_services, worker_name

Processes = dict[str, ProcessMemory]


@dataclass(frozen=True)
class Estimated:
    """What the memory of a run follows from."""

    config: Config
    model: ModelShape
    lengths: SequenceLengths
    gpu_bytes: float  # memory of a GPU
    other_models: Mapping[str, ModelShape]  # reward models and reference of known shape, by path


def memory_by_role(
    c: Config,
    model: ModelShape,
    lengths: SequenceLengths,
    gpu_bytes: float = 0.0,
    other_models: Mapping[str, ModelShape] | None = None,
) -> Processes:
    """Returns the processes of a run by role; the policy's rank 0 separately, reward models by the names of their workers.

    `gpu_bytes` is the memory of a GPU. `other_models` are reward models and reference of known shape, by path.
    """
    run, processes = Estimated(c, model, lengths, gpu_bytes, other_models or {}), Processes()
    for name in in_placing_order(roles_of(c, training=True)):
        if name in MEMORY:
            processes |= MEMORY[name](run)
    return processes | {"driver": ProcessMemory("driver", 1, host={"always": imports("driver")})}


def engines(run: Estimated) -> Processes:
    return {"rollout": engine_memory(run.config, run.model, run.lengths, run.gpu_bytes)}


def policy_ranks(run: Estimated) -> Processes:
    def rank(first: bool) -> ProcessMemory:
        ranks = run.config.policy.ranks
        return learner_memory(run.config, run.model, "policy", ranks, run.lengths, first=first, has_logits=True)

    return {"policy-0": rank(first=True)} | ({"policy": rank(first=False)} if run.config.policy.ranks > 1 else {})


def critic_ranks(run: Estimated) -> Processes:
    c = run.config
    return {"critic": learner_memory(c, run.model, "critic", c.critic.ranks, run.lengths, first=True, has_logits=False)}


def references(run: Estimated) -> Processes:
    model = run.other_models.get(run.config.reference.path, run.model)
    return {"reference": reference_memory(run.config, model, run.lengths)}


def reward_workers(run: Estimated) -> Processes:
    processes = Processes()
    for number, service in enumerate(reward_services(run.config)):
        if options := service.model_options:
            shape = run.other_models.get(options.get("path", ""))
            processes[worker_name(number, 0)] = reward_model_memory(options, shape, run.lengths)
        else:
            processes["reward"] = ProcessMemory("reward", service.workers, host={"always": imports("reward")})
    return processes


def frozen_engines(run: Estimated) -> Processes:
    """Leaves out a model of unknown shape."""
    processes = Processes()
    for name, model in run.config.models.items():
        if shape := run.other_models.get(model.path):
            memory = frozen_engine_memory(run.config, shape, run.lengths, run.gpu_bytes)
            processes[f"model-{name}"] = replace(memory, role=f"model-{name}", count=model.engines)
    return processes


def imports(role: str) -> Parts:
    return {"fixed": float(IMPORT_MIB[role] * MIB)}


# By role. Episode workers are not counted: their memory is the user's functions'.
MEMORY: dict[str, Callable[[Estimated], Processes]] = {
    "rollout": engines,
    "policy": policy_ranks,
    "critic": critic_ranks,
    "reference": references,
    "reward": reward_workers,
    "model": frozen_engines,
}
