"""What a rank of the policy or the critic holds in memory: DeepSpeed's state, passes over packs, sync, checkpoints."""

from dataclasses import dataclass, replace
from functools import cached_property

from rlsys.config.derived import adds_packs_in_float32
from rlsys.config.schema import Config, LoraConfig
from rlsys.estimates.activations import forward_parts, offloaded_bytes, offloads_activations, share_pack
from rlsys.estimates.adapters import (
    adapter_parameters,
    largest_trained,
    merge_bytes,
    saved_state_bytes,
    trained_parameters,
)
from rlsys.estimates.memory import (
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
from rlsys.estimates.sync_buffers import host_send_parts, sync_parts
from rlsys.models.shapes import ModelShape

REDUCE_BUCKET = 500_000_000  # elements of DeepSpeed's buffer for gradients that are being reduced
MAX_GATHERED = 1_000_000_000  # parameters that ZeRO 3 keeps gathered
ZERO_MIB = {0: 0, 1: 40, 2: 40, 3: 5}  # MiB more of a rank on CPU, by stage; measured


@dataclass(frozen=True)
class ZeroMemory:
    """What a rank holds under DeepSpeed, in bytes: some of it always, some at times."""

    weights: float
    adapters: float
    gradients: float  # during an update
    gradient_copies: float  # after the last pack
    state: float  # Adam's moments, and fp32 weights beside those that compute
    step: float  # temporaries while Adam steps
    gathered: float  # during a forward or backward pass
    bucket: float  # gradients being reduced: with ZeRO 1 and 2 during an update, with ZeRO 3 always
    bucket_copy: float  # a contiguous copy of the bucket while it is reduced


def zero_memory(c: Config, model: ModelShape, ranks: int) -> ZeroMemory:
    p, width, everything, trained = (
        c.policy,
        WIDTH[c.policy.dtype],
        float(model.parameters),
        trained_parameters(c, model),
    )
    on_cpu, adapters = c.cluster.device == "cpu", adapter_parameters(c, model)
    holders = ranks if p.zero_stage == 3 else 1
    shard = trained if p.zero_stage == 0 else trained / ranks
    fp32_copies = width == 2 or p.zero_stage in (1, 2)
    bucket = min(trained, REDUCE_BUCKET)
    sums_in_float32 = width == 2 and p.grad_dtype == "float32"
    # On CPU, Adam steps one tensor at a time, with two temporaries of its size; on GPUs it is fused and needs none.
    largest = largest_trained(c, model) if p.zero_stage == 0 else shard
    adam = 8 * largest * on_cpu
    return ZeroMemory(
        weights=width * everything / holders,
        adapters=width * adapters / holders,
        gradients=shard * (2 * width if p.zero_stage == 1 else 4 if adds_packs_in_float32(p) else width),
        # ZeRO 2 converts the last pack's gradients to float32, and adds them up in one more tensor.
        gradient_copies=8 * shard * (sums_in_float32 and p.zero_stage == 2),
        state=shard * (8 + 4 * fp32_copies),
        step=adam + (4 * shard if fp32_copies else 0),
        # On CPU twice as much was measured with ZeRO 3 (tests/bench/memory.py); the reason is not known.
        gathered=width * min(everything, MAX_GATHERED) * (1 + on_cpu) if p.zero_stage == 3 else 0,
        # On CPU, only the pages that were filled take memory.
        bucket=width * (bucket if on_cpu or adapters else REDUCE_BUCKET) * (p.zero_stage > 0),
        # With ZeRO 3 on CPU, gloo makes one more copy.
        bucket_copy=(4 if sums_in_float32 else width * (ranks > 1))
        * (bucket * (2 if on_cpu and p.zero_stage == 3 and ranks > 1 else 1)),
    )


def learner_memory(
    c: Config, model: ModelShape, role: str, ranks: int, lengths: SequenceLengths, *, first: bool, has_logits: bool
) -> ProcessMemory:
    """A policy or critic rank. `first`: rank 0, which sends the weights. `has_logits`: true for the policy."""
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
        stage_mib = ZERO_MIB[self.config.policy.zero_stage]
        fixed: Parts = {"fixed": (import_mib(self.config, self.role) + stage_mib) * MIB}
        send = self.send_parts()
        moments = {name: add_parts(parts, send) for name, parts in self.compute_moments(fixed).items()}
        busiest = moments["generate"]
        if self.saves_while_training:
            busiest = max((moments[m] for m in ("update", "reduce", "step")), key=total_bytes)
        load, save = add_parts(self.load_parts(device=True), fixed), add_parts(busiest, self.checkpoint_parts())
        return ProcessMemory(self.role, self.ranks, moments | {"load": load, "save": save})

    def memory_on_gpu(self) -> ProcessMemory:
        p, zero = self.config.policy, self.zero
        fixed: Parts = {"fixed": CUDA_CONTEXT + NCCL_BUFFERS * (self.ranks > 1)}
        device = self.compute_moments(fixed) | {"load": add_parts(self.load_parts(device=True), fixed)}
        offloaded: Parts = {
            "optimizer": zero.state * p.offload_optimizer,
            "gradients": zero.gradients * p.offload_optimizer,
            "weights": zero.weights * p.offload_params,
            "adapters": zero.adapters * p.offload_params,
        }
        held = add_parts(offloaded, {"fixed": import_mib(self.config, self.role) * MIB}, self.send_parts())
        held = add_parts(held, self.offloaded_parts())  # from the first update on, as torch keeps pinned memory
        step = add_parts(held, {"optimizer": zero.step * p.offload_optimizer})
        save = add_parts(step if self.saves_while_training else held, self.checkpoint_parts())
        host = {"load": add_parts(self.load_parts(device=False), held), "step": step, "save": save}
        return ProcessMemory(self.role, self.ranks, host, device, 1)

    def compute_moments(self, fixed: Parts) -> Moments:
        """What it holds where it computes: in main memory on CPU, else on its GPU."""
        c, zero = self.config, self.zero
        offload_optimizer = c.policy.offload_optimizer and not self.on_cpu
        offload_params = c.policy.offload_params and not self.on_cpu
        held = add_parts(
            {} if offload_params else {"weights": zero.weights, "adapters": zero.adapters},
            {} if offload_optimizer else {"optimizer": zero.state},
            fixed,
        )
        gradients: Parts = {"gradients": 0 if offload_optimizer else zero.gradients}
        bucket: Parts = {"buckets": zero.bucket}
        bucket_copy: Parts = {"buckets": zero.bucket_copy}
        copies: Parts = {"gradients": 0 if offload_optimizer else zero.gradient_copies}
        gathered: Parts = {"weights": zero.gathered}
        if c.policy.zero_stage == 3:  # these stay from the first update on
            held, gradients, bucket = add_parts(held, gradients, bucket), {}, {}
        # On CPU the bucket's pages exist once they are filled, and by then activations are gone. On a GPU the whole
        # bucket exists, and the gradients of a large model are reduced in the middle of the backward pass.
        reducing = {}
        if not self.on_cpu:
            in_backward = trained_parameters(c, self.model) > REDUCE_BUCKET
            reducing = add_parts(bucket, bucket_copy if in_backward else {})
        return {
            "generate": held,
            "score": add_parts(held, gathered, self.pass_parts(training=False)),
            "update": add_parts(held, gathered, gradients, reducing, self.pass_parts(training=True)),
            "reduce": add_parts(held, gathered, gradients, copies, bucket, bucket_copy),
            "step": add_parts(held, gradients, {"optimizer": 0 if offload_optimizer else zero.step}),
            "sync": add_parts(held, sync_parts(c, self.model) if self.has_logits else {}),
        }

    def pass_parts(self, *, training: bool) -> Parts:
        tokens, scored = share_pack(self.config, self.lengths, self.samples(training), self.ranks)
        parts = forward_parts(
            self.config, self.model, tokens, scored, self.lengths, training=training, has_logits=self.has_logits
        )
        return add_parts(parts, {"activations": merge_bytes(self.config, self.model)})

    def samples(self, training: bool) -> int:
        """Samples that are computed between two optimizer steps, or scored."""
        t = self.config.trainer
        return t.prompts_per_step * t.samples_per_prompt // (t.updates_per_step if training else 1)

    def offloaded_parts(self) -> Parts:
        if not offloads_activations(self.config):
            return {}
        tokens, _ = share_pack(self.config, self.lengths, self.samples(training=True), self.ranks)
        return {"activations": offloaded_bytes(self.config, self.model, tokens)}

    @property
    def saves_while_training(self) -> bool:
        """True if training goes on while a checkpoint is written: always but for the last one."""
        return 0 < self.config.checkpoint.every < self.config.trainer.steps

    def load_parts(self, *, device: bool) -> Parts:
        """What it needs where it computes (`device`) or beside it in main memory, while it loads the model."""
        width, model = WIDTH[self.config.policy.dtype], self.model
        if self.config.policy.zero_stage < 3:  # every rank reads the whole model
            return {"weights": width * float(model.parameters)}
        # It reads its own part of one tensor after the other, and gathers one layer at a time.
        share = 0 if self.config.policy.offload_params and not self.on_cpu else self.zero.weights
        return {"weights": (share if device else 0) + width * float(model.largest_tensor)}

    def send_parts(self) -> Parts:
        return host_send_parts(self.config, self.model, self.ranks, self.first) if self.has_logits else {}

    def checkpoint_parts(self) -> Parts:
        """The copies that a checkpoint is written from."""
        trained, width = trained_parameters(self.config, self.model), WIDTH[self.config.policy.dtype]
        state = trained * saved_state_bytes(self.config) / self.ranks
        return {"buckets": state + width * trained * self.first + 4 * largest_trained(self.config, self.model)}
