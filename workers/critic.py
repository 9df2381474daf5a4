"""The critic of PPO: DeepSpeed ranks as Ray actors that estimate what reward is still to come. There only with advantage gae."""

from pathlib import Path
from typing import Any

import ray

from rlsys.config import Config
from rlsys.types import Floats, Pack
from workers.process import free_port, settle
from workers.ranks import Ranks


class CriticRank:
    """One rank. Every method is called on all ranks at the same time: each holds a collective."""

    def __init__(self, config: Config, rank: int, logs: str):
        settle(f"critic-{rank}", logs)
        self.config, self.rank = config, rank
        from workers.zero import prepare

        prepare(config.cluster.device, config.policy.threads)

    def where(self) -> tuple[str, int]:
        """Where the ranks meet; asked of rank 0."""
        return ray.util.get_node_ip_address(), self.config.critic.port or free_port()

    def start(self, address: str, port: int, model: str) -> None:
        from rlsys.values import PackedValues, value_loss
        from workers.model import load
        from workers.zero import ZeroEngine, join

        c = self.config
        join(c.cluster.device, self.rank, c.critic.ranks, address, port, c.run.seed)
        self.zero = ZeroEngine(PackedValues(load(c, model, c.policy)), c.policy, c.critic.lr)
        self.device, self.value_loss = self.zero.engine.device, value_loss

    def score(self, packs: list[Pack]) -> list[Floats]:
        """Values [K] of each pack under the present weights."""
        return [values.cpu().numpy() for values in self.zero.scored(packs)]

    def update(self, packs: list[Pack], lr: float) -> dict[str, float]:
        import torch

        total = 0.0

        def loss_of(pack: Pack, values: Any) -> Any:
            nonlocal total
            old, returns, weights = (
                torch.tensor(column, device=self.device)
                for column in (pack.columns.values, pack.columns.returns, pack.weights)
            )
            loss = (self.value_loss(values, old, returns, clip=self.config.critic.clip) * weights).sum()
            total += loss.item()
            return loss

        norm = self.zero.minimise(packs, loss_of, lr)
        return {"loss": total, "grad_norm": norm}

    def save(self, folder: str) -> None:
        self.zero.save(Path(folder) / "critic")

    def load(self, folder: str) -> None:
        self.zero.load(Path(folder) / "critic")


class CriticGroup:
    """All ranks as one, for the driver. Implements `rlsys.interfaces.Critic`."""

    def __init__(self, config: Config, actors: list[Any], logs: Path):
        self.all = Ranks("critic", config, actors, logs)
        self.ranks = len(actors)

    def start(self, model: str) -> None:
        self.all.start(model)

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        return self.all.share("score", packs)

    def update(self, packs: list[list[Pack]], lr: float) -> dict[str, float]:
        found = self.all.share("update", packs, lr)
        return {"loss": sum(f["loss"] for f in found), "grad_norm": found[0]["grad_norm"]}

    def save(self, folder: str) -> None:
        self.all.all("save", folder, doing="saving the critic")

    def load(self, folder: str) -> None:
        self.all.all("load", folder, doing="loading the critic")
