"""What every process of a run holds in memory."""

from collections.abc import Mapping

from launch.tools.estimates.engine import engine_memory
from launch.tools.estimates.learner import learner_memory
from launch.tools.estimates.memory import IMPORT_MIB, MIB, Parts, ProcessMemory, SequenceLengths
from launch.tools.estimates.scorers import reference_memory, reward_model_memory
from rlsys.config.derived import has_reference_worker
from rlsys.config.schema import Config
from rlsys.models.shapes import ModelShape
from rlsys.rewards.settings import reward_services, worker_name


def memory_by_role(
    c: Config,
    model: ModelShape,
    lengths: SequenceLengths,
    gpu_bytes: float = 0.0,
    other_models: Mapping[str, ModelShape] | None = None,
) -> dict[str, ProcessMemory]:
    """The processes of a run by role; the policy's rank 0 separately, reward models by the names of their workers.

    `gpu_bytes` is the memory of a GPU. `other_models` are reward models and reference of known shape, by path.
    """
    policy = learner_memory(c, model, "policy", c.policy.ranks, lengths, first=True, has_logits=True)
    processes = {"rollout": engine_memory(c, model, lengths, gpu_bytes), "policy-0": policy}
    if c.policy.ranks > 1:
        processes["policy"] = learner_memory(c, model, "policy", c.policy.ranks, lengths, first=False, has_logits=True)
    if c.algorithm.advantage == "gae":
        processes["critic"] = learner_memory(c, model, "critic", c.critic.ranks, lengths, first=True, has_logits=False)
    if has_reference_worker(c):
        processes["reference"] = reference_memory(c, (other_models or {}).get(c.reference.path, model), lengths)
    for number, service in enumerate(reward_services(c)):
        if options := service.model_options:
            shape = (other_models or {}).get(options.get("path", ""))
            processes[worker_name(number, 0)] = reward_model_memory(options, shape, lengths)
        else:
            processes["reward"] = ProcessMemory("reward", service.workers, host={"always": imports("reward")})
    processes["driver"] = ProcessMemory("driver", 1, host={"always": imports("driver")})
    return processes


def imports(role: str) -> Parts:
    return {"fixed": float(IMPORT_MIB[role] * MIB)}
