"""The policy: DeepSpeed ZeRO ranks as Ray actors, and the driver's one handle to them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from rlsys.config import Config
from rlsys.types import Floats, Pack
from workers.process import free_port, gather, settle
from workers.ranks import Ranks
from workers.rollout import RolloutGroup
from workers.sync import SENDERS, Message


class PolicyRank:
    """One rank. Every method is called on all ranks at the same time: each holds a collective."""

    def __init__(self, config: Config, rank: int, logs: str):
        settle(f"policy-{rank}", logs)
        self.config, self.rank = config, rank
        from workers.zero import prepare

        prepare(config.cluster.device, config.policy.threads)

    def where(self) -> tuple[str, int]:
        """Where the ranks meet; asked of rank 0."""
        return ray.util.get_node_ip_address(), self.config.policy.port or free_port()

    def start(self, address: str, port: int, model: str, transport: str) -> None:
        """Joins the other ranks and builds model, optimizer and ZeRO partitions."""
        import torch

        from workers.model import load_packed
        from workers.objective import Objective
        from workers.zero import ZeroEngine, join

        c = self.config
        join(c.cluster.device, self.rank, c.policy.ranks, address, port, c.run.seed)
        packed = load_packed(c, model)
        self.zero, self.lm, self.source = ZeroEngine(packed, c.policy, c.policy.lr), packed.lm, model
        self.objective = Objective(c, self.zero.engine.device)
        self.dtype = getattr(torch, c.rollout.dtype)
        self.sender = SENDERS[transport](self.rank, c.rollout.engines * c.rollout.tensor_parallel)

    def score(self, packs: list[Pack]) -> list[Floats]:
        """Log-probs [K] of each pack under the present weights."""
        return [logprobs.cpu().numpy() for logprobs, _ in self.zero.scored(packs)]

    def update(self, packs: list[Pack], lr: float, kl_coef: float) -> dict[str, float]:
        """One optimizer update on this rank's share of a mini-batch. See `rlsys.metrics.of_updates` for what it returns."""
        self.objective.begin(kl_coef)
        norm = self.zero.minimise(packs, self.objective, lr)
        return self.objective.end() | {"grad_norm": norm}

    # --- weights on their way out ---------------------------------------------------------------------------------------

    def manifest(self) -> list[tuple[str, str, list[int]]]:
        """(name, dtype, shape) of every tensor the engines get, in order."""
        return [
            (n, str(self.dtype).removeprefix("torch."), list(getattr(p, "ds_shape", p.shape)))
            for n, p in self.lm.named_parameters()
        ]

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Whole tensors in the engines' dtype; a tied head appears once. Refuses weights that are not finite."""
        import torch

        for name, parameter in self.lm.named_parameters():
            with self.zero.gathered(parameter):
                whole = parameter.detach().to(self.dtype, copy=hasattr(parameter, "ds_id"))
            if not torch.isfinite(whole).all():
                raise FloatingPointError(f"{name} is not finite after the last update; the engines keep their weights.")
            yield name, whole

    def invite(self) -> Message:
        return self.sender.invite(self.manifest())

    def connect(self) -> None:
        self.sender.connect()

    def send(self) -> tuple[Message, int]:
        """Hands the weights to the transport. Returns its message for the engines and the weights' fingerprint."""
        from rlsys.fingerprint import fingerprint

        prints: list[int] = []

        def printed() -> Iterator[tuple[str, Any]]:
            for name, whole in self.weights():
                if self.config.sync.verify and self.rank == 0:
                    prints.append(fingerprint([whole]))
                yield name, whole

        message = self.sender.send(printed())
        return message, sum(prints) % (1 << 64)

    def sent(self) -> None:
        self.sender.sent()

    # --- checkpoints ----------------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """`model/` is a Hugging Face directory; `optimizer/` is DeepSpeed's own."""
        from transformers import AutoTokenizer

        self.zero.save(Path(folder) / "optimizer")
        whole = {}
        for name, parameter in self.lm.named_parameters():
            with self.zero.gathered(parameter):
                if self.rank == 0:
                    whole[name] = parameter.detach().to("cpu", copy=hasattr(parameter, "ds_id"))
        if self.rank == 0:
            target = Path(folder) / "model"
            self.lm.save_pretrained(target, state_dict=whole)
            AutoTokenizer.from_pretrained(
                self.source, trust_remote_code=self.config.model.trust_remote_code
            ).save_pretrained(target)

    def load(self, folder: str) -> None:
        self.zero.load(Path(folder) / "optimizer")


class PolicyGroup:
    """All ranks as one, for the driver. Implements `rlsys.interfaces.Policy`."""

    def __init__(self, config: Config, actors: list[Any], engines: RolloutGroup, logs: Path):
        self.config, self.engines, self.logs = config, engines, logs
        self.all, self.ranks = Ranks("policy", config, actors, logs), len(actors)

    def start(self, model: str, transport: str) -> None:
        self.concurrent = SENDERS[transport].concurrent
        self.all.start(model, transport)

    def connect(self) -> None:
        """Introduces the ranks to the engines."""
        self.invitations = self.all.all("invite")
        calls = self.all.calls("connect") | self.engines.calls("connect", self.invitations[0])
        gather(calls, "connecting policy and engines", self.config.cluster.start_timeout_s, self.logs)

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        return self.all.share("score", packs)

    def update(self, packs: list[list[Pack]], lr: float, kl_coef: float) -> dict[str, float]:
        found = self.all.share("update", packs, lr, kl_coef)
        together = {name: sum(f[name] for f in found) for name in found[0]}
        return together | {"grad_norm": found[0]["grad_norm"], "mismatch_max": max(f["mismatch_max"] for f in found)}

    def sync(self, version: int) -> None:
        """Sends the weights, lets every engine take them, and compares fingerprints.

        A transport either leaves a message the engines then follow, or needs them to listen while it sends (`concurrent`).
        """
        limit = self.config.cluster.call_timeout_s
        sending = self.all.calls("send")
        if self.concurrent:
            taking = self.engines.calls("take", self.invitations, version)
            answers = gather(sending | taking, "syncing weights", limit, self.logs)
        else:
            answers = gather(sending, "sending weights", limit, self.logs)
            taking = self.engines.calls("take", [answers[name][0] for name in sending], version)
            answers |= gather(taking, "taking weights", limit, self.logs)
        self.all.all("sent")
        expected = answers["policy-0"][1]
        if self.config.sync.verify and (wrong := [name for name in taking if answers[name] != expected]):
            raise RuntimeError(
                f"weights of version {version} did not arrive whole: {', '.join(wrong)} answered with another fingerprint than the policy's "
                f"{expected:016x}. Training on samples of unknown weights would be worthless; the run stops here. Try another sync.transport."
            )

    def save(self, folder: str) -> None:
        self.all.all("save", folder, doing="saving a checkpoint")

    def load(self, folder: str) -> None:
        self.all.all("load", folder, doing="loading a checkpoint")
