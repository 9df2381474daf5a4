"""What each process holds in memory, part by part, at each moment of a step: pure arithmetic over configuration and model.

A moment is what all processes do at a time: where engines and ranks share a GPU, their needs at the same moment add up. What is
counted is the code of `workers/` and of DeepSpeed 0.19: whose buckets are as large as it makes them, and whose copies are there
as long as it keeps them. tests/bench/memory.py compares it with real processes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlsys.config.derived import max_batched_tokens, sends_shards
from rlsys.config.schema import Config
from rlsys.estimates.devices import GIB
from rlsys.models.shapes import ModelShape
from rlsys.rewards.settings import reward_services, worker_name

MIB = 1 << 20
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "KV cache", "buckets", "fixed")
MOMENTS = ("load", "generate", "score", "update", "reduce", "step", "sync", "save")

REDUCE_BUCKET = 500_000_000  # elements of DeepSpeed's buffer for gradients on their way
MAX_GATHERED = 1_000_000_000  # parameters that ZeRO 3 keeps gathered
SYNC_BUCKET, NCCL_BUCKET = 512 * MIB, GIB  # of workers/sync, and of vLLM's transport by NCCL
# On CPU: what activations take over what they are, in pieces that were freed and are kept; of a policy with ZeRO 3; of compiled
# layers, which make fewer. Measured
MALLOC, MALLOC_3, MALLOC_COMPILED = 1.75, 2.0, 1.35
PADDING_FACTOR = 1.1  # cells of attention's blocks, over the tokens in them
# A process before it has a model: Python, and what it has imported. Measured by tests/bench/memory.py with the tiny model; of
# libraries one kernel maps more pages than another, of a reward process up to 20 MiB.
IMPORT_MIB = {"policy": 410, "critic": 440, "reference": 430, "rollout": 600, "reward": 141, "driver": 450}  # MiB
REWARD_MODEL_IMPORT_MIB = 510  # MiB of its actor, and of its process, which imports what models need
ZERO_MIB = {0: 0, 1: 40, 2: 40, 3: 5}  # MiB more of a rank, by stage
COMPILER_MIB = 85  # MiB more where layers are compiled
# Assumed, not measured: a process's CUDA context with the libraries' own buffers, and NCCL's.
CUDA_CONTEXT, NCCL_BUFFERS, SLEEPING_ENGINE = 0.7 * GIB, 0.5 * GIB, 1.2 * GIB

Parts = dict[str, float]
Moments = dict[str, Parts]


@dataclass(frozen=True)
class SequenceLengths:
    """Tokens of a prompt and of the longest completion. `Lengths(prompt=256, new=1024)`"""

    prompt: int
    completion: int


@dataclass
class ProcessMemory:
    """What one process of a role needs. Bytes by moment and part; a moment that is not there needs what is always held."""

    role: str
    count: int
    host: Moments = field(default_factory=dict)
    device: Moments = field(default_factory=dict)  # of one GPU; empty without
    gpus: int = 0

    def peak(self, on_device: bool = False) -> tuple[str, Parts]:
        """The moment when it needs most, and what for."""
        moments = self.device if on_device else self.host
        return max(moments.items(), key=lambda m: sum(m[1].values()), default=("", {}))


def total_bytes(parts: Parts) -> float:
    return sum(parts.values())


def add_parts(*some: Parts) -> Parts:
    found: Parts = {}
    for parts in some:
        for name, size in parts.items():
            found[name] = found.get(name, 0.0) + size
    return {name: found[name] for name in PARTS if found.get(name)}


# --- what a batch makes of it -----------------------------------------------------------------------------------------------


def worst_case_pack(c: Config, lengths: SequenceLengths, samples: int, ranks: int) -> tuple[float, float]:
    """Tokens of a pack, and those of them that are scored, if every completion is as long as it may be. Ranks have equally many packs."""
    prompts = max(samples / c.trainer.samples_per_prompt, 1)
    whole = prompts * lengths.prompt + samples * lengths.completion
    packs = -(-math.ceil(whole / c.policy.tokens_per_pack) // ranks) * ranks
    tokens = min(max(whole / packs, lengths.prompt + lengths.completion), whole)
    return tokens, tokens * samples * lengths.completion / whole


def attention_cells(c: Config, lengths: SequenceLengths) -> float:
    """Keys that attention lays out, per token of a pack: a prompt's stand before each of its completions."""
    group = c.trainer.samples_per_prompt
    own = lengths.prompt + group * lengths.completion
    return PADDING_FACTOR * (lengths.prompt + group * (lengths.prompt + lengths.completion)) / own


def saved_activation_bytes(model: ModelShape, width: int, cells: float, compiled: bool = False) -> float:
    """Bytes that a layer keeps of a token for the backward pass; counted with torch's hooks for saved tensors. Compiled, it computes
    norms and gates again."""
    h, q, kv, i = model.hidden, model.query_width, model.key_width, model.flop_counter.intermediate
    q_cells, kv_cells = 2 * PADDING_FACTOR * q, 2 * cells * kv  # queries and their results in blocks; keys and values
    attention = width * (q + q_cells + kv_cells) + 4 * model.heads + 8
    heads = (q + kv) * model.has_qk_norm
    if compiled:
        return attention + width * (3 * i + 4 * h + heads)
    return attention + width * 4 * i + (24 if width == 4 else 16) * h + (8 if width == 4 else 6) * heads


def transient_bytes(width: int, model: ModelShape, tokens: float, training: bool) -> float:
    """Bytes of what a layer's results are made of, while they are made. In training some of it is kept, and counted there."""
    return tokens * width * ((2.0 if training else 4.0) * model.flop_counter.intermediate + 4 * model.hidden)


def logit_bytes(c: Config, model: ModelShape, scored: float, training: bool) -> float:
    """Of a chunk: logits and what is made of them. In training also the gradient of the output layer, while it adds up."""
    chunk = min(c.policy.logprob_chunk, scored) * model.vocabulary
    if not training:
        return 12 * chunk
    low = WIDTH[c.policy.dtype] == 2
    return (24 if c.entropy.coef else 20) * chunk + model.embedding_parameters * (10 if low else 8)


def forward_parts(
    c: Config, model: ModelShape, tokens: float, scored: float, lengths: SequenceLengths, training: bool, heads: bool
) -> Parts:
    """A layer and the output layer are not computed at the same time: the larger counts."""
    width = WIDTH[c.policy.dtype]
    work, words = transient_bytes(width, model, tokens, training), logit_bytes(c, model, scored, training) * heads
    stays = 0.0
    if training:
        one = tokens * saved_activation_bytes(model, width, attention_cells(c, lengths), c.policy.compile)
        if c.policy.gradient_checkpointing:  # what a layer keeps is made again when its turn has come
            stays, work = model.layers * tokens * width * model.hidden, work + one
        else:
            stays = model.layers * one
    on_cpu = MALLOC_3 if training and c.policy.zero_stage == 3 else MALLOC_COMPILED if c.policy.compile else MALLOC
    kept_by_malloc = on_cpu if c.cluster.device == "cpu" else 1.0
    if words > work:
        return {"activations": stays * kept_by_malloc, "logits": words}
    return {"activations": (stays + work) * kept_by_malloc}


def import_mib(c: Config, role: str) -> float:
    """MiB of a process with a model of ours, before it has one."""
    return float(IMPORT_MIB[role] + COMPILER_MIB * c.policy.compile)


# --- a model that learns ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ZeroMemory:
    """What a rank under DeepSpeed always holds, and at times; bytes."""

    weights: float
    gradients: float  # while it updates
    state: float  # fp32 weights where they are others, and Adam's moments
    step: float  # while Adam steps
    gathered: float  # while it computes
    buffer: float  # of gradients on their way: with ZeRO 1 and 2 there for an update, with ZeRO 3 always
    laid: float  # the same once more, laid end to end while they are reduced


def zero_memory(c: Config, model: ModelShape, ranks: int) -> ZeroMemory:
    p, width, everything = c.policy, WIDTH[c.policy.dtype], float(model.parameters)
    cpu = c.cluster.device == "cpu"
    own = everything if p.zero_stage == 0 else everything / ranks
    low = width == 2
    copies = low or p.zero_stage in (1, 2)  # fp32 weights beside those that are computed with
    laid = min(everything, REDUCE_BUCKET)
    buffer = (laid if cpu else REDUCE_BUCKET) * (p.zero_stage > 0)  # on CPU its pages are there when it has been filled
    # One tensor at a time on CPU, with two of its size beside it; all at once on GPUs.
    largest = model.largest_tensor if p.zero_stage == 0 else own
    adam = 4 * (2 * largest if cpu or p.offload_optimizer else own)
    return ZeroMemory(
        weights=width * (own if p.zero_stage == 3 else everything),
        gradients=width * own * (2 if p.zero_stage == 1 else 1),
        state=own * (8 + 4 * copies),
        step=adam + (4 * own if low or p.zero_stage in (1, 2) else 0),
        # On CPU as much again was seen with ZeRO 3 (tests/bench/memory.py); what keeps it is not known.
        gathered=width * min(everything, MAX_GATHERED) * (1 + cpu) if p.zero_stage == 3 else 0,
        buffer=width * buffer,
        laid=width * laid * (ranks > 1) * (2 if cpu and p.zero_stage == 3 else 1),  # gloo reduces and scatters a copy
    )


def learner_memory(
    c: Config, model: ModelShape, role: str, ranks: int, lengths: SequenceLengths, first: bool, heads: bool
) -> ProcessMemory:
    """A policy or critic rank. `heads`: whether it has logits; `first`: rank 0 hands out the weights."""
    z, cpu, t = zero_memory(c, model, ranks), c.cluster.device == "cpu", c.trainer
    samples = t.prompts_per_step * t.samples_per_prompt
    tokens, scored = worst_case_pack(c, lengths, samples // t.updates_per_step, ranks)
    all_tokens, all_scored = worst_case_pack(c, lengths, samples, ranks)
    imports = (import_mib(c, role) + ZERO_MIB[c.policy.zero_stage]) * MIB
    fixed: Parts = {"fixed": imports if cpu else CUDA_CONTEXT + NCCL_BUFFERS * (ranks > 1)}
    off, off_weights = c.policy.offload_optimizer and not cpu, c.policy.offload_params and not cpu
    held = add_parts({"weights": 0 if off_weights else z.weights, "optimizer": 0 if off else z.state}, fixed)
    grads: Parts = {"gradients": 0 if off else z.gradients}  # offloaded, they pass by in the buffer
    buffer: Parts = {"buckets": z.buffer}
    gathered: Parts = {"weights": z.gathered}
    laid: Parts = {"buckets": z.laid}
    if c.policy.zero_stage == 3:  # there from the first update on
        held, grads, buffer = add_parts(held, grads, buffer), {}, {}
    # On CPU the buffer's pages are there when it has been filled, and by then activations are gone. On a GPU it is there as a whole,
    # and of large models it is reduced in the middle of a backward pass.
    on_the_way = {} if cpu else add_parts(buffer, laid if model.parameters > REDUCE_BUCKET else {})
    moments: Moments = {
        "generate": held,
        "score": add_parts(held, gathered, forward_parts(c, model, all_tokens, all_scored, lengths, False, heads)),
        "update": add_parts(
            held, gathered, grads, on_the_way, forward_parts(c, model, tokens, scored, lengths, True, heads)
        ),
        "reduce": add_parts(held, gathered, grads, buffer, laid),
        "step": add_parts(held, grads, {"optimizer": 0 if off else z.step}),
        "sync": add_parts(held, _sync(c, model) if heads else {}),
    }
    shared, load, copies = _host(c, model, z, ranks, first, heads)
    # A checkpoint is written while training goes on, unless it is the last.
    meanwhile = 0 < c.checkpoint.every < t.steps
    if cpu:
        moments = {name: add_parts(parts, shared) for name, parts in moments.items()}
        busiest = (
            max((moments[m] for m in ("update", "reduce", "step")), key=total_bytes)
            if meanwhile
            else moments["generate"]
        )
        return ProcessMemory(
            role, ranks, moments | {"load": add_parts(load, fixed), "save": add_parts(busiest, copies)}
        )
    held_here = add_parts(
        {"optimizer": z.state * off, "gradients": z.gradients * off, "weights": z.weights * off_weights},
        {"fixed": import_mib(c, role) * MIB},
        shared,
    )
    step = add_parts(held_here, {"optimizer": z.step * off})
    host = {
        "load": add_parts(load, held_here),
        "step": step,
        "save": add_parts(step if meanwhile else held_here, copies),
    }
    return ProcessMemory(role, ranks, host, moments, 1)


def _sync(c: Config, model: ModelShape) -> Parts:
    """While weights are sent, where the model is: what ZeRO 3 gathers at a time, and what is made of it on a GPU."""
    gathers = c.policy.zero_stage == 3 and not sends_shards(c)
    on_gpu = _sync_on_device(c, model) if c.cluster.device == "gpu" else 0
    return {"weights": WIDTH[c.policy.dtype] * _bucket(c, model) * gathers, "buckets": on_gpu}


def _bucket(c: Config, model: ModelShape) -> float:
    """Elements that are sent at a time."""
    return min(max(SYNC_BUCKET / WIDTH[c.rollout.dtype], model.largest_tensor), model.parameters)


def _sync_on_device(c: Config, model: ModelShape) -> float:
    """Beside the weights: what is cast at a time; all of it where the other process reads it in place."""
    width = WIDTH[c.rollout.dtype]
    whole = c.policy.dtype == c.rollout.dtype and c.policy.zero_stage != 3
    if c.cluster.placement == "colocated" and c.sync.transport in ("auto", "cuda_ipc"):
        return 0 if whole else width * model.parameters
    return _packed(c, model)


def _packed(c: Config, model: ModelShape) -> float:
    """Between GPUs weights travel in two buffers of vLLM's, at both ends."""
    return min(
        2 * max(NCCL_BUCKET, WIDTH[c.rollout.dtype] * model.largest_tensor), WIDTH[c.rollout.dtype] * model.parameters
    )


def _host(
    c: Config, model: ModelShape, z: ZeroMemory, ranks: int, first: bool, policy: bool
) -> tuple[Parts, Parts, Parts]:
    """In main memory: always, to hand out weights; while it loads; and the copies of which a checkpoint is written."""
    everything = float(model.parameters)
    low = WIDTH[c.policy.dtype] == 2
    copies = (
        everything * (12 if low else 8) / ranks + WIDTH[c.policy.dtype] * everything * first + 4 * model.largest_tensor
    )
    shared: Parts = {}
    on_host = c.cluster.device == "cpu" or c.sync.transport in ("shared_memory", "object_store")
    sends = ranks if sends_shards(c) else int(first)  # among how many what is sent is dealt out, if this one has any
    if on_host and policy and sends:
        elements = _bucket(c, model) if c.sync.transport == "object_store" else everything
        shared = {"buckets": WIDTH[c.rollout.dtype] * elements / sends}
    return shared, {"weights": WIDTH[c.policy.dtype] * everything}, {"buckets": copies}


# --- the others -------------------------------------------------------------------------------------------------------------


def engine_memory(c: Config, model: ModelShape, lengths: SequenceLengths, memory: float) -> ProcessMemory:
    """`memory` of a GPU, bytes; not used on CPU."""
    r, t = c.rollout, c.trainer
    width = WIDTH[r.dtype]
    at_once = min(r.max_sequences, -(-t.prompts_per_step * t.samples_per_prompt // r.engines))
    if c.cluster.device == "cpu":
        weights = width * model.parameters
        read = min(max_batched_tokens(c, lengths.prompt + lengths.completion), at_once * lengths.prompt)
        work: Parts = {
            "activations": read * width * 4.0 * model.flop_counter.intermediate,
            "logits": 12.0 * at_once * model.vocabulary,
        }
        received = SYNC_BUCKET if c.sync.transport == "object_store" else weights
        wide = r.tensor_parallel
        others = wide + 1 if wide > 1 else 0  # its core, and who computes; inside the actor otherwise
        imports = IMPORT_MIB["rollout"] * (1 + others) + COMPILER_MIB * (not r.enforce_eager)
        fixed: Parts = {"KV cache": r.kv_cache_mb * MIB * wide, "fixed": imports * MIB}
        held = add_parts(
            {"weights": weights},
            fixed,
            {"buckets": min(received, weights)},
        )
        return ProcessMemory("rollout", r.engines, host={"generate": add_parts(held, work), "sync": held})
    parts = engine_parts(c, model, memory)
    asleep: Parts = {"fixed": SLEEPING_ENGINE}
    awake = dict.fromkeys(MOMENTS[1:], parts)
    if c.cluster.placement == "colocated":
        awake |= dict.fromkeys(("score", "update", "reduce", "step", "save"), asleep)
        sync = add_parts(asleep, {"weights": parts["weights"]})
    else:
        sync = add_parts(parts, {"buckets": _packed(c, model)})
    host: Moments = {"load": {"fixed": 2.0 * IMPORT_MIB["rollout"] * MIB}}  # the actor, and its core
    return ProcessMemory("rollout", r.engines, host=host, device=awake | {"sync": sync}, gpus=r.tensor_parallel)


def engine_parts(c: Config, model: ModelShape, memory: float) -> Parts:
    """Of each GPU of an engine: what vLLM's share of the memory goes to. What is left is the KV cache, which may be less than nothing."""
    r, width = c.rollout, WIDTH[c.rollout.dtype]
    wide = r.tensor_parallel
    weights = width * model.parameters / wide
    work = max_batched_tokens(c, 0) * width * (2 * model.flop_counter.intermediate / wide + 4 * model.hidden)
    words = r.max_sequences * model.vocabulary * (8.0 + width)
    graphs = 0.0 if r.enforce_eager else 0.5 * GIB
    fixed = CUDA_CONTEXT + NCCL_BUFFERS * (wide > 1) + graphs
    cache = r.gpu_memory * memory - weights - work - words - fixed
    return {"weights": weights, "activations": work, "logits": words, "KV cache": cache, "fixed": fixed}


def kv_cache_tokens(c: Config, model: ModelShape, memory: float) -> float:
    """Tokens whose keys and values an engine has room for."""
    each = model.kv_bytes_per_token(WIDTH[c.rollout.dtype])
    whole = max(model.key_width // max(model.head_dim, 1), 1)
    split = min(c.rollout.tensor_parallel, whole)  # a head of keys is not cut
    on_cpu = c.cluster.device == "cpu"
    return (
        split / each * (c.rollout.kv_cache_mb * MIB if on_cpu else max(engine_parts(c, model, memory)["KV cache"], 0.0))
    )


def reference_memory(c: Config, model: ModelShape, lengths: SequenceLengths) -> ProcessMemory:
    t = c.trainer
    tokens, scored = worst_case_pack(c, lengths, t.prompts_per_step * t.samples_per_prompt, 1)
    held: Parts = {"weights": WIDTH[c.policy.dtype] * float(model.parameters)}
    work = forward_parts(c, model, tokens, scored, lengths, False, True)
    base: Parts = {"fixed": import_mib(c, "reference") * MIB}
    if c.cluster.device == "gpu" and c.reference.gpus:
        on_gpu: Parts = {"fixed": CUDA_CONTEXT}
        moments = dict.fromkeys(MOMENTS[1:], add_parts(held, on_gpu))
        return ProcessMemory(
            "reference", 1, {"load": add_parts(held, base)}, moments | {"score": add_parts(held, work, on_gpu)}
        )
    return ProcessMemory("reference", 1, host={"score": add_parts(held, work, base), "load": add_parts(held, base)})


def reward_model_memory(
    c: Config, options: dict[str, Any], model: ModelShape | None, lengths: SequenceLengths
) -> ProcessMemory:
    """Judges while samples come, which is at any moment. Where its shape is not known, only what is there without it counts."""
    fixed: Parts = {"fixed": float(REWARD_MODEL_IMPORT_MIB * MIB)}
    on_gpu = bool(options.get("gpus"))
    held: Parts = {}
    work: Parts = {}
    if model:
        width, batch = WIDTH[options.get("dtype", "float32")], options.get("batch", 16)
        limits = (options.get("max_tokens"), model.context, lengths.prompt + lengths.completion)
        longest = min(tokens for tokens in limits if tokens)
        held = {"weights": float(width * replace(model, tied=True).parameters)}  # a score in place of logits
        mask = batch * longest**2 * (1.0 + width * on_gpu)  # of a padded batch; on a GPU also as what is added
        padded = transient_bytes(width, model, batch * longest, False) * (1.0 if on_gpu else MALLOC)
        work = {"activations": padded + mask}
    if on_gpu:
        device: Moments = {"generate": add_parts(held, work, {"fixed": CUDA_CONTEXT})}
        return ProcessMemory("reward", 1, {"load": add_parts(held, fixed), "always": fixed}, device, 1)
    return ProcessMemory("reward", 1, {"load": add_parts(held, fixed), "generate": add_parts(held, work, fixed)})


def memory_by_role(
    c: Config,
    model: ModelShape,
    lengths: SequenceLengths,
    memory: float = 0.0,
    scorers: Mapping[str, ModelShape] | None = None,
) -> dict[str, ProcessMemory]:
    """By role; of the policy, rank 0 apart, and reward models by the names of their workers. `memory` of a GPU, bytes.
    `scorers` are the reward models whose shapes are known, by their paths.
    """
    found = {
        "rollout": engine_memory(c, model, lengths, memory),
        "policy-0": learner_memory(c, model, "policy", c.policy.ranks, lengths, True, True),
    }
    if c.policy.ranks > 1:
        found["policy"] = learner_memory(c, model, "policy", c.policy.ranks, lengths, False, True)
    if c.algorithm.advantage == "gae":
        found["critic"] = learner_memory(c, model, "critic", c.critic.ranks, lengths, True, False)
    if c.reference.kl_coef > 0:
        found["reference"] = reference_memory(c, model, lengths)
    for number, service in enumerate(reward_services(c)):
        if options := service.model_options:
            scorer = (scorers or {}).get(options.get("path", ""))
            found[worker_name(number, 0)] = reward_model_memory(c, options, scorer, lengths)
        else:
            fixed = {"always": {"fixed": float(IMPORT_MIB["reward"] * MIB)}}
            found["reward"] = ProcessMemory("reward", service.workers, host=fixed)
    found["driver"] = ProcessMemory("driver", 1, host={"always": {"fixed": float(IMPORT_MIB["driver"] * MIB)}})
    return found


# --- on disk ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskSpace:
    """Bytes."""

    weights: float
    optimizer: float
    critic: float
    checkpoints: int  # checkpoints at a time, the one that is being written with them

    @property
    def checkpoint(self) -> float:
        return self.weights + self.optimizer + self.critic

    @property
    def run(self) -> float:
        return self.checkpoint * self.checkpoints


def disk_space(c: Config, model: ModelShape) -> DiskSpace:
    """fp32 weights are written apart from the model's where it is bfloat16."""
    p, width = model.parameters, WIDTH[c.policy.dtype]
    weights, optimizer = float(width * p), float(p * (8 + 4 * (width == 2)))
    written = 1 + (c.trainer.steps - 1) // c.checkpoint.every if c.checkpoint.every else 1
    most = c.checkpoint.keep_last + bool(c.checkpoint.keep_best) + 1  # an old one goes when the new one is in place
    kept = min(written, most) if c.checkpoint.keep_last else written
    with_critic = c.algorithm.advantage == "gae"
    return DiskSpace(weights, optimizer, (weights + optimizer) * with_critic, kept)
