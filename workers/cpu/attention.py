"""Whether vLLM's attention on CPU gives a token the same bits however its sequence came to be computed.

It takes as many keys at a time as fit into a core's cache beside the queries. A short sequence is added up in one go. A longer one may be added up in
another order as a whole prompt, behind a beginning that was there already, token by token, or, with several threads, among other sequences.
"""

from typing import Any

import torch
from torch import Tensor

MIN_TOKENS, MAX_TOKENS = 128, 4096  # tokens that are tried; half a second for the longest
SUFFIX_TOKENS = 40  # tokens behind a beginning that is there already


class AttentionProbe:
    """One group of heads that share keys, of a model's attention, on random numbers."""

    def __init__(self, heads: int, size: int, dtype: torch.dtype, block: int):
        self.heads, self.size, self.dtype, self.block = heads, size, dtype, block

    def depends_on_history(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens has no result of its own."""
        suffix = min(SUFFIX_TOKENS, tokens)
        whole = self.run_attention([(tokens, tokens)])
        behind = self.run_attention([(tokens, suffix)])
        last = self.run_attention([(tokens, 1)])
        among = self.run_attention([(tokens, tokens), (300, 300), (70, 1)])
        last_among = self.run_attention([(tokens, 1), (50, 1), (900, 1)])
        pairs = [(whole[-suffix:], behind), (whole[-1:], last), (whole, among), (last, last_among)]
        return any(not torch.equal(a, b) for a, b in pairs)

    def run_attention(self, sequences: list[tuple[int, int]]) -> Tensor:
        """Of sequences of so many tokens, of which the last so many are asked for, those of the first: [Q, H, D]."""
        from vllm import _custom_ops as ops
        from vllm import envs
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(self.dtype, self.block, self.size)
        blocks = [-(-tokens // self.block) for tokens, _ in sequences]
        cache = torch.zeros(sum(blocks) + 1, 1, 2 * self.block, self.size, dtype=self.dtype)
        keys, values = cache.chunk(2, dim=2)
        table, queries, taken = torch.zeros(len(sequences), max(blocks), dtype=torch.int32), [], 1
        for i, (tokens, asked) in enumerate(sequences):
            draw = torch.Generator().manual_seed(i)
            q, k, v = (torch.randn(tokens, n, self.size, generator=draw).to(self.dtype) for n in (self.heads, 1, 1))
            slots = torch.arange(tokens) + taken * self.block
            ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa)
            table[i, : blocks[i]] = torch.arange(taken, taken + blocks[i])
            queries.append(q[tokens - asked :])
            taken += blocks[i]
        query = torch.cat(queries)
        starts = torch.tensor([0, *(asked for _, asked in sequences)]).cumsum(0).int()
        lengths, out = torch.tensor([tokens for tokens, _ in sequences]).int(), torch.empty_like(query)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(sequences),
            num_heads=self.heads,
            num_kv_heads=1,
            head_dim=self.size,
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
            scale=self.size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )
        return out[: sequences[0][1]]


def deterministic_up_to(model: Any, dtype: torch.dtype, block: int, longest: int) -> int:
    """Tokens of the longest sequence that was tried, up to `longest`, before one that has no result of its own."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    found = [m.impl for m in model.modules() if isinstance(getattr(m, "impl", None), CPUAttentionBackendImpl)]
    kinds = {(impl.num_heads // impl.num_kv_heads, impl.head_size) for impl in found}
    lengths = [n for n in (MIN_TOKENS << i for i in range(6)) if n < min(longest, MAX_TOKENS)] + [
        min(longest, MAX_TOKENS)
    ]
    alike = 0
    for tokens in lengths:
        if any(AttentionProbe(heads, size, dtype, block).depends_on_history(tokens) for heads, size in kinds):
            return alike
        alike = tokens
    return longest
