"""The critic of PPO: DeepSpeed ranks as Ray actors that estimate what reward is still to come. There only with advantage gae."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from rlsys.config.schema import Config
from rlsys.runs.timeline import pack_facts, recorded
from rlsys.types import Floats, Pack
from workers.learner.checkpoint_writer import CheckpointWriter, SaveResult, merge_results
from workers.learner.gpu_memory import frees_gpu_memory
from workers.learner.ranks import LearnerGroup
from workers.supervision.watchdog import Watchdog
from workers.supervision.worker_setup import free_port, setup_worker_process


class CriticRank:
    """One rank. Every method is called on all ranks at the same time: each holds a collective."""

    def __init__(self, config: Config, rank: int, logs: str):
        setup_worker_process(f"critic-{rank}", logs)
        self.config, self.rank = config, rank
        from workers.learner.zero import import_deepspeed

        import_deepspeed(config, config.critic.ranks)

    def where(self) -> tuple[str, int]:
        """Where the ranks meet; asked of rank 0."""
        return ray.util.get_node_ip_address(), self.config.critic.port or free_port()

    @frees_gpu_memory
    def start(self, address: str, port: int, model: str) -> None:
        from rlsys.packs.values import PackedValues, value_loss
        from workers.learner.model import load_causal_lm
        from workers.learner.zero import ZeroEngine, join_process_group

        c = self.config
        join_process_group(c.cluster.device, self.rank, c.critic.ranks, address, port, c.run.seed)
        self.zero = ZeroEngine(PackedValues(load_causal_lm(c, model, c.policy)), c.policy, c.critic.lr)
        self.device, self.value_loss = self.zero.engine.device, value_loss
        self.writer = CheckpointWriter()

    @recorded(pack_facts)
    @frees_gpu_memory
    def score(self, packs: list[Pack]) -> list[Floats]:
        """Values [K] of each pack under the present weights."""
        return [values.cpu().numpy() for values in self.zero.forward_all(packs)]

    @recorded(pack_facts)
    @frees_gpu_memory
    def update(self, packs: list[Pack], lr: float) -> dict[str, float]:
        import torch

        from workers.learner.bad_sample import FirstBadSample

        total, culprit = 0.0, FirstBadSample(self.device)

        def loss_of(pack: Pack, values: Any) -> Any:
            nonlocal total
            old, returns, weights = (
                torch.tensor(column, device=self.device)
                for column in (pack.columns.values, pack.columns.returns, pack.weights)
            )
            losses = self.value_loss(values, old, returns, clip=self.config.critic.clip) * weights
            culprit.observe(pack, values, losses)
            loss = losses.sum()
            total += loss.item()
            return loss

        found = self.zero.minimize(packs, loss_of, lr)
        return {"loss": total, "culprit": culprit.index()} | found

    @recorded()
    @frees_gpu_memory
    def save(self, folder: str) -> None:
        """`critic/` holds the fp32 weights and Adam's state, a share of each rank."""
        from workers.learner.zero_state import MOMENTS, WEIGHT

        self.writer.wait()  # one copy of the state at a time
        share = self.zero.state.owned_tensors(self.named(), (WEIGHT, *MOMENTS))
        self.writer.start(Path(folder), {f"critic/{self.zero.shard_file()}": share})

    def saved(self, wait: bool) -> SaveResult:
        return self.writer.result(wait)

    def load(self, folder: str) -> None:
        from workers.learner.tensor_files import TensorFiles

        self.writer.wait()
        parts = TensorFiles(sorted((Path(folder) / "critic").glob("*.safetensors")))
        self.zero.state.restore(self.named(), parts, None)

    def named(self) -> dict[str, Any]:
        return dict(self.zero.engine.module.named_parameters())


class CriticGroup:
    """All ranks as one, for the driver. Implements `rlsys.interfaces.Critic`."""

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        self.ranks = config.critic.ranks
        self.group = LearnerGroup("critic", self.ranks, config, spawn, watchdog)

    def start(self, model: str) -> None:
        self.group.start(model)

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        return self.group.scatter("score", packs)

    def update(self, packs: list[list[Pack]], lr: float) -> dict[str, float]:
        found = self.group.scatter("update", packs, lr)
        loss, culprit = sum(f["loss"] for f in found), min(f["culprit"] for f in found)
        return {"loss": loss, "culprit": culprit} | {name: found[0][name] for name in ("grad_norm", "skipped")}

    def save(self, folder: str) -> None:
        self.group.call_all("save", folder, doing="saving the critic")

    def saved(self, wait: bool) -> dict[str, str] | None:
        return merge_results(self.group.call_all("saved", wait, doing="writing the critic"))

    def load(self, folder: str) -> None:
        self.group.call_all("load", folder, doing="loading the critic")
