"""The reference: the policy of step 0 or another model. It scores the samples that the policy learns from.

With `reference.refresh_every` it takes the policy's weights now and then. Rank 0 of the policy writes them to a file of
the run directory, which the reference reads, and a replacement of a lost one too. A checkpoint holds the same file.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsys.config.schema import Config
from rlsys.runs.timeline import pack_facts, recorded
from rlsys.types import Floats, Pack
from workers.learner.gpu_memory import frees_gpu_memory
from workers.learner.policy import PolicyGroup
from workers.learner.tensor_files import TensorFiles, sync_and_hash
from workers.supervision.replaceable_workers import ReplaceableWorkers
from workers.supervision.watchdog import Watchdog
from workers.supervision.worker_setup import cpu_threads, setup_worker_process

WEIGHTS = "reference/model.safetensors"  # in the run directory, and in a checkpoint


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
        from workers.learner.model import load_packed, load_policy
        from workers.learner.proof import prove_logprobs

        load = load_packed if self.config.reference.path else load_policy
        whole = replace(self.config, policy=replace(self.config.policy, zero_stage=0))
        self.packed = load(whole, model).to(self.device).eval().requires_grad_(False)
        prove_logprobs(self.packed.lm, lambda packs, **options: [self.packed(pack, **options) for pack in packs])

    def load_weights(self, file: str) -> None:
        """Replaces the weights by those of a file that the policy has written: all that it trains."""
        from rlsys.packs.lora import trained_parameters

        files, parameters = TensorFiles([Path(file)]), trained_parameters(self.packed.lm)
        assert parameters.keys() == files.file_by_tensor.keys()
        for name, parameter in parameters.items():
            parameter.copy_(files.read(name))

    @recorded(pack_facts)
    @frees_gpu_memory
    def score(self, packs: list[Pack]) -> list[Floats]:
        """Returns the log-probs [K] of each pack."""
        with self.torch.no_grad():
            return [self.packed(pack)[0].cpu().numpy() for pack in packs]


class PolicyWithoutAdapters:
    """The policy of step 0 where policy.lora trains adapters only: the policy's own ranks score without them.

    Implements `rlsys.interfaces.Reference`.
    """

    def __init__(self, policy: PolicyGroup):
        self.policy, self.ranks = policy, policy.ranks

    def start(self, model: str) -> None:
        """The policy has started."""

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        return self.policy.score_without_adapters(packs)

    def refresh(self) -> None:
        raise AssertionError("a reference that takes the policy's weights has a worker of its own")

    def save(self, folder: str) -> None:
        """Does nothing: the weights never change."""

    def saved_files(self, wait: bool) -> dict[str, str] | None:
        return {}

    def load(self, folder: str) -> None:
        """Does nothing: the weights never change."""


class Reference:
    """The driver's handle to the reference. Implements `rlsys.interfaces.Reference`."""

    ranks = 1

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog, policy: PolicyGroup):
        self.config, self.workers = config, ReplaceableWorkers(["reference"], spawn, watchdog)
        self.policy, self.file = policy, watchdog.logs.parent / WEIGHTS  # of the weights that it has taken
        self.refreshed = False  # once it is true, the file holds the reference's weights
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="save reference")
        self.saving: Future[dict[str, str]] | None = None

    def start(self, model: str) -> None:
        limit = self.config.cluster.start_timeout_s
        self.workers.call("start", model, doing="starting the reference", limit_s=limit, replay=True)

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        return list(self.workers.call("score", packs[0], doing="scoring by the reference").values())

    def refresh(self) -> None:
        """Takes the policy's weights."""
        self.file.parent.mkdir(exist_ok=True)
        unfinished = self.file.with_name(f".{self.file.name}")
        self.policy.write_weights(str(unfinished))
        unfinished.rename(self.file)
        self.load_weights()

    def load_weights(self) -> None:
        self.refreshed = True
        self.workers.call("load_weights", str(self.file), doing="refreshing the reference", replay=True)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Adds its weights to a checkpoint, unless they are still those that it started with."""
        copy = Path(folder) / WEIGHTS
        if self.refreshed:
            copy.parent.mkdir()
            shutil.copyfile(self.file, copy)
        self.saving = self.thread.submit(lambda: {WEIGHTS: sync_and_hash(copy)} if copy.exists() else {})

    def saved_files(self, wait: bool) -> dict[str, str] | None:
        assert self.saving is not None
        return self.saving.result() if wait or self.saving.done() else None

    def load(self, folder: str) -> None:
        saved = Path(folder) / WEIGHTS
        if saved.exists():
            self.file.parent.mkdir(exist_ok=True)
            shutil.copyfile(saved, self.file)
            self.load_weights()
