"""The reference: the policy of step 0 or another model, frozen. It scores the samples that the policy learns from."""

from collections.abc import Callable
from typing import Any

from rlsys.config.schema import Config
from rlsys.runs.timeline import pack_facts, recorded
from rlsys.types import Floats, Pack
from workers.learner.gpu_memory import frees_gpu_memory
from workers.supervision.replaceable_workers import ReplaceableWorkers
from workers.supervision.watchdog import Watchdog
from workers.supervision.worker_setup import cpu_threads, setup_worker_process


class ReferenceWorker:
    def __init__(self, config: Config, logs: str):
        setup_worker_process("reference", logs)
        self.config = config
        import torch
        import transformers  # noqa: F401  slow imports, while the driver does other things

        self.torch = torch
        self.device = "cuda" if config.cluster.device == "gpu" and config.reference.gpus else "cpu"
        torch.set_num_threads(cpu_threads(config, processes=1 + config.policy.ranks))

    @frees_gpu_memory
    def start(self, model: str) -> None:
        from workers.learner.model import load_packed
        from workers.learner.proof import prove_logprobs

        self.packed = load_packed(self.config, model).to(self.device).eval().requires_grad_(False)
        prove_logprobs(self.packed.lm, lambda packs, **options: [self.packed(pack, **options) for pack in packs])

    @recorded(pack_facts)
    @frees_gpu_memory
    def score(self, packs: list[Pack]) -> list[Floats]:
        """Returns the log-probs [K] of each pack."""
        with self.torch.no_grad():
            return [self.packed(pack)[0].cpu().numpy() for pack in packs]


class Reference:
    """The driver's handle to the reference. Implements `rlsys.interfaces.Scorer`."""

    ranks = 1

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        self.config, self.workers = config, ReplaceableWorkers(["reference"], spawn, watchdog)

    def start(self, model: str) -> None:
        limit = self.config.cluster.start_timeout_s
        self.workers.call("start", model, doing="starting the reference", limit_s=limit, replay=True)

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        return list(self.workers.call("score", packs[0], doing="scoring by the reference").values())
