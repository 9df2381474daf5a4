# ruff: noqa: E402  (the environment is set before DeepSpeed is imported)
"""Counts the GPU memory of a rank's update: our forward and backward pass and DeepSpeed's step, on tensors without data.

torch counts live storages (`MemTracker`), and describes what FlashAttention allocates. DeepSpeed takes its branches for
CUDA (`fake_accelerator`). Collectives return at once. Tensors lie "on CPU", which changes no size.

    python counted_update.py CASE…      each in JSON; prints a line of bytes for each
"""

import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from counted_case import RANKS, SAMPLES, CountedCase

os.environ |= {"DS_ACCELERATOR": "cuda"}
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

from rlsys.config.derived import logprob_chunk
from rlsys.config.schema import ClusterConfig, Config
from workers.learner.zero import ZeroEngine, import_deepspeed

import_deepspeed(Config(cluster=ClusterConfig(device="gpu")), RANKS)

import deepspeed
import fake_accelerator  # noqa: F401
import fake_layout
import numpy as np
import torch
from deepspeed.runtime.zero import partitioned_param_coordinator
from fakes import make_batch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlsys.batching.packing import pack
from rlsys.forward import attention, flex
from rlsys.forward.logprob_head import ChunkedLogprobs
from rlsys.forward.logprobs import PackedLogprobs
from rlsys.types import Columns, Pack
from workers.learner.objective import Objective

CPU = torch.device("cpu")


class NoModules(ModTracker):
    """MemTracker follows modules for a table that we do not need, and would let each run only once."""

    def __enter__(self) -> "NoModules":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class Memory(MemTracker):
    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = NoModules()
        self.peaks: list[int] = []

    def held(self) -> int:
        return self.get_tracker_snapshot("current")[CPU]["Total"]

    def peak(self) -> int:
        """The most that was held since the last call."""
        self.peaks.append(self.get_tracker_snapshot("peak")[CPU]["Total"])
        self._peak_mem.clear()
        return self.peaks[-1]


class Zeros(TorchDispatchMode):
    """A number that is read from a tensor without data is 0."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).startswith("aten._local_scalar_dense"):
            return 0.0 if args[0].is_floating_point() else 0
        return function(*args, **(kwargs or {}))


class CountedEngine(ZeroEngine):
    memory: Memory

    def allow_or_skip_step(self, bad: Any) -> float:
        """The passes are over, and DeepSpeed's step has not begun."""
        self.memory.peak()
        return super().allow_or_skip_step(bad)

    def weights(self) -> int:
        return storage_bytes(getattr(p, "ds_tensor", p) for p in self.engine.module.parameters())

    def optimizer_state(self) -> int:
        flat = self.state.flat_tensors()
        moments = [tensor for state in self.adam.state.values() for tensor in state.values()]
        return storage_bytes([*flat, *moments])


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def make_packs(case: CountedCase) -> list[Pack]:
    prompt, completion = case.lengths
    batch = make_batch([0.0] * 16, [i // 8 for i in range(16)], [completion] * 16, [prompt] * 2)
    tokens = int(batch.lengths.sum())
    columns, weights = Columns(advantages=np.zeros(tokens, np.float32)), np.full(tokens, 1 / tokens, np.float32)
    [packs] = pack(batch, range(16), ranks=1, tokens_per_pack=case.tokens, columns=columns, weights=weights)
    assert len(packs) == 2 * SAMPLES // case.samples
    return packs[:2]


def build_model(case: CountedCase) -> PackedLogprobs:
    s, policy = case.shape, case.config.policy
    config = AutoConfig.for_model(
        s.family, vocab_size=s.vocabulary, hidden_size=s.hidden, intermediate_size=s.intermediate,
        num_hidden_layers=s.layers, num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim,
        tie_word_embeddings=s.tied, **special(case),
    )  # fmt: skip
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention.PACKED_ATTENTION)
    if case.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": case.zero_stage == 3, "preserve_rng_state": False})
    return PackedLogprobs(lm, chunk=logprob_chunk(s.vocabulary), float32_head=policy.head_dtype == "float32")


class DescribedFlex(torch.autograd.Function):
    """What FlexAttention allocates and keeps. `MemTracker` does not take its operator."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        query, key, value, _, lse = ctx.saved_tensors
        _ = torch.empty_like(lse)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def describe_flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
    out: torch.Tensor = DescribedFlex.apply(query, key, value)
    return out


def special(case: CountedCase) -> dict[str, Any]:
    """What the model does in attention beside what its shape says."""
    names = ("sliding_window", "attn_logit_softcapping")
    return {name: case.settings[name] for name in names if name in case.settings}


def count(case: CountedCase) -> dict[str, int]:
    packs, memory = make_packs(case), Memory()
    before_head, at_head, head_kept, after_forward = [], [], [], []

    def head_forward(*arguments: Any) -> Any:
        memory.peak()
        before_head.append(memory.held())
        outputs = real_head_forward(*arguments)
        at_head.append(memory.peak())
        states = arguments[1]  # are not kept with the gradients, but were there while they were computed
        head_kept.append(memory.held() - before_head[-1] - states.numel() * torch.bfloat16.itemsize)
        return outputs

    def pack_loss(pack: Pack, output: Any) -> Any:
        after_forward.append(memory.held() - head_kept[-1])
        return objective(pack, output)

    ChunkedLogprobs.forward = staticmethod(head_forward)  # type: ignore[method-assign]
    with FakeTensorMode(allow_non_fake_inputs=True), Zeros():
        model = build_model(case)
        memory.track_external(model)
        with memory:
            engine, objective = CountedEngine(model, case.config.policy, lr=1e-6), Objective(case.config, CPU)
            engine.memory = memory
            objective.start_minibatch(kl_coef=0.0)
            state = {"weights": engine.weights(), "optimizer": engine.optimizer_state(), "held": memory.held()}
            memory.peak()
            memory.peaks.clear()
            engine.minimize(packs, pack_loss, 1e-6, objective.slopes)
            assert engine.adam.stepped
            return state | {
                "activations": after_forward[0] - state["held"],
                "between packs": after_forward[1] - after_forward[0],
                "logits": at_head[1] - before_head[1],
                "passes": max(memory.peaks),
                "step": memory.peak(),
            }


real_head_forward = ChunkedLogprobs.forward
fake_layout.install("cpu")
attention.can_flash = lambda *_: True  # type: ignore[assignment]  # as on a GPU in bfloat16
attention.can_flex = lambda *_: True  # type: ignore[assignment]
flex.flex_attention = describe_flex
torch.nn.Module._apply = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]  # all is where it belongs
partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _: None  # there are no other ranks
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
deepspeed.init_distributed(dist_backend="fake", verbose=False)
for argument in sys.argv[1:]:
    print("CASE", json.dumps([argument, count(CountedCase(**json.loads(argument)))]), flush=True)
