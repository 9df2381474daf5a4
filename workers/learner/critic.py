"""The critic of PPO: DeepSpeed ranks as Ray actors that estimate the reward still to come.

Only the advantage `gae` has one.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlsys.config.schema import Config
from rlsys.runs.timeline import recorded
from rlsys.types import Floats, Pack
from workers.fleet.watchdog import Watchdog
from workers.learner.files.checkpoint_writer import merge_results
from workers.learner.files.host_memory import giving_back_large_blocks
from workers.learner.files.tensor_files import TensorFiles
from workers.learner.files.zero_state import MOMENTS, WEIGHT
from workers.learner.gpu_memory import frees_gpu_memory
from workers.learner.ranks import LearnerGroup, LearnerRank, share_facts
from workers.learner.zero import ZeroEngine


class CriticRank(LearnerRank):
    """One rank. Each method is called on all ranks at the same time, because it holds a collective."""

    def __init__(self, config: Config, rank: int, logs: str):
        super().__init__(config, rank, logs, role="critic", ranks=config.critic.ranks)

    @frees_gpu_memory
    @giving_back_large_blocks()
    def start(self, address: str, port: int, model: str) -> None:
        """Joins the other ranks, and builds model, optimizer and ZeRO partitions."""
        from rlsys.forward.values import PackedValues, value_loss
        from workers.learner.files.loading import load_causal_lm
        from workers.learner.proofs.at_start import prove_for_zero_3, prove_states

        c = self.config
        self.join(address, port)
        packed = PackedValues(load_causal_lm(c, model, c.policy))
        if c.policy.zero_stage == 3:
            prove_for_zero_3(packed, packed.decoder)
        self.zero = ZeroEngine(packed, c.policy, c.critic.lr, c.cluster.start_timeout_s)
        prove_states(packed.decoder, self.zero.forward_all)
        self.device, self.value_loss = self.zero.engine.device, value_loss

    @recorded(share_facts)
    @frees_gpu_memory
    def score(self, packs: list[Pack]) -> list[Floats]:
        """Returns the values [K] of each pack under the present weights."""
        return [values.cpu().numpy() for values in self.zero.forward_all(packs)]

    @recorded(share_facts)
    @frees_gpu_memory
    def update(self, packs: list[Pack], lr: float) -> dict[str, float]:
        """Makes one optimizer update with this rank's share of a mini-batch."""
        import torch

        from rlsys.forward.transfer import to_device
        from workers.learner.bad_sample import FirstBadSample

        total, bad_sample = torch.zeros((), dtype=torch.float64, device=self.device), FirstBadSample(self.device)

        def pack_loss(pack: Pack, values: Any) -> Any:
            nonlocal total
            old, returns, weights = (
                to_device(column, self.device) for column in (pack.columns.values, pack.columns.returns, pack.weights)
            )
            losses = self.value_loss(values, old, returns, clip=self.config.critic.clip) * weights
            bad_sample.observe(pack, values, losses)
            loss = losses.sum()
            total = total + loss.detach()
            return loss

        step = self.zero.minimize(packs, pack_loss, lr)
        return {"loss": total.item(), "first_bad_sample": bad_sample.index()} | step

    @recorded()
    @frees_gpu_memory
    def save(self, folder: str) -> None:
        """Copies this rank's share of the fp32 weights and of Adam's state, and starts to write it to `critic/`."""
        self.writer.wait()  # one copy of the state at a time
        tensors = self.zero.state.owned_tensors(self.parameters(), (WEIGHT, *MOMENTS))
        self.writer.start(Path(folder), {f"critic/{self.zero.state.shard_file()}": tensors})

    def load(self, folder: str) -> None:
        self.writer.wait()
        files = TensorFiles(sorted((Path(folder) / "critic").glob("*.safetensors")))
        self.zero.state.restore(self.parameters(), files, None)

    def parameters(self) -> dict[str, Any]:
        return dict(self.zero.engine.module.named_parameters())


class CriticGroup(LearnerGroup):
    """All ranks as one, for the driver. Implements `rlsys.interfaces.Critic`."""

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        super().__init__("critic", config.critic.ranks, config, spawn, watchdog)

    def start(self, model: str) -> None:
        self.start_ranks(model)

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        return self.scatter("score", packs)

    def update(self, packs: list[list[Pack]], lr: float) -> dict[str, float]:
        ranks = self.scatter("update", packs, lr)
        return {
            "loss": sum(rank["loss"] for rank in ranks),
            "first_bad_sample": min(rank["first_bad_sample"] for rank in ranks),
            "grad_norm": ranks[0]["grad_norm"],  # the same on all ranks
            "skipped": ranks[0]["skipped"],
        }

    def save(self, folder: str) -> None:
        self.call_all("save", folder, doing="saving the critic")

    def saved_files(self, wait: bool) -> dict[str, str] | None:
        return merge_results(self.call_all("saved_files", wait, doing="writing the critic"))

    def load(self, folder: str) -> None:
        self.call_all("load", folder, doing="loading the critic")
