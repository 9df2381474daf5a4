"""The reference: the policy of step 0 or another model. Its ranks score the samples that the policy learns from.

With `reference.refresh_every` it takes the policy's weights at regular steps. The policy's ranks write them to files in
the run directory. The reference reads them, and so does the replacement of a lost one. A checkpoint holds the same
files.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlsys.config.derived import reference_names
from rlsys.config.schema import Config, PolicyConfig
from rlsys.runs.timeline import pack_facts, recorded
from rlsys.types import Floats, Pack
from workers.fleet.ray_cluster import node_address
from workers.fleet.replaceable_workers import MAX_ATTEMPTS, ReplaceableWorkers
from workers.fleet.watchdog import Watchdog
from workers.learner.files.host_memory import giving_back_large_blocks
from workers.learner.files.tensor_files import TensorFiles, sync_and_hash
from workers.learner.gpu_memory import frees_gpu_memory
from workers.learner.policy import PolicyGroup
from workers.learner.rendezvous import join_process_group
from workers.learner.zero import import_deepspeed
from workers.start.ports import free_port
from workers.start.worker_setup import cpu_threads, setup_worker_process

WEIGHTS = "reference"  # a folder in the run directory, and in a checkpoint


class ReferenceWorker:
    """One rank. With reference.place split all ranks are called at the same time, because `start` and `score` hold
    collectives; otherwise each has the whole model, and needs no other.
    """

    def __init__(self, config: Config, rank: int, logs: str):
        setup_worker_process(reference_names(config)[rank], logs)
        self.config, self.rank, place = config, rank, config.reference.place
        self.split, self.offload = place == "split", place == "offload"
        import torch
        import transformers  # noqa: F401  slow imports, while the driver does other things

        self.torch = torch
        self.device = "cuda" if config.cluster.device == "gpu" and place != "cpu" else "cpu"
        ranks = config.reference.ranks + config.policy.ranks
        torch.set_num_threads(cpu_threads(config, ranks))
        if self.split:
            import_deepspeed(config, ranks)

    def rendezvous_address(self) -> tuple[str, int]:
        """Returns host and port where the ranks can meet."""
        return node_address(), free_port()

    @frees_gpu_memory
    @giving_back_large_blocks()
    def start(self, model: str, policy_model: str, address: str = "", port: int = 0) -> None:
        """Loads the model. With an address, the ranks meet there, and each loads its part."""
        from workers.learner.files.loading import load_packed, load_policy
        from workers.learner.files.partitioning import gather_in_forward, layers_of
        from workers.learner.proofs.at_start import prove_loaded, prove_logprobs

        c = self.config
        if self.split:
            timeout_s = c.cluster.start_timeout_s
            join_process_group(
                c.cluster.device, self.rank, c.reference.ranks, address, port, seed=c.run.seed, timeout_s=timeout_s
            )
        c = replace(c, policy=self.settings())
        packed = load_packed(c, model, sampled_by=policy_model) if c.reference.path else load_policy(c, model)
        prove_loaded(packed, c)
        self.packed = packed.eval().requires_grad_(False)
        if self.split:
            gather_in_forward([*layers_of(self.packed.lm.get_decoder()), self.packed.lm.get_output_embeddings()])
        else:
            self.packed.to(self.device)
        prove_logprobs(self.packed.lm, self.forward_all)
        self.move_away()

    def settings(self) -> PolicyConfig:
        """Returns the policy's settings, as far as they apply to a model that only scores."""
        p = replace(self.config.policy, zero_stage=0, offload=[], sequence_parallel=1)
        return replace(p, zero_stage=3, compile=False) if self.split else p

    def forward_all(self, packs: list[Pack], **options: bool) -> list[Any]:
        with self.torch.no_grad():
            return [self.packed(pack, **options) for pack in packs]

    def load_weights(self, folder: str) -> None:
        """Replaces the weights by those that the policy has written: all that it trains."""
        from rlsys.forward.lora import trained_parameters
        from workers.learner.files.partitioning import fill_part, is_partitioned

        files, parameters = TensorFiles(weight_files(Path(folder))), trained_parameters(self.packed.lm)
        assert parameters.keys() == files.file_by_tensor.keys()
        for name, parameter in parameters.items():
            if is_partitioned(parameter):
                fill_part(parameter, partial(files.read(name).view(-1).narrow, 0))
            else:
                parameter.copy_(files.read(name))

    @recorded(pack_facts)
    @frees_gpu_memory
    def score(self, packs: list[Pack]) -> list[Floats]:
        """Returns the log-probs [K] of each pack."""
        if self.offload:
            self.packed.to(self.device)
        scores = [logprobs.cpu().numpy() for logprobs, _ in self.forward_all(packs)]
        self.move_away()
        return scores

    def move_away(self) -> None:
        """Moves the weights to host memory, if they rest there."""
        if self.offload and self.device == "cuda":
            self.packed.to("cpu")
            self.torch.cuda.empty_cache()


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def reference_number(name: str) -> list[int]:
    """Returns the rank of a worker's name."""
    return [int(name.partition("-")[2] or 0)]


class PolicyWithoutAdapters:
    """The policy of step 0 where policy.lora trains adapters only: the policy's own ranks score without them.

    Implements `rlsys.interfaces.Reference`.
    """

    def __init__(self, policy: PolicyGroup):
        self.policy, self.ranks = policy, policy.ranks

    def start(self, model: str, policy_model: str) -> None:
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

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog, policy: PolicyGroup):
        self.config, self.ranks, self.names = config, config.reference.ranks, reference_names(config)
        self.workers = ReplaceableWorkers(self.names, spawn, watchdog)
        self.split = config.reference.place == "split"
        self.attempts = 1 if self.split else MAX_ATTEMPTS  # ranks that hold parts of one model are lost together
        self.policy, self.folder = policy, watchdog.logs.parent / WEIGHTS  # of the weights that it has taken
        self.refreshed = False  # once it is true, the folder holds the reference's weights
        self.thread = watchdog.threads.executor("save reference")
        self.saving: Future[dict[str, str]] | None = None

    def start(self, model: str, policy_model: str) -> None:
        address: tuple[str, int] | tuple[()] = ()
        if self.split:
            first = self.names[:1]
            [address] = self.call("rendezvous_address", doing="starting the reference", only=first).values()
        limit = self.config.cluster.start_timeout_s
        self.call("start", model, policy_model, *address, doing="starting the reference", limit_s=limit, replay=True)

    def call(self, method: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        return self.workers.call(method, *arguments, **options, max_attempts=self.attempts)

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        scores = self.call("score", doing="scoring by the reference", each=dict(zip(self.names, packs, strict=True)))
        return [scores[name] for name in self.names]

    def refresh(self) -> None:
        """Takes the policy's weights."""
        unfinished = self.folder.with_name(f".{WEIGHTS}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        self.policy.write_weights(str(unfinished))
        shutil.rmtree(self.folder, ignore_errors=True)
        unfinished.rename(self.folder)
        self.load_weights()

    def load_weights(self) -> None:
        self.refreshed = True
        self.call("load_weights", str(self.folder), doing="refreshing the reference", replay=True)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Adds its weights to a checkpoint, unless they are still those that it started with."""
        copy = Path(folder) / WEIGHTS
        if self.refreshed:
            shutil.copytree(self.folder, copy)
        self.saving = self.thread.submit(lambda: {f"{WEIGHTS}/{f.name}": sync_and_hash(f) for f in weight_files(copy)})

    def saved_files(self, wait: bool) -> dict[str, str] | None:
        assert self.saving is not None
        return self.saving.result() if wait or self.saving.done() else None

    def load(self, folder: str) -> None:
        saved = Path(folder) / WEIGHTS
        if saved.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.copytree(saved, self.folder)
            self.load_weights()
