"""The reference: the policy of step 0, frozen, scoring what the policy learns from."""

from pathlib import Path
from typing import Any

from rlsys.config import Config
from rlsys.types import Floats, Pack
from workers.process import gather, settle


class ReferenceWorker:
    def __init__(self, config: Config, logs: str):
        settle("reference", logs)
        self.config = config
        import torch
        import transformers

        self.torch, self.transformers = torch, transformers
        self.device = "cuda" if config.cluster.device == "gpu" and config.reference.gpus else "cpu"
        if self.device == "cpu":
            torch.set_num_threads(config.policy.threads)

    def start(self, model: str) -> None:
        from workers.model import load_packed

        self.packed = load_packed(self.config, model).to(self.device).eval().requires_grad_(False)

    def score(self, packs: list[Pack]) -> list[Floats]:
        with self.torch.no_grad():
            return [self.packed(pack)[0].cpu().numpy() for pack in packs]


class Reference:
    """Implements `rlsys.interfaces.Scorer`."""

    ranks = 1

    def __init__(self, config: Config, actor: Any, logs: Path):
        self.config, self.actor, self.logs = config, actor, logs

    def start(self, model: str) -> None:
        gather(
            {"reference": self.actor.start.remote(model)},
            "starting the reference",
            self.config.cluster.start_timeout_s,
            self.logs,
        )

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        call = {"reference": self.actor.score.remote(packs[0])}
        return [gather(call, "score", self.config.cluster.call_timeout_s, self.logs)["reference"]]
