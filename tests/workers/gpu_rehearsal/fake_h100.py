# ruff: noqa: E402  (what is replaced has to be replaced before other imports)
"""vLLM as on H100s: its own code for CUDA decides, and what it asks of the cards is answered here.

`python fake_h100.py configs`  prints for each configuration for GPUs what vLLM makes of its engines' arguments.
`python fake_h100.py stream`   prints the stream of a policy rank before and after it joins the engines by NCCL.
"""

import contextlib
import json
import os
import sys
import tempfile
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
COMPILED = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.cumem_allocator")
FLASH = "vllm.vllm_flash_attn"
FLASH_MODULES = ("", ".flash_attn_interface", ".layers", ".layers.rotary", ".ops", ".ops.triton", ".ops.triton.rotary")


def stand_in(name: str, package: bool = False) -> Any:
    """A module in place of one that vLLM's build for CPU does not have."""
    module: Any = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=package)
    sys.modules[name] = module
    if package:
        module.__path__ = []
        module.__getattr__ = answer_true
    return module


def answer_true(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *a, **k: True


for name in COMPILED:
    stand_in(name)
allocator = sys.modules["vllm.cumem_allocator"]
allocator.init_module = allocator.python_create_and_map = allocator.python_unmap_and_release = None  # type: ignore[attr-defined]
for suffix in FLASH_MODULES:
    stand_in(FLASH + suffix, package=True)


class Stream:
    def __init__(self, *_: Any, name: str = "another stream", **__: Any):
        self.name, self.cuda_stream = name, 1

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


import torch

CURRENT = [Stream(name="the default stream")]
torch.cuda.Stream = Stream  # type: ignore[misc, assignment]
torch.cuda.current_stream = lambda *_: CURRENT[0]  # type: ignore[assignment, return-value]
torch.cuda.set_stream = lambda stream: CURRENT.__setitem__(0, stream)  # type: ignore[assignment]
torch.cuda.current_device = lambda: 0

import vllm.platforms
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability


def as_number(capability: Any) -> int:
    return capability if isinstance(capability, int) else capability[0] * 10 + capability[1]


class H100(CudaPlatformBase):
    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> Any:
        return DeviceCapability(9, 0)

    @classmethod
    def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
        return as_number(capability) <= 90

    @classmethod
    def is_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
        return as_number(capability) == 90

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H100 80GB HBM3"

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return f"GPU-{device_id}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return int(79.1 * 2**30)

    @classmethod
    def is_fully_connected(cls, ids: list[int]) -> bool:
        return True

    @classmethod
    def device_count(cls) -> int:
        return 4

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132


vllm.platforms._current_platform = H100()
import vllm.triton_utils as triton_utils
import vllm.triton_utils.importing as importing

importing.HAS_TRITON = triton_utils.HAS_TRITON = True
import vllm._custom_ops as ops
import vllm.distributed.device_communicators.cuda_wrapper as cuda_wrapper

cuda_wrapper.CudaRTLibrary.__init__ = lambda self, *a: None
for name in dir(ops):
    if name.startswith("cutlass") and "support" in name:
        setattr(ops, name, lambda *a: True)
import vllm.config.vllm

vllm.config.vllm.HAS_TRITON = True

# hidden, intermediate, layers, heads, key heads, vocabulary, tied
SHAPES = {
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "32b": (5120, 27648, 64, 40, 8, 152064, False),
    "tiny": (128, 384, 2, 4, 4, 64, True),
}
NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings"),
)
CONFIGS = Path(__file__).parents[3] / "configs"


def model_folder(size: str) -> str:
    from transformers import AutoConfig

    folder = tempfile.mkdtemp()
    shape = dict(zip(NAMES, SHAPES[size], strict=True))
    config = {"max_position_embeddings": 32768, "architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16"}
    AutoConfig.for_model("qwen2", **shape, **config).save_pretrained(folder)
    return folder


def vllm_config(file: str, size: str, overrides: list[str]) -> dict[str, Any]:
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.abstract import Executor

    from rlsys.config.loading import load_config
    from workers.rollout.architecture import register_architecture
    from workers.rollout.engine_settings import engine_arguments
    from workers.sync import RECEIVERS

    config = load_config(CONFIGS / file, overrides)
    backend = RECEIVERS["cuda_ipc" if config.cluster.placement == "colocated" else "nccl"].backend
    settings = engine_arguments(config, model_folder(size), backend, 4096)
    register_architecture(settings["model"], False)
    v: Any = AsyncEngineArgs(**settings).create_engine_config(UsageContext.ENGINE_CONTEXT)
    return {
        "executor": Executor.get_class(v).__name__,
        "graphs": v.compilation_config.cudagraph_mode.name,
        "largest_graph": max(v.compilation_config.cudagraph_capture_sizes or [0]),
        "batched_tokens": v.scheduler_config.max_num_batched_tokens,
        "sequences": v.scheduler_config.max_num_seqs,
        "chunked_prefill": v.scheduler_config.enable_chunked_prefill,
        "asynchronous": v.scheduler_config.async_scheduling,
        "sleep": v.model_config.enable_sleep_mode,
        "transfer": v.weight_transfer_config.backend,
        "logprobs": v.model_config.logprobs_mode,
        "prefix_caching": v.cache_config.enable_prefix_caching,
        "dtype": str(v.model_config.dtype),
        "extension": v.parallel_config.worker_extension_cls,
    }


def print_configs() -> None:
    tiny = ["cluster.device=gpu", "cluster.placement=colocated", "rollout.engines=1", "policy.ranks=1"]
    cases = [(path.name, re_size(path.name), []) for path in sorted(CONFIGS.glob("*_gpu.yaml"))]
    cases += [("tiny_cpu.yaml", "tiny", tiny), ("tiny_cpu.yaml", "tiny", [*tiny, "rollout.enforce_eager=true"])]
    cases.append(("tiny_cpu.yaml", "tiny", [*tiny, "rollout.max_sequences=1003", "rollout.gpu_memory=0.3"]))
    for file, size, overrides in cases:
        print("CONFIG", json.dumps([f"{file} {len(overrides)}", vllm_config(file, size, overrides)]), flush=True)


def re_size(name: str) -> str:
    return next(size for size in SHAPES if f"_{size}_" in name)


def print_stream() -> None:
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.utils import StatelessProcessGroup

    class Library:
        def __init__(self, *_: Any):
            pass

        def ncclGetRawVersion(self) -> int:
            return 22907

        def ncclGetVersion(self) -> str:
            return "2.29.7"

        def ncclGetUniqueId(self) -> Any:
            return pynccl.ncclUniqueId()

        def ncclCommInitRank(self, *_: Any) -> int:
            return 1

        def ncclAllReduce(self, *_: Any) -> None:
            pass

    class Alone(StatelessProcessGroup):
        def __init__(self) -> None:
            self.rank, self.world_size = 0, 2

        def broadcast_obj(self, obj: Any, src: int) -> Any:
            return obj

    pynccl.NCCLLibrary = Library
    pynccl.PyNcclCommunicator.all_reduce = lambda self, tensor: tensor
    zeros = torch.zeros
    torch.zeros = lambda *a, device=None, **k: zeros(*a, **k)  # type: ignore[assignment]
    torch.accelerator.device_index = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
    StatelessProcessGroup.create = staticmethod(lambda *_: Alone())
    from workers.sync.nccl import NcclSender

    sender = NcclSender(0, 1, 1)
    before, cudnn = CURRENT[0], torch.backends.cuda.cudnn_sdp_enabled()
    sender.connect({"address": "127.0.0.1", "port": 1})
    kept = CURRENT[0] is before and torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    print("STREAM", json.dumps({"kept": kept, "available": sender.communicator.available}))


{"configs": print_configs, "stream": print_stream}[sys.argv[1]]()
