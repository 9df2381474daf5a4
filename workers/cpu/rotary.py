"""Rotary embeddings in vLLM's CPU build, whose kernel takes heads side by side: [T, H D]."""

from typing import Any

from torch import Tensor


def rotate_separate_heads() -> None:
    """Patch: queries [T, H, D], as latent attention has them, are rotated by PyTorch.

    vLLM's kernel would take the wrong numbers for theirs, without a word.
    """
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    rotate = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        return (rotate if query.dim() == 2 else type(self).forward_native)(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu
