# ruff: noqa: E402  (what is replaced has to be replaced before other imports)
"""A pack's pass forward and backward and an optimizer step on tensors "cuda" without data. Prints a line for each case.

An operation on tensors of two devices raises, as on a GPU. What would make the host wait for the device is counted.
"""

import json
import traceback
from collections import Counter
from dataclasses import replace
from typing import Any

import fake_layout
import torch
from streamed_update import Case, make_packs
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment, method-assign]

from rlsys.config.methods import CORRECTIONS, KL_ESTIMATORS, LOSSES, AlgorithmConfig, CorrectionConfig, EntropyConfig
from rlsys.config.schema import Config
from rlsys.forward import attention
from rlsys.forward.logprobs import PackedLogprobs
from workers.learner.guarded_adamw import GuardedAdamW
from workers.learner.objective import Objective

WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten._unique2", "aten.masked_select")


class CountWaits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.masks: Counter[str] = Counter()  # tensors of bool with two or more dimensions, on the device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).rpartition(".")[0]
        on_gpu = any(isinstance(a, torch.Tensor) and a.device.type == "cuda" for a in args)
        options = kwargs or {}
        to_host = on_gpu and str(options.get("device", "")) == "cpu"
        from_host = not on_gpu and "cuda" in str(options.get("device", "")) and name == "aten._to_copy"
        self.kernels[name] += on_gpu
        if (on_gpu and name in WAITS) or to_host or (from_host and not options.get("non_blocking")):
            self.waits[f"{name} in {caller()}"] += 1
        if name == "aten._local_scalar_dense" and on_gpu:
            return 1.0
        result = function(*args, **options)
        if isinstance(result, torch.Tensor) and result.is_cuda and result.dtype == torch.bool and result.dim() > 1:
            self.masks[f"{name} in {caller()}"] += 1
        return result


def caller() -> str:
    files = [f for f in traceback.extract_stack() if f.filename != __file__]
    return next((f.name for f in reversed(files) if "/rlsys/" in f.filename or "/workers/" in f.filename), "?")


fake_layout.install("cuda")


def run_case(family: str, case: Case, method: Config) -> dict[str, Any]:
    [[pack, *_], *_] = make_packs(2)
    given = dict.fromkeys(("old", "ref", "old_kl_coef"), pack.rollout)
    pack = replace(pack, columns=replace(pack.columns, **given))
    with FakeTensorMode(allow_non_fake_inputs=True), CountWaits() as count:
        config = AutoConfig.for_model(
            family, vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32,
        )  # fmt: skip
        dtype = getattr(torch, case.dtype)
        with torch.device("cuda"):
            lm = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.PACKED_ATTENTION)
        if case.gradient_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        model = PackedLogprobs(lm.train(), chunk=64)
        objective = Objective(method, torch.device("cuda"))
        objective.start_minibatch(0.1)
        count.waits.clear()
        total = objective(pack, model(pack, slopes=objective.slopes(pack, 1)))
        total.backward()
        waits = dict(count.waits)
        adam = GuardedAdamW(model.parameters(), lr=1e-3, fused=True)
        adam.create_moments(list(model.parameters()))
        adam.step()
        wrong = [n for n, p in model.named_parameters() if p.grad is None or p.grad.device.type != "cuda"]
        flash = sum(n for name, n in count.kernels.items() if "varlen" in name)
    return {"wrong": wrong, "waits": waits, "flash": flash, "masks": count.masks}


def waits_of_control() -> dict[str, Any]:
    """A copy from usual memory, a number that is read back, and a copy that does not wait."""
    with FakeTensorMode(allow_non_fake_inputs=True), CountWaits() as count:
        x = torch.ones(3).to("cuda")
        x.sum().item()
        torch.ones(3).to("cuda", non_blocking=True)
    return {"wrong": [], "waits": dict(count.waits), "flash": 0}


for family in ("qwen2", "qwen3", "llama"):
    for dtype in ("bfloat16", "float32"):
        for checkpointing in (False, True):
            case = Case(0, dtype, gradient_checkpointing=checkpointing)
            print(
                "CASE",
                json.dumps([f"{family} {dtype} {checkpointing}", run_case(family, case, Config())]),
                flush=True,
            )
METHODS = (
    {name: Config(algorithm=AlgorithmConfig(loss=name)) for name in LOSSES}
    | {name: Config(correction=CorrectionConfig(method=name)) for name in CORRECTIONS}
    | {name: Config(algorithm=AlgorithmConfig(kl=name)) for name in KL_ESTIMATORS}
    | {"rollout": Config(algorithm=AlgorithmConfig(anchor="rollout")), "bonus": Config(entropy=EntropyConfig(coef=0.1))}
)
for name, method in METHODS.items():
    try:
        result = run_case("qwen2", Case(0, "bfloat16"), method)
    except DynamicOutputShapeException:
        result = {"wrong": [], "waits": {"for a number of sequences": 1}, "flash": 0}
    print("CASE", json.dumps([name, result]), flush=True)
print("CASE", json.dumps(["control", waits_of_control()]), flush=True)
