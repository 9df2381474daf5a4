"""vLLM on CPU, made to compute as the trainer does under `rollout.exact`. Called before the engine is built.

Linear layers, norms and activations of both are already the same operations in the same order. What differs is attention,
where vLLM has a kernel of its own, and rotary embeddings, where its kernel rounds once less.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from rlsys.packs import exact


def use_exact_attention() -> None:
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    CPUAttentionBackendImpl.do_kv_cache_update = write_kv_cache
    CPUAttentionBackendImpl.forward = exact_forward


def write_kv_cache(self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """[T, H, D] twice into a cache [blocks, H, block, 2 D]; `slot_mapping` [T] counts tokens of the cache."""
    slots = slot_mapping[: len(key)]
    block, place = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    kv_cache[block, :, place] = torch.cat([key[: len(slots)], value[: len(slots)]], dim=-1)


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
    """[T, H, D] queries of several requests end to end -> `output`, same shape."""
    if attn_metadata is None:  # warming up
        return output
    for rows, blocks, seen in group_requests(attn_metadata, kv_cache.shape[2]):
        (n, length), size, of = rows.shape, self.head_size, self.num_kv_heads
        cached = kv_cache[blocks].transpose(1, 2).reshape(n * of, -1, 2 * size)  # [n H, L, 2 D]
        keys, values = cached.split(size, dim=-1)
        q = query[rows].view(n, length, of, -1, size).permute(0, 2, 3, 1, 4)  # [n, H, G, Q, D]
        shown = seen[:, None, None].expand(n, of, q.shape[2], length).reshape(n * of, -1)
        out = exact.attend(q.reshape(n * of, -1, size), keys, values, shown, self.scale)
        output[rows] = out.view(q.shape).permute(0, 3, 1, 2, 4).reshape(n, length, -1, size)
    return output


def group_requests(metadata: Any, block: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Requests with equally many queries and blocks of keys: rows [n, Q] of the query, blocks [n, …], keys seen [n, Q]."""
    if not hasattr(metadata, "rlsys_batches"):  # the first layer does it for all
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        alike = defaultdict(list)
        for i, length in enumerate(lengths):
            alike[starts[i + 1] - starts[i], -(-length // block)].append(i)
        metadata.rlsys_batches = []
        for (queries, blocks), requests in alike.items():
            column = torch.arange(queries)
            first = torch.tensor([starts[i] for i in requests])[:, None]
            before = torch.tensor([lengths[i] - queries for i in requests])[:, None]
            table = metadata.block_table[requests, :blocks].long()
            metadata.rlsys_batches.append((first + column, table, before + column + 1))
    return metadata.rlsys_batches
