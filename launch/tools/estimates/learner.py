"""What a rank of the policy or the critic holds in memory: DeepSpeed's state, passes over packs, sync, checkpoints."""

from dataclasses import dataclass, replace
from functools import cached_property

from launch.tools.estimates.activations import (
    PassMemory,
    offloaded_bytes,
    offloads_activations,
    pass_memory,
    share_pack,
)
from launch.tools.estimates.adapters import largest_trained, merge_bytes, saved_state_bytes, trained_parameters
from launch.tools.estimates.memory import (
    CUDA_CONTEXT,
    MIB,
    NCCL_BUFFERS,
    WIDTH,
    Moments,
    Parts,
    ProcessMemory,
    SequenceLengths,
    add_parts,
    import_mib,
    total_bytes,
)
from launch.tools.estimates.reduction import reduction_parts
from launch.tools.estimates.sync_buffers import host_send_parts, sync_parts
from launch.tools.estimates.zero import ZeroMemory, zero_memory
from rlsys.config.schema import Config, LoraConfig
from rlsys.models.shapes import ModelShape


def learner_memory(
    c: Config, model: ModelShape, role: str, ranks: int, lengths: SequenceLengths, *, first: bool, has_logits: bool
) -> ProcessMemory:
    """Estimates a policy or critic rank. `first`: rank 0, which sends the weights. `has_logits`: true for the policy."""
    if role == "critic":  # it trains all its weights
        c = replace(c, policy=replace(c.policy, lora=LoraConfig()))
    return LearnerEstimate(c, model, role, ranks, lengths, first, has_logits).memory()


@dataclass(frozen=True)
class LearnerEstimate:
    """One rank, with what its memory depends on. `pass_parts` and others return what it holds for one purpose."""

    config: Config
    model: ModelShape
    role: str
    ranks: int
    lengths: SequenceLengths
    first: bool
    has_logits: bool

    @cached_property
    def zero(self) -> ZeroMemory:
        return zero_memory(self.config, self.model, self.ranks)

    @property
    def on_cpu(self) -> bool:
        return self.config.cluster.device == "cpu"

    def memory(self) -> ProcessMemory:
        return self.memory_on_cpu() if self.on_cpu else self.memory_on_gpu()

    def memory_on_cpu(self) -> ProcessMemory:
        fixed: Parts = {"fixed": import_mib(self.config, self.role) * MIB}
        send = self.send_parts()
        moments = {name: add_parts(parts, send) for name, parts in self.compute_moments(fixed).items()}
        busiest = moments["generate"]
        if self.saves_while_training:
            busiest = max((moments[m] for m in ("update", "reduce", "step")), key=total_bytes)
        load, save = add_parts(self.load_parts(device=True), fixed), add_parts(busiest, self.checkpoint_parts())
        return ProcessMemory(self.role, self.ranks, moments | {"load": load, "save": save})

    def memory_on_gpu(self) -> ProcessMemory:
        zero, (optimizer, params) = self.zero, self.moved_parts()
        fixed: Parts = {"fixed": CUDA_CONTEXT + NCCL_BUFFERS * (self.ranks > 1)}
        device = self.compute_moments(fixed) | {"load": add_parts(self.load_parts(device=True), fixed)}
        offloaded: Parts = {
            "optimizer": zero.state * optimizer,
            "gradients": zero.own_gradients * optimizer,
            "weights": zero.weights * params,
            "adapters": zero.adapters * params,
        }
        held = add_parts(offloaded, {"fixed": import_mib(self.config, self.role) * MIB}, self.send_parts())
        held = add_parts(held, self.offloaded_parts())  # from the first update on, as torch keeps pinned memory
        step = add_parts(held, {"optimizer": zero.step * optimizer})
        save = add_parts(step if self.saves_while_training else held, self.checkpoint_parts())
        host = {"load": add_parts(self.load_parts(device=False), held), "step": step, "save": save}
        return ProcessMemory(self.role, self.ranks, host, device, 1)

    def moved_parts(self) -> tuple[bool, bool]:
        """Whether a GPU's rank keeps optimizer and weights in main memory."""
        moved = [] if self.on_cpu else self.config.policy.offload
        return "optimizer" in moved, "params" in moved

    def compute_moments(self, fixed: Parts) -> Moments:
        """Returns what it holds where it computes: in main memory on CPU, else on its GPU."""
        c, zero = self.config, self.zero
        offload_optimizer, offload_params = self.moved_parts()
        held = add_parts(
            {} if offload_params else {"weights": zero.weights, "adapters": zero.adapters},
            {} if offload_optimizer else {"optimizer": zero.state},
            fixed,
        )
        # DeepSpeed moves gradients to main memory once they are reduced, which ZeRO 1 does after the last pack.
        moved = offload_optimizer and c.policy.zero_stage > 1
        gradients: Parts = {"gradients": 0 if moved else zero.gradients}
        own: Parts = {"gradients": 0 if offload_optimizer else zero.own_gradients}
        copies: Parts = {"gradients": 0 if offload_optimizer else zero.gradient_copies}
        bucket: Parts = {"buckets": zero.bucket}
        if c.policy.zero_stage == 3:  # these stay from the first update on
            held, gradients, own, bucket = add_parts(held, gradients, bucket), {}, {}, {}
        in_passes = add_parts(held, {"weights": zero.gathered})
        with_gradients = add_parts(in_passes, gradients)
        update = self.pass_parts(training=True) if self.on_cpu else self.update_on_gpu(bucket)
        *first, last = self.reductions()
        reduced = max([*first, add_parts(copies, last)], key=total_bytes)
        return {
            "generate": held,
            "score": add_parts(in_passes, self.pass_parts(training=False)),
            "update": add_parts(with_gradients, update),
            "reduce": add_parts(held, gradients, bucket, reduced),
            "step": add_parts(held, own, {"optimizer": 0 if offload_optimizer else zero.step}),
            "sync": add_parts(held, sync_parts(c, self.model) if self.has_logits else {}),
        }

    def update_on_gpu(self, bucket: Parts) -> Parts:
        """Counts the bucket as a whole from the first gradient of a pass on, with ZeRO 1 until the last pack is reduced."""
        work, merged = self.pass_memory(training=True), {"activations": merge_bytes(self.config, self.model)}
        kept = bucket if self.config.policy.zero_stage == 1 else {}
        at_output_layer = add_parts(work.at_output_layer, kept)
        in_layers = add_parts({"activations": work.saved + work.layer, "logits": self.tied_gradient}, bucket)
        return add_parts(merged, max(at_output_layer, in_layers, key=total_bytes))

    @property
    def tied_gradient(self) -> float:
        """The output layer's gradient, which autograd keeps until it can add that of the same tensor as embeddings."""
        tied = self.model.tied and self.has_logits and not self.config.policy.lora.rank
        return WIDTH[self.config.policy.dtype] * float(self.model.embedding_parameters) * tied

    def reductions(self) -> list[Parts]:
        work = self.pass_memory(training=True)
        return reduction_parts(self.config, self.model, self.ranks, work)

    def pass_parts(self, *, training: bool) -> Parts:
        merged = {"activations": merge_bytes(self.config, self.model)}
        return add_parts(self.pass_memory(training=training).largest, merged)

    def pass_memory(self, *, training: bool) -> PassMemory:
        tokens, scored = share_pack(self.config, self.model, self.lengths, self.samples(training), self.ranks)
        return pass_memory(
            self.config, self.model, tokens, scored, self.lengths, training=training, has_logits=self.has_logits
        )

    def samples(self, training: bool) -> int:
        """Returns how many samples are computed between two optimizer steps, or scored."""
        t = self.config.trainer
        return t.prompts_per_step * t.samples_per_prompt // (t.updates_per_step if training else 1)

    def offloaded_parts(self) -> Parts:
        if not offloads_activations(self.config):
            return {}
        tokens, _ = share_pack(self.config, self.model, self.lengths, self.samples(training=True), self.ranks)
        return {"activations": offloaded_bytes(self.config, self.model, tokens)}

    @property
    def saves_while_training(self) -> bool:
        """True if training goes on while a checkpoint is written: always but for the last one."""
        return 0 < self.config.checkpoint.every < self.config.trainer.steps

    def load_parts(self, *, device: bool) -> Parts:
        """Returns what it needs where it computes (`device`) or in main memory, while it loads the model."""
        width, model = WIDTH[self.config.policy.dtype], self.model
        if self.config.policy.zero_stage < 3:  # every rank reads the whole model
            return {"weights": width * float(model.parameters)}
        # It reads its own part of one tensor after the other, and gathers one layer at a time.
        _, moved = self.moved_parts()
        share = 0 if moved else self.zero.weights
        return {"weights": (share if device else 0) + width * float(model.largest_tensor)}

    def send_parts(self) -> Parts:
        return host_send_parts(self.config, self.model, self.ranks, self.first) if self.has_logits else {}

    def checkpoint_parts(self) -> Parts:
        """Returns the copies that a checkpoint is written from."""
        trained, width = trained_parameters(self.config, self.model), WIDTH[self.config.policy.dtype]
        state = trained * saved_state_bytes(self.config) / self.ranks
        return {"buckets": state + width * trained * self.first + 4 * largest_trained(self.config, self.model)}
