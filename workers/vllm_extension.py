"""What is added to vLLM's worker. vLLM imports this module in the worker's process before it loads the model."""

from typing import Any

import torch
import torch._dynamo.config as dynamo
from torch import Tensor

from workers.proof import Answer, Chart, Manifest
from workers.sync import host_memory

# What a compiler does not look into, as it depends on the number of rows.
LIBRARY = torch.library.Library("rlsys", "FRAGMENT")


def keep_weights_plain() -> None:
    """On CPU, vLLM repacks linear weights into private buffers and drops the originals, and a tied head's copy is missed when
    weights are reloaded. Plain weights are loaded in place, can be fingerprinted, and multiply as the trainer's do.
    """
    from vllm.model_executor.layers import utils

    from rlsys import exact

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = exact.linear if dynamo.disable else torch.ops.rlsys.linear.default

    LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    LIBRARY.impl("linear", exact.linear, "CPU")
    torch.library.register_fake("rlsys::linear", shape_of_linear, lib=LIBRARY)
    utils.dispatch_cpu_unquantized_gemm = plain


def shape_of_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def call_attention_directly() -> None:
    """On CPU, and not by way of custom operators, which hide it from a compiler, where there is none."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.opaque_attention_op = classmethod(lambda cls: not dynamo.disable)


class WorkerExtension:
    """Methods reachable through `collective_rpc`."""

    def rlsys_rows_matter(self) -> list[str]:
        """Matrices whose product with a token depends, on this machine, on the other tokens of the batch."""
        from rlsys.exact import rows_matter

        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        alike = {p.shape: (name, p) for name, p in model.named_parameters() if p.dim() == 2}
        return [name for name, p in alike.values() if rows_matter(p.detach())]

    def rlsys_chart(self, manifest: Manifest, cut: int) -> list[str]:
        """Finds the policy's tensors among this worker's parameters. Returns those that have no place of their own there."""
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
        from vllm.platforms import current_platform

        self.rlsys_found = Chart(
            self.model_runner.get_model(),  # type: ignore[attr-defined]
            manifest,
            get_tensor_model_parallel_rank(),
            get_tensor_model_parallel_world_size(),
            by_place=not current_platform.is_cpu(),
            cut=cut,
        )
        return self.rlsys_found.lost

    def rlsys_prove(self) -> Answer:
        """Fingerprints of the parameters this worker computes with."""
        return self.rlsys_found.answer()


def _prepare() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        keep_weights_plain()
        call_attention_directly()
    host_memory.register()


_prepare()
