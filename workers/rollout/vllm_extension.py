"""What is added to vLLM's worker, and patches of vLLM for CPU.

vLLM imports this module in the worker's process before it loads the model. The patches are listed in
workers/PATCHES.md.
"""

import threading
from typing import Any

import torch._dynamo.config as dynamo

from workers.cpu.linear import linear_for
from workers.cpu.rotary import rotate_separate_heads
from workers.cpu.routing import route_without_groups
from workers.cpu.sampled_logprobs import gather_sampled
from workers.sync.layout import ManifestEntry
from workers.sync.parameter_map import ParameterMap
from workers.sync.verify import DeviceFingerprints
from workers.sync.vllm_backend import name_partial_loaders, register_backends


class WorkerExtension:
    """Methods that the engine's actor calls through `collective_rpc`."""

    def rlsys_batch_dependent_matrices(self) -> list[str]:
        """Returns the matrices whose products depend, on this machine, on the other tokens of the batch."""
        from rlsys.forward.exact import depends_on_batch

        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        by_shape = {p.shape: (name, p) for name, p in model.named_parameters() if p.dim() == 2}
        return [name for name, p in by_shape.values() if depends_on_batch(p.detach(), product=linear_for(p))]

    def rlsys_deterministic_up_to(self, longest: int) -> int:
        """Returns the most tokens, up to `longest`, whose attention here does not depend on how it was computed."""
        from vllm.v1.kv_cache_interface import MambaSpec

        from workers.cpu.attention import deterministic_up_to

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        # The block of a state is a whole sequence.
        block_size = max((s.block_size for s in specs if not isinstance(s, MambaSpec)), default=0)
        return deterministic_up_to(runner.get_model(), runner.dtype, block_size, longest)

    def rlsys_map_parameters(self, manifest: list[ManifestEntry], shards: int, by_position: bool) -> list[str]:
        """Finds the policy's tensors among this worker's parameters.

        Returns those that have no region of their own there.
        """
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        self.rlsys_parameters = ParameterMap(
            self.model_runner.get_model(),  # type: ignore[attr-defined]
            manifest,
            get_tensor_model_parallel_rank(),
            get_tensor_model_parallel_world_size(),
            by_position=by_position,
            shards=shards,
        )
        return self.rlsys_parameters.unmapped_tensors

    def rlsys_fingerprints(self) -> DeviceFingerprints:
        """Returns fingerprints of the parameters this worker computes with."""
        return self.rlsys_parameters.fingerprints()


def keep_weights_plain() -> None:
    """Patch: replaces vLLM's choice of a CPU kernel for linear layers.

    vLLM's kernels repack weights into private buffers and drop the originals. A tied head's copy is then missed when
    weights are reloaded. Plain weights can be loaded in place and fingerprinted.
    """
    from vllm.model_executor.layers import utils

    def use_plain_weights(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear_for(layer.weight)

    utils.dispatch_cpu_unquantized_gemm = use_plain_weights


def call_attention_directly() -> None:
    """Patch: without a compiler, attention on CPU is called directly.

    vLLM hides it from the compiler behind a custom operator, which costs time in each layer.
    """
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.opaque_attention_op = classmethod(lambda cls: not dynamo.disable)


def prepack_reloaded_experts() -> None:
    """Patch: experts that are reloaded on CPU are padded and prepacked, as at the start.

    vLLM leaves them as they arrive, and its kernel then computes other products, without an error.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    setup = UnquantizedFusedMoEMethod._setup_kernel

    def setup_and_prepack(self: Any, layer: Any, *weights: Any, **more: Any) -> None:
        reloaded = self.moe_kernel is not None
        setup(self, layer, *weights, **more)
        if reloaded:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_and_prepack


def gather_logprobs_in_blocks() -> None:
    """Patch: the log-probs of sampled tokens are computed from logits, a few rows at a time."""
    from vllm.v1.sample.sampler import Sampler

    Sampler.gather_logprobs = staticmethod(gather_sampled)


def use_process_local_progress_lock() -> None:
    """Patch: gives tqdm a lock of this process.

    Its default is a named semaphore for several processes, which stays in /dev/shm if the process is killed.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    tqdm.set_lock(threading.RLock())


def _prepare_worker() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        keep_weights_plain()
        call_attention_directly()
        prepack_reloaded_experts()
        gather_logprobs_in_blocks()
        route_without_groups()
        rotate_separate_heads()
    register_backends()
    name_partial_loaders()
    use_process_local_progress_lock()


_prepare_worker()
