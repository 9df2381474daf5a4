"""Finds out whether vLLM's attention on this CPU gives a token the same bits however its sequence was computed.

The kernel reads at a time the keys that fit into a core's cache together with the queries. It sums a short sequence
in one block. The order of a longer sum may depend on whether the sequence is a whole prompt, follows a cached prefix or
is computed token by token, and with several threads also on the other sequences.
"""

from typing import Any

import torch
from torch import Tensor

MIN_TOKENS, MAX_TOKENS = 128, 4096  # lengths that are tried; the longest takes half a second
SUFFIX_TOKENS = 40  # computed behind a cached prefix


class AttentionProbe:
    """Runs one group of attention heads that share keys, on random numbers."""

    def __init__(self, heads: int, head_size: int, dtype: torch.dtype, block_size: int):
        self.heads, self.head_size, self.dtype, self.block_size = heads, head_size, dtype, block_size

    def depends_on_history(self, tokens: int) -> bool:
        """Returns whether the result for a sequence of this length depends on how, or with which others, it is computed."""
        suffix = min(SUFFIX_TOKENS, tokens)
        whole = self.run_attention([(tokens, tokens)])
        behind_prefix = self.run_attention([(tokens, suffix)])
        last = self.run_attention([(tokens, 1)])
        beside_others = self.run_attention([(tokens, tokens), (300, 300), (70, 1)])
        last_beside_others = self.run_attention([(tokens, 1), (50, 1), (900, 1)])
        pairs = [
            (whole[-suffix:], behind_prefix),
            (whole[-1:], last),
            (whole, beside_others),
            (last, last_beside_others),
        ]
        return any(not torch.equal(a, b) for a, b in pairs)

    def run_attention(self, sequences: list[tuple[int, int]]) -> Tensor:
        """Returns the output of the first sequence, [Q, H, D]. `sequences` are (tokens, queried tokens at the end)."""
        from vllm import _custom_ops as ops
        from vllm import envs
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(self.dtype, self.block_size, self.head_size)
        blocks = [-(-tokens // self.block_size) for tokens, _ in sequences]
        cache = torch.zeros(sum(blocks) + 1, 1, 2 * self.block_size, self.head_size, dtype=self.dtype)
        keys, values = cache.chunk(2, dim=2)
        table, queries, used = torch.zeros(len(sequences), max(blocks), dtype=torch.int32), [], 1
        for i, (tokens, queried) in enumerate(sequences):
            rng = torch.Generator().manual_seed(i)
            q, k, v = (torch.randn(tokens, n, self.head_size, generator=rng).to(self.dtype) for n in (self.heads, 1, 1))
            slots = torch.arange(tokens) + used * self.block_size
            ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa)
            table[i, : blocks[i]] = torch.arange(used, used + blocks[i])
            queries.append(q[tokens - queried :])
            used += blocks[i]
        query = torch.cat(queries)
        starts = torch.tensor([0, *(queried for _, queried in sequences)]).cumsum(0).int()
        lengths, out = torch.tensor([tokens for tokens, _ in sequences]).int(), torch.empty_like(query)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(sequences),
            num_heads=self.heads,
            num_kv_heads=1,
            head_dim=self.head_size,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=self.head_size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=schedule,
            s_aux=None,
        )
        return out[: sequences[0][1]]


def deterministic_up_to(model: Any, dtype: torch.dtype, block_size: int, longest: int) -> int:
    """Returns the tokens of the longest sequence, up to `longest`, whose result does not depend on how it was computed.

    Lengths are tried by doubling: the result is the last one before a length that does depend.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    layers = [m.impl for m in model.modules() if isinstance(getattr(m, "impl", None), CPUAttentionBackendImpl)]
    shapes = {(layer.num_heads // layer.num_kv_heads, layer.head_size) for layer in layers}
    largest = min(longest, MAX_TOKENS)
    deterministic = 0
    for tokens in [*(n for n in (MIN_TOKENS << i for i in range(6)) if n < largest), largest]:
        probes = (AttentionProbe(heads, head_size, dtype, block_size) for heads, head_size in shapes)
        if any(probe.depends_on_history(tokens) for probe in probes):
            return deterministic
        deterministic = tokens
    return longest
