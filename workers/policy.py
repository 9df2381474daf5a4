"""The policy: DeepSpeed ZeRO ranks as Ray actors, and the driver's one handle to them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from rlsys.config import Config
from rlsys.types import Floats, Pack
from workers.process import free_port, gather, settle
from workers.rollout import RolloutGroup
from workers.sync import SENDERS, Message


class PolicyRank:
    """One rank. Every method is called on all ranks at the same time: each holds a collective."""

    def __init__(self, config: Config, rank: int, logs: str):
        settle(f"policy-{rank}", logs)
        self.config, self.rank = config, rank
        if config.cluster.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        import torch
        import transformers

        self.deepspeed, self.torch, self.transformers = deepspeed, torch, transformers
        if config.cluster.device == "cpu":
            torch.set_num_threads(config.policy.threads)
        self.device = "cuda" if config.cluster.device == "gpu" else "cpu"

    def where(self) -> tuple[str, int]:
        """Where the ranks meet; asked of rank 0."""
        return ray.util.get_node_ip_address(), self.config.policy.port or free_port()

    def start(self, address: str, port: int, model: str, transport: str) -> None:
        """Joins the other ranks and builds model, optimizer and ZeRO partitions."""
        from rlsys import kl, losses, plugins
        from workers.model import load_packed
        from workers.zero import deepspeed_config

        c = self.config
        os.environ |= {
            "RANK": str(self.rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(c.policy.ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        if self.device == "cpu":
            # Only inference would use it, and compiling it made the first start about twice as long.
            self.deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.deepspeed.init_distributed(dist_backend="gloo" if self.device == "cpu" else "nccl", verbose=False)
        self.torch.manual_seed(c.run.seed)
        packed = load_packed(c, model, c.policy.dtype)
        if c.policy.gradient_checkpointing:
            packed.lm.gradient_checkpointing_enable({"use_reentrant": c.policy.zero_stage == 3})
        self.engine, self.optimizer, _, _ = self.deepspeed.initialize(
            model=packed, model_parameters=packed.parameters(), config=deepspeed_config(c.policy)
        )
        self.lm = packed.lm
        self.source = model
        self.loss = plugins.find(c.algorithm.loss, losses.LOSSES, "algorithm.loss")
        self.loss_options = (
            {"clip_low": c.algorithm.clip_low, "clip_high": c.algorithm.clip_high}
            if c.algorithm.loss in losses.LOSSES
            else {}
        )
        self.clipped, self.kl = losses.clipped, kl.ESTIMATORS[c.algorithm.kl]
        self.dtype = getattr(self.torch, c.rollout.dtype)
        self.sender = SENDERS[transport](self.rank, c.rollout.engines * c.rollout.tensor_parallel)

    def score(self, packs: list[Pack]) -> list[Floats]:
        """Log-probs [K] of each pack under the present weights."""
        self.engine.eval()
        with self.torch.no_grad():
            return [self.engine(pack)[0].cpu().numpy() for pack in packs]

    def update(self, packs: list[Pack], lr: float) -> dict[str, float]:
        """One optimizer update on this rank's share of a mini-batch. See `rlsys.metrics.of_updates` for what it returns."""
        torch, found = (
            self.torch,
            dict.fromkeys(("loss", "kl", "entropy", "clipped", "mismatch", "mismatch_max", "tokens"), 0.0),
        )
        self.engine.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for i, pack in enumerate(packs):
            self.engine.set_gradient_accumulation_boundary(i == len(packs) - 1)
            logprobs, entropy = self.engine(pack)  # [K]
            old = logprobs.detach() if pack.old is None else self.tensor(pack.old)
            advantages = self.tensor(pack.advantages)
            loss = self.loss(logprobs, old, advantages, self.tensor(pack.sequences), **self.loss_options)  # [K]
            if pack.ref is not None:
                kl = self.kl(logprobs, self.tensor(pack.ref))
                loss = loss + self.config.reference.kl_coef * kl
                found["kl"] += kl.sum().item()
            total = (loss * self.tensor(pack.weights)).sum()
            # DeepSpeed averages over ranks; our weights are already global.
            self.engine.backward(total * self.config.policy.ranks)
            if pack.samples:
                with torch.no_grad():
                    gap = (old - self.tensor(pack.rollout)).abs()
                    found["loss"] += total.item()
                    found["entropy"] += entropy.sum().item()
                    found["clipped"] += (
                        self.clipped(logprobs, old, advantages, **self.loss_options).sum().item()
                        if self.loss_options
                        else 0.0
                    )
                    found["mismatch"] += gap.sum().item()
                    found["mismatch_max"] = max(found["mismatch_max"], gap.max().item())
                    found["tokens"] += len(pack.targets)
            norm = self.gradient_norm() if i == len(packs) - 1 and self.config.policy.zero_stage == 0 else None
            self.engine.step()
        return found | {"grad_norm": float(self.engine.get_global_grad_norm()) if norm is None else norm}

    def gradient_norm(self) -> float:
        """ZeRO 0 keeps whole gradients and reports no norm."""
        return self.torch.nn.utils.get_total_norm([p.grad for p in self.lm.parameters() if p.grad is not None]).item()

    def tensor(self, values: Any) -> Any:
        return self.torch.tensor(values, device=self.device)

    # --- weights on their way out ---------------------------------------------------------------------------------------

    def manifest(self) -> list[tuple[str, str, list[int]]]:
        """(name, dtype, shape) of every tensor the engines get, in order."""
        return [
            (n, str(self.dtype).removeprefix("torch."), list(getattr(p, "ds_shape", p.shape)))
            for n, p in self.lm.named_parameters()
        ]

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Whole tensors in the engines' dtype; a tied head appears once. Refuses weights that are not finite."""
        for name, parameter in self.lm.named_parameters():
            if hasattr(parameter, "ds_id"):
                with self.deepspeed.zero.GatheredParameters([parameter]):
                    whole = parameter.detach().to(self.dtype, copy=True)
            else:
                whole = parameter.detach().to(self.dtype)
            if not self.torch.isfinite(whole).all():
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
        self.engine.save_checkpoint(str(Path(folder) / "optimizer"), tag="state")
        whole = {}
        for name, parameter in self.lm.named_parameters():
            if hasattr(parameter, "ds_id"):
                with self.deepspeed.zero.GatheredParameters([parameter]):
                    if self.rank == 0:
                        whole[name] = parameter.detach().to("cpu", copy=True)
            elif self.rank == 0:
                whole[name] = parameter.detach().cpu()
        if self.rank == 0:
            target = Path(folder) / "model"
            self.lm.save_pretrained(target, state_dict=whole)
            self.transformers.AutoTokenizer.from_pretrained(
                self.source, trust_remote_code=self.config.model.trust_remote_code
            ).save_pretrained(target)

    def load(self, folder: str) -> None:
        self.engine.load_checkpoint(str(Path(folder) / "optimizer"), tag="state")


class PolicyGroup:
    """All ranks as one, for the driver. Implements `rlsys.interfaces.Policy`."""

    def __init__(self, config: Config, actors: list[Any], engines: RolloutGroup, logs: Path):
        self.config, self.actors, self.engines, self.logs = config, actors, engines, logs
        self.ranks = len(actors)

    def all(self, method: str, *arguments: Any, doing: str = "", timeout_s: float = 0) -> list[Any]:
        """The same call on every rank."""
        calls = {f"policy-{i}": getattr(a, method).remote(*arguments) for i, a in enumerate(self.actors)}
        return list(gather(calls, doing or method, timeout_s or self.config.cluster.call_timeout_s, self.logs).values())

    def start(self, model: str, transport: str) -> None:
        self.concurrent = SENDERS[transport].concurrent
        limit = self.config.cluster.start_timeout_s
        where = gather({"policy-0": self.actors[0].where.remote()}, "starting the policy", limit, self.logs)["policy-0"]
        self.all("start", *where, model, transport, doing="starting the policy", timeout_s=limit)

    def connect(self) -> None:
        """Introduces the ranks to the engines."""
        self.invitations = self.all("invite")
        calls = {f"policy-{i}": a.connect.remote() for i, a in enumerate(self.actors)} | self.engines.calls(
            "connect", self.invitations[0]
        )
        gather(calls, "connecting policy and engines", self.config.cluster.start_timeout_s, self.logs)

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        calls = {f"policy-{i}": a.score.remote(p) for i, (a, p) in enumerate(zip(self.actors, packs, strict=True))}
        return list(gather(calls, "score", self.config.cluster.call_timeout_s, self.logs).values())

    def update(self, packs: list[list[Pack]], lr: float) -> dict[str, float]:
        calls = {f"policy-{i}": a.update.remote(p, lr) for i, (a, p) in enumerate(zip(self.actors, packs, strict=True))}
        found = list(gather(calls, "update", self.config.cluster.call_timeout_s, self.logs).values())
        together = {name: sum(f[name] for f in found) for name in found[0]}
        return together | {"grad_norm": found[0]["grad_norm"], "mismatch_max": max(f["mismatch_max"] for f in found)}

    def sync(self, version: int) -> None:
        """Sends the weights, lets every engine take them, and compares fingerprints.

        A transport either leaves a message the engines then follow, or needs them to listen while it sends (`concurrent`).
        """
        limit = self.config.cluster.call_timeout_s
        sending = {f"policy-{i}": a.send.remote() for i, a in enumerate(self.actors)}
        if self.concurrent:
            taking = self.engines.calls("take", self.invitations, version)
            answers = gather(sending | taking, "syncing weights", limit, self.logs)
        else:
            answers = gather(sending, "sending weights", limit, self.logs)
            taking = self.engines.calls("take", [answers[name][0] for name in sending], version)
            answers |= gather(taking, "taking weights", limit, self.logs)
        self.all("sent")
        expected = answers["policy-0"][1]
        if self.config.sync.verify and (wrong := [name for name in taking if answers[name] != expected]):
            raise RuntimeError(
                f"weights of version {version} did not arrive whole: {', '.join(wrong)} answered with another fingerprint than the policy's "
                f"{expected:016x}. Training on samples of unknown weights would be worthless; the run stops here. Try another sync.transport."
            )

    def save(self, folder: str) -> None:
        self.all("save", folder, doing="saving a checkpoint")

    def load(self, folder: str) -> None:
        self.all("load", folder, doing="loading a checkpoint")
