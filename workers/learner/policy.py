"""The policy: DeepSpeed ZeRO ranks as Ray actors, and the driver's one handle to them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rlsys.config.derived import sends_shards
from rlsys.config.schema import Config
from rlsys.interfaces import ModelFacts, WhatIf
from rlsys.runs.timeline import recorded
from rlsys.types import Floats, Pack
from workers.fleet.watchdog import Watchdog
from workers.learner.files.checkpoint_writer import merge_results
from workers.learner.files.host_memory import giving_back_large_blocks
from workers.learner.files.tensor_files import write_tensors
from workers.learner.gpu_memory import (
    free_gpu_memory,
    frees_gpu_memory,
    frees_gpu_memory_for_models,
    freeze_started_objects,
)
from workers.learner.ranks import LearnerGroup, LearnerRank, share_facts
from workers.learner.zero import ZeroEngine
from workers.sync import SENDERS, Message
from workers.sync.disk_format import is_converted
from workers.sync.sending import PolicyWeights, WeightSender
from workers.sync.weight_sync import Engines, WeightSync


class PolicyRank(LearnerRank):
    """One rank. Each method is called on all ranks at the same time, because it holds a collective."""

    def __init__(self, config: Config, rank: int, logs: str):
        super().__init__(config, rank, logs, role="policy", ranks=config.policy.ranks)

    @recorded()
    @frees_gpu_memory
    @giving_back_large_blocks()
    def start(self, address: str, port: int, model: str, transport: str) -> list[str]:
        """Joins the other ranks, and builds model, optimizer and ZeRO partitions. Returns the model's mixers."""
        import torch

        from workers.learner.files.adapter_files import base_fingerprint
        from workers.learner.files.loading import load_policy
        from workers.learner.objective import Objective
        from workers.learner.proofs.at_start import prove_loaded, prove_logprobs

        c = self.config
        self.join(address, port)
        packed = load_policy(c, model)
        prove_loaded(packed, c)
        self.base = base_fingerprint(packed.lm) if c.policy.lora.rank else ""
        self.zero = ZeroEngine(packed, c.policy, c.policy.lr, c.cluster.start_timeout_s)
        self.lm, self.source = packed.lm, model
        prove_logprobs(self.lm, self.zero.forward_all)
        self.objective = Objective(c, self.zero.engine.device)
        shards = self.ranks if SENDERS[transport].sends_shards and sends_shards(c) and not is_converted(self.lm) else 1
        sender = SENDERS[transport](self.rank, shards, c.rollout.engines * c.rollout.tensor_parallel)
        weights = PolicyWeights(self.lm, self.zero, getattr(torch, c.rollout.dtype), self.rank, shards)
        if c.policy.lora.rank:
            from workers.learner.proofs.adapters import prove_adapters

            prove_adapters(self.lm, self.zero.forward_all, weights, c.policy.lora.alpha / c.policy.lora.rank)
        # Devices of an engine hold shards of tensors. Hashes with positions can be added up to those of whole tensors.
        by_position = c.cluster.device == "gpu" or c.rollout.tensor_parallel > 1
        self.weight_sender = WeightSender(weights, sender, by_position)
        if c.cluster.device == "gpu":
            freeze_started_objects()
        return self.lm.get_decoder().packs.mixers

    @recorded(share_facts)
    @frees_gpu_memory_for_models
    def score(self, packs: list[Pack]) -> list[Floats]:
        """Returns the log-probs [K] of each pack under the present weights."""
        return [logprobs.cpu().numpy() for logprobs, _ in self.zero.forward_all(packs)]

    @recorded(share_facts)
    @frees_gpu_memory_for_models
    def update(self, packs: list[Pack], lr: float, kl_coef: float) -> dict[str, float]:
        """Makes one optimizer update with this rank's share of a mini-batch. Returns the inputs of `update_metrics`."""
        self.objective.start_minibatch(kl_coef)
        step = self.zero.minimize(packs, self.objective, lr, self.objective.slopes)
        return self.objective.sums_over_tokens() | step | {"first_bad_sample": self.objective.bad_sample.index()}

    @recorded(share_facts)
    @frees_gpu_memory_for_models
    def score_without_adapters(self, packs: list[Pack]) -> list[Floats]:
        """Returns the log-probs [K] of each pack under the weights of step 0."""
        from rlsys.forward.lora import without_adapters

        with without_adapters(self.lm):
            return [logprobs.cpu().numpy() for logprobs, _ in self.zero.forward_all(packs)]

    # --- sync: see workers/sync ---------------------------------------------------------------------------------------

    def connection_info(self) -> Message:
        return self.weight_sender.connection_info()

    def connect(self, info: Message) -> None:
        self.weight_sender.transport.connect(info)

    @recorded()
    def free_memory(self) -> None:
        """Called on all ranks before engines on the same GPUs wake."""
        free_gpu_memory(self.config)

    @recorded(lambda _, bucket, *loaded: {"part": bucket})
    def send(self, bucket: int, *loaded: None) -> Any:
        """`loaded`: answers of engines. Ray waits for them before it makes this call."""
        return self.weight_sender.send(bucket, self.config.sync.verify)

    def fingerprints(self) -> dict[str, list[int]]:
        return self.weight_sender.fingerprints()

    @frees_gpu_memory
    def finish_send(self) -> None:
        self.weight_sender.transport.finish_send()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @recorded()
    @frees_gpu_memory
    def save(self, folder: str) -> None:
        """Copies this rank's share of the state and starts to write it. See `policy_checkpoint` for the files."""
        from workers.learner.files import policy_checkpoint

        self.writer.wait()  # one copy of the state at a time
        files = policy_checkpoint.copy_state(self.zero.state, self.lm, self.config.policy.dtype)
        facts = (self.zero.state, self.lm, self.source, self.config, self.base)
        write_model_files = partial(policy_checkpoint.write_model_files, *facts)
        self.writer.start(Path(folder), files, {"model": write_model_files} if self.rank == 0 else {})

    def load(self, folder: str) -> None:
        from workers.learner.files import policy_checkpoint

        self.writer.wait()
        policy_checkpoint.load_state(self.zero.state, self.lm, self.source, self.base, Path(folder))

    @frees_gpu_memory
    def write_weights(self, folder: str) -> None:
        """Writes this rank's files of the present weights, as far as they are trained."""
        from workers.learner.files import policy_checkpoint

        for file, tensors in policy_checkpoint.copy_weights(self.zero.state, self.lm, disk_format=False).items():
            write_tensors(Path(folder) / file, tensors)

    # --- diagnosis ----------------------------------------------------------------------------------------------------

    def rescore(self, packs: list[Pack], what_if: WhatIf) -> list[Floats]:
        """Returns the log-probs [K, samplings] of each pack under a changed forward pass."""
        from workers.learner.proofs.what_if import rescore

        return rescore(self.zero.forward_all, self.lm, packs, what_if, self.source, self.config.model.trust_remote_code)

    def most_gpu_memory(self) -> int:
        """Bytes of PyTorch's tensors on the GPU at their most; 0 without one."""
        import torch

        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0

    def model_facts(self, texts: list[str]) -> ModelFacts:
        from workers.learner.model_facts import read_model_facts

        return read_model_facts(self.source, texts, self.config.model.trust_remote_code)


class PolicyGroup(LearnerGroup):
    """All ranks as one, for the driver. Implements `rlsys.interfaces.Policy` and `Diagnosable`."""

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        super().__init__("policy", config.policy.ranks, config, spawn, watchdog)

    def start(self, model: str, transport: str) -> None:
        self.transport = transport
        self.mixers: list[str] = self.start_ranks(model, transport)[0]

    def connect(self, engines: Engines) -> None:
        """Connects the ranks with the engines, which get their weights from these ranks from now on."""
        self.weight_sync = WeightSync(self, engines, self.transport)

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        return self.scatter("score", packs)

    def score_without_adapters(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        return self.scatter("score_without_adapters", packs)

    def update(self, packs: list[list[Pack]], lr: float, kl_coef: float) -> dict[str, float]:
        ranks = self.scatter("update", packs, lr, kl_coef)
        total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
        total |= {name: ranks[0][name] for name in ("grad_norm", "skipped")}  # the same on all ranks
        total["mismatch_max"] = max(rank["mismatch_max"] for rank in ranks)
        return total | {"first_bad_sample": min(rank["first_bad_sample"] for rank in ranks)}

    def sync(self, version: int) -> None:
        self.weight_sync.run(version)

    def save(self, folder: str) -> None:
        self.call_all("save", folder, doing="saving a checkpoint")

    def saved_files(self, wait: bool) -> dict[str, str] | None:
        return merge_results(self.call_all("saved_files", wait, doing="writing a checkpoint"))

    def load(self, folder: str) -> None:
        self.call_all("load", folder, doing="loading a checkpoint")

    def write_weights(self, folder: str) -> None:
        self.call_all("write_weights", folder, doing="writing the reference's weights")

    def rescore(self, packs: list[list[Pack]], what_if: WhatIf) -> list[list[Floats]]:
        return self.scatter("rescore", packs, what_if)

    def most_gpu_memory(self) -> int:
        return max(self.call_all("most_gpu_memory"))

    def model_facts(self, texts: list[str]) -> ModelFacts:
        return self.call_all("model_facts", texts)[0]
