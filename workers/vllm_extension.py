"""What is added to vLLM's worker. vLLM imports this module in the worker's process before it loads the model."""

from typing import Any

from workers.sync import host_memory


def keep_weights_plain() -> None:
    """On CPU, vLLM repacks linear weights into private buffers and drops the originals, and a tied head's copy is missed when
    weights are reloaded. Plain weights are loaded in place, can be fingerprinted, and multiply as the trainer's do.
    """
    import torch
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


class WorkerExtension:
    """Methods reachable through `collective_rpc`."""

    def rlsys_fingerprint(self) -> int:
        """Of the parameters this worker computes with. Shards of a tensor-parallel engine add up; copies count once."""
        from vllm.distributed import get_tensor_model_parallel_rank

        from rlsys.fingerprint import fingerprint

        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        seen: dict[int, Any] = {}
        for parameter in model.parameters():
            sharded = hasattr(parameter, "output_dim") or hasattr(parameter, "input_dim")
            if sharded or get_tensor_model_parallel_rank() == 0:
                seen.setdefault(parameter.data_ptr(), parameter)
        return fingerprint(seen.values())


def _prepare() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        keep_weights_plain()
    host_memory.register()


_prepare()
