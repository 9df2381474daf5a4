"""The policy: DeepSpeed ZeRO ranks as Ray actors, and the driver's one handle to them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rlsys.config.derived import sends_shards
from rlsys.config.schema import Config
from rlsys.interfaces import STEP_0, ModelFacts, WhatIf
from rlsys.runs.errors import WorkerFailed
from rlsys.runs.timeline import pack_facts, recorded
from rlsys.types import Floats, Pack
from workers.learner.checkpoint_writer import CheckpointWriter, SaveResult, merge_results
from workers.learner.gpu_memory import frees_gpu_memory
from workers.learner.ranks import LearnerGroup
from workers.rollout.rollout import RolloutGroup, WeightUpdate
from workers.supervision.watchdog import Watchdog, failure_severity
from workers.supervision.worker_setup import free_port, setup_worker_process
from workers.sync import SENDERS, Message
from workers.sync.host_memory import ManifestEntry, NamedTensors, split_into_buckets
from workers.sync.outgoing import OutgoingWeights, Shard
from workers.sync.verify import combine_ranks


class PolicyRank:
    """One rank. Every method is called on all ranks at the same time: each holds a collective."""

    def __init__(self, config: Config, rank: int, logs: str):
        setup_worker_process(f"policy-{rank}", logs)
        self.config, self.rank = config, rank
        from workers.learner.zero import import_deepspeed

        import_deepspeed(config, config.policy.ranks)

    def where(self) -> tuple[str, int]:
        """Where the ranks meet; asked of rank 0."""
        return ray.util.get_node_ip_address(), self.config.policy.port or free_port()

    @recorded()
    @frees_gpu_memory
    def start(self, address: str, port: int, model: str, transport: str) -> None:
        """Joins the other ranks and builds model, optimizer and ZeRO partitions."""
        import torch

        from workers.learner.model import load_packed
        from workers.learner.objective import Objective
        from workers.learner.zero import ZeroEngine, join_process_group

        c = self.config
        join_process_group(c.cluster.device, self.rank, c.policy.ranks, address, port, c.run.seed)
        packed = load_packed(c, model)
        self.zero, self.lm, self.source = ZeroEngine(packed, c.policy, c.policy.lr), packed.lm, model
        self.objective = Objective(c, self.zero.engine.device)
        self.dtype = getattr(torch, c.rollout.dtype)
        receivers = c.rollout.engines * c.rollout.tensor_parallel
        self.sender = SENDERS[transport](self.rank, c.policy.ranks, receivers)
        # By place: devices of an engine have shares of tensors. Such fingerprints are of whole tensors.
        self.by_place = c.cluster.device == "gpu" or c.rollout.tensor_parallel > 1
        self.cut = c.policy.ranks if self.sender.sends_shards and sends_shards(c) else 1
        self.writer = CheckpointWriter()

    @recorded(pack_facts)
    @frees_gpu_memory
    def score(self, packs: list[Pack]) -> list[Floats]:
        """Log-probs [K] of each pack under the present weights."""
        return [logprobs.cpu().numpy() for logprobs, _ in self.zero.forward_all(packs)]

    @recorded(pack_facts)
    @frees_gpu_memory
    def update(self, packs: list[Pack], lr: float, kl_coef: float) -> dict[str, float]:
        """One optimizer update on this rank's share of a mini-batch. See `rlsys.metrics.of_updates` for what it returns."""
        self.objective.start_minibatch(kl_coef)
        found = self.zero.minimize(packs, self.objective, lr)
        return self.objective.sums_over_tokens() | found | {"culprit": self.objective.bad_sample.index()}

    # --- weights on their way out ---------------------------------------------------------------------------------------

    def manifest(self) -> list[ManifestEntry]:
        """(name, dtype, shape) of every tensor the engines get, in order."""
        return [
            (n, str(self.dtype).removeprefix("torch."), list(getattr(p, "ds_shape", p.shape)))
            for n, p in self.lm.named_parameters()
        ]

    def weights(self) -> Iterator[NamedTensors]:
        """Whole tensors, bucket by bucket; with ZeRO 3, a bucket lasts until the next one is asked for. A tied head appears once."""
        parameters = dict(self.lm.named_parameters())
        for bucket in split_into_buckets(self.manifest()):
            named = [(name, parameters[name]) for name, _, _ in bucket]
            with self.zero.gathered(*(parameter for _, parameter in named)):
                yield named

    def shares(self) -> Iterator[list[Shard]]:
        """What this rank sends of each bucket: what it has, where every rank sends its own; else rank 0 all, gathered if need be."""
        if self.cut == 1:
            for bucket in self.weights():
                yield [(name, 0, tensor) for name, tensor in bucket if self.rank == 0]
            return
        parameters = dict(self.lm.named_parameters())
        for entries in split_into_buckets(self.manifest()):
            pieces = [(name, *self.zero.local_shard(parameters[name])) for name, _, _ in entries]
            yield [(name, first, piece) for name, first, piece in pieces if len(piece)]

    def invite(self) -> Message:
        manifest = self.manifest()
        said = {"manifest": manifest, "cut": self.cut, "by_place": self.by_place}
        return self.sender.connection_info(manifest) | said

    def connect(self, invitation: Message) -> None:
        self.sender.connect(invitation)

    @recorded(lambda _, part: {"part": part})
    def send(self, part: int) -> Any:
        """Hands a part of the weights to the transport, in order. Returns what engines need to know of it. After a part that
        failed, all do, and `prints`."""
        if part == 0:
            verify = self.config.sync.verify
            self.outgoing = OutgoingWeights(self.weights(), self.shares(), self.dtype, verify, self.by_place)
            self.failed: Exception | None = None
        if self.failed:
            raise self.failed
        try:
            return self.sender.send(self.outgoing, part)
        except Exception as error:
            self.failed = error
            raise

    def prints(self) -> dict[str, list[int]]:
        """Fingerprints of all that this rank has sent."""
        if self.failed:
            raise self.failed
        prints = self.outgoing.fingerprints if self.rank == 0 or self.cut > 1 else {}
        del self.outgoing  # and with it what of ZeRO 3 is gathered
        return prints

    @frees_gpu_memory
    def sent(self) -> None:
        self.sender.finish_send()

    # --- checkpoints ----------------------------------------------------------------------------------------------------

    @recorded()
    @frees_gpu_memory
    def save(self, folder: str) -> None:
        """`model/` is a Hugging Face directory, of rank 0; `optimizer/` holds Adam's state, a share of each rank, and the fp32
        weights where `model/` does not hold them: it may be bfloat16, or named as transformers does on disk only."""
        from transformers.core_model_loading import revert_weight_conversion

        from workers.learner.zero_state import MOMENTS, WEIGHT

        self.writer.wait()  # one copy of the state at a time
        named = dict(self.lm.named_parameters())
        bare = self.config.policy.dtype == "float32" and not self.lm._weight_conversions
        share = self.zero.state.owned_tensors(named, MOMENTS if bare else (WEIGHT, *MOMENTS))
        whole = {}
        for name, parameter in named.items():
            with self.zero.gathered(parameter):
                if self.rank == 0:
                    whole[name] = parameter.detach().to("cpu", copy=True)
        tensors, others = {f"optimizer/{self.zero.shard_file()}": share}, {}
        if self.rank == 0:
            converted = revert_weight_conversion(self.lm, whole) if self.lm._weight_conversions else whole
            tensors["model/model.safetensors"] = converted
            others["model"] = self.write_model_files
        self.writer.start(Path(folder), tensors, others)

    def write_model_files(self, folder: Path) -> None:
        """All of a Hugging Face directory but the weights."""
        from transformers import AutoTokenizer

        # How to sample from the model stays as its authors wrote it. Much of what is around transformers reads, and would not write.
        authors, self.lm.generation_config = self.lm.generation_config, type(self.lm.generation_config)()
        self.lm.save_pretrained(folder, state_dict={})
        self.lm.generation_config = authors
        authors.to_json_file(folder / "generation_config.json")
        AutoTokenizer.from_pretrained(
            self.source, trust_remote_code=self.config.model.trust_remote_code
        ).save_pretrained(folder)

    def saved(self, wait: bool) -> SaveResult:
        return self.writer.result(wait)

    def load(self, folder: str) -> None:
        from workers.learner.tensor_files import TensorFiles
        from workers.learner.zero_state import WEIGHT

        self.writer.wait()
        parts = TensorFiles(sorted((Path(folder) / "optimizer").glob("*.safetensors")))
        own = any(name.startswith(f"{WEIGHT}/") for name in parts.file_by_tensor)
        model = None if own else TensorFiles([Path(folder) / "model" / "model.safetensors"])
        self.zero.state.restore(dict(self.lm.named_parameters()), parts, model)

    # --- what if ---------------------------------------------------------------------------------------------------------

    def rescored(self, packs: list[Pack], variant: WhatIf) -> list[Floats]:
        """Log-probs [K, samplings] of each pack as a variant of the forward pass would have them."""
        from workers.learner.what_if import rescore

        if variant.weights == STEP_0:
            variant = replace(variant, weights=self.source)
        return rescore(self.zero.forward_all, self.lm, packs, variant, self.config.model.trust_remote_code)

    def facts(self, texts: list[str]) -> ModelFacts:
        """What the model's files say, and the tokens they make of some texts."""
        from workers.learner.what_if import read_model_facts

        return read_model_facts(self.source, texts, self.config.model.trust_remote_code)


class PolicyGroup:
    """All ranks as one, for the driver. Implements `rlsys.interfaces.Policy`."""

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        self.config, self.watchdog = config, watchdog
        self.ranks = config.policy.ranks
        self.group = LearnerGroup("policy", self.ranks, config, spawn, watchdog)

    def start(self, model: str, transport: str) -> None:
        self.needs_concurrent_receive = SENDERS[transport].needs_concurrent_receive
        self.group.start(model, transport)

    def connect(self, engines: RolloutGroup) -> None:
        """Introduces the ranks to the engines, which take their weights from now on."""
        self.engines = engines
        self.connection_info = self.group.call_all("invite")[0]
        limit = self.config.cluster.start_timeout_s
        if self.needs_concurrent_receive:
            calls = self.group.start_calls("connect", self.connection_info) | self.engines.start_calls(
                "connect", self.connection_info
            )
            self.watchdog.gather(calls, "connecting policy and engines", limit)
        else:
            self.group.call_all("connect", self.connection_info, timeout_s=limit)
            self.engines.connect(self.connection_info)

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        return self.group.scatter("score", packs)

    def update(self, packs: list[list[Pack]], lr: float, kl_coef: float) -> dict[str, float]:
        found = self.group.scatter("update", packs, lr, kl_coef)
        together = {name: sum(f[name] for f in found) for name in found[0]}
        together |= {name: found[0][name] for name in ("grad_norm", "skipped")}  # the same on all ranks
        together["mismatch_max"] = max(f["mismatch_max"] for f in found)
        return together | {"culprit": min(f["culprit"] for f in found)}

    def sync(self, version: int) -> None:
        """Has every engine take the weights, and prove that it did before a sample leaves it.

        They take them part by part while the ranks send; in flight, where the transport allows it, after that: meanwhile they
        generate.
        """
        in_flight = self.config.pipeline.in_flight
        if not in_flight:  # no engine is at work, could be lost, and need the last weights again
            self.engines.weight_update = None  # an object store need not hold two versions
        try:
            with (
                self.engines.replacements_paused()
            ):  # who is taking another's place has the last weights by then, or gets these
                with self.group.lock:  # nothing comes between two parts
                    parts = [
                        list(self.group.start_calls("send", i).values()) for i in range(self.connection_info["parts"])
                    ]
                    prints = self.group.start_calls("prints")
                delivery = WeightUpdate(parts, version, {})
                follow = self.needs_concurrent_receive or not in_flight
                if follow:
                    answers = self.engines.load_weights(delivery, prints)
                else:
                    answers = self.watchdog.gather(prints, "sending weights")
                self.engines.weight_update = delivery = replace(
                    delivery, fingerprints=combine_ranks(list(answers.values()))
                )
            if not follow:
                self.engines.load_weights(delivery)
        except WorkerFailed as error:
            # A rank that has died, and its memory with it, is the cause. Ranks that are whole may wait for one that failed, or for an engine.
            died = self.watchdog.collect_related_failures(self.group.start_calls("sent"), "sending weights")
            raise max([*died, error], key=failure_severity) from None
        self.group.call_all("sent")
        self.engines.verify_weights()

    def save(self, folder: str) -> None:
        self.group.call_all("save", folder, doing="saving a checkpoint")

    def saved(self, wait: bool) -> dict[str, str] | None:
        return merge_results(self.group.call_all("saved", wait, doing="writing a checkpoint"))

    def load(self, folder: str) -> None:
        self.group.call_all("load", folder, doing="loading a checkpoint")

    def rescore(self, packs: list[list[Pack]], variant: WhatIf) -> list[list[Floats]]:
        return self.group.scatter("rescored", packs, variant)

    def model_facts(self, texts: list[str]) -> ModelFacts:
        return self.group.call_all("facts", texts)[0]
