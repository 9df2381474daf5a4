"""What is added to vLLM's worker. vLLM imports this module in the worker's process before it loads the model."""

import threading
from typing import Any

import torch._dynamo.config as dynamo

from workers.cpu.linear import linear_for
from workers.sync.layout import ManifestEntry
from workers.sync.parameter_map import ParameterMap
from workers.sync.verify import DeviceFingerprints
from workers.sync.vllm_backend import register_backend


def keep_weights_plain() -> None:
    """On CPU, vLLM repacks linear weights into private buffers and drops the originals, and a tied head's copy is missed when
    weights are reloaded. Plain weights are loaded in place and can be fingerprinted.
    """
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear_for(layer.weight)

    utils.dispatch_cpu_unquantized_gemm = plain


def keep_nothing_for_progress_bars() -> None:
    """For several processes tqdm takes a semaphore with a name, which is left in /dev/shm if its process is killed."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    tqdm.set_lock(threading.RLock())


def call_attention_directly() -> None:
    """On CPU, and not by way of custom operators, which hide it from a compiler, where there is none."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.opaque_attention_op = classmethod(lambda cls: not dynamo.disable)


class WorkerExtension:
    """Methods reachable through `collective_rpc`."""

    def rlsys_rows_matter(self) -> list[str]:
        """Matrices whose product with a token depends, on this machine, on the other tokens of the batch."""
        from rlsys.packs.exact import depends_on_batch

        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        alike = {p.shape: (name, p) for name, p in model.named_parameters() if p.dim() == 2}
        return [name for name, p in alike.values() if depends_on_batch(p.detach(), product=linear_for(p))]

    def rlsys_alike_up_to(self, longest: int) -> int:
        """Tokens of the longest sequence, up to `longest`, whose attention on this machine's CPU is the same however it was computed."""
        from workers.cpu.attention import deterministic_up_to

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        return deterministic_up_to(runner.get_model(), runner.dtype, runner.cache_config.block_size, longest)

    def rlsys_chart(self, manifest: list[ManifestEntry], shards: int, by_position: bool) -> list[str]:
        """Finds the policy's tensors among this worker's parameters. Returns those that have no place of their own there."""
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        self.rlsys_found = ParameterMap(
            self.model_runner.get_model(),  # type: ignore[attr-defined]
            manifest,
            get_tensor_model_parallel_rank(),
            get_tensor_model_parallel_world_size(),
            by_position=by_position,
            shards=shards,
        )
        return self.rlsys_found.unmapped_tensors

    def rlsys_prove(self) -> DeviceFingerprints:
        """Fingerprints of the parameters this worker computes with."""
        return self.rlsys_found.fingerprints()


def _prepare() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        keep_weights_plain()
        call_attention_directly()
    register_backend()
    keep_nothing_for_progress_bars()


_prepare()
