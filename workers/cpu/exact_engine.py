"""Makes vLLM compute on CPU as the trainer does, for `rollout.exact`.

Linear layers, norms and activations of both are already the same operations in the same order. Two things differ:
attention, where vLLM has its own kernel, and rotary embeddings, where vLLM's kernel rounds once less.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from rlsys.forward import exact


def use_exact_attention() -> None:
    """Patch: vLLM computes attention and rotary embedding on CPU as the trainer does. Called before the engine is built."""
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    CPUAttentionBackendImpl.do_kv_cache_update = write_kv_cache
    CPUAttentionBackendImpl.forward = exact_forward


def write_kv_cache(self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes keys and values [T, H, D] into the cache [blocks, H, block, 2 D].

    `slot_mapping` [T] counts tokens of the cache.
    """
    slots = slot_mapping[: len(key)]
    block, offset = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    kv_cache[block, :, offset] = torch.cat([key[: len(slots)], value[: len(slots)]], dim=-1)


def exact_forward(
    self: Any,
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    output: Tensor,
    output_scale: Tensor | None = None,
    output_block_scale: Tensor | None = None,
) -> Tensor:
    """Computes attention for the queries [T, H, D] of several requests end to end, into `output` of the same shape."""
    if attn_metadata is None:  # a warm-up pass of vLLM
        return output
    for rows, blocks, visible in group_requests(attn_metadata, kv_cache.shape[2]):
        (n, length), size, heads = rows.shape, self.head_size, self.num_kv_heads
        cached = kv_cache[blocks].transpose(1, 2).reshape(n * heads, -1, 2 * size)  # [n H, L, 2 D]
        keys, values = cached.split(size, dim=-1)
        q = query[rows].view(n, length, heads, -1, size).permute(0, 2, 3, 1, 4)  # [n, H, G, Q, D]
        limits = visible[:, None, None].expand(n, heads, q.shape[2], length).reshape(n * heads, -1)
        out = exact.attend(q.reshape(n * heads, -1, size), keys, values, limits, self.scale)
        output[rows] = out.view(q.shape).permute(0, 3, 1, 2, 4).reshape(n, length, -1, size)
    return output


def group_requests(metadata: Any, block_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Groups requests with equally many queries and key blocks.

    Returns for each group the rows of the query [n, Q], the blocks [n, …] and the number of visible keys [n, Q].
    """
    if not hasattr(metadata, "rlsys_groups"):  # computed in the first layer, for all layers
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        by_shape = defaultdict(list)
        for i, length in enumerate(lengths):
            by_shape[starts[i + 1] - starts[i], -(-length // block_size)].append(i)
        metadata.rlsys_groups = []
        for (queries, blocks), requests in by_shape.items():
            column = torch.arange(queries)
            first = torch.tensor([starts[i] for i in requests])[:, None]
            cached = torch.tensor([lengths[i] - queries for i in requests])[:, None]
            table = metadata.block_table[requests, :blocks].long()
            metadata.rlsys_groups.append((first + column, table, cached + column + 1))
    return metadata.rlsys_groups
