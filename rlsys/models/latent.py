"""Latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are computed from a few numbers of each token."""

from dataclasses import dataclass
from typing import Any

from rlsys.models.matrices import Matrix


@dataclass(frozen=True)
class LatentAttention:
    """Sizes as in a config.json of DeepSeek-V3.

    LatentAttention(query_rank=1536, rank=512, plain=128, rotary=64, value=128)
    """

    query_rank: int  # 0: queries are computed from the hidden states at once
    rank: int
    plain: int  # numbers of a query or key without position
    rotary: int  # and with
    value: int

    @property
    def head_dim(self) -> int:
        return self.plain + self.rotary

    @property
    def cached(self) -> int:
        """Numbers of a token that an engine keeps in a layer, for all heads together."""
        return self.rank + self.rotary

    @property
    def norms(self) -> int:
        return self.query_rank + self.rank

    def matrices(self, hidden: int, heads: int, layers: int) -> list[Matrix]:
        queries, values = heads * self.head_dim, heads * self.value
        if self.query_rank:
            query = [
                Matrix("q_a_proj", hidden, self.query_rank, layers),
                Matrix("q_b_proj", self.query_rank, queries, layers),
            ]
        else:
            query = [Matrix("q_proj", hidden, queries, layers)]
        return [
            *query,
            Matrix("kv_a_proj_with_mqa", hidden, self.cached, layers),
            Matrix("kv_b_proj", self.rank, heads * self.plain + values, layers),
            Matrix("o_proj", values, hidden, layers),
        ]


def parse_latent(s: dict[str, Any]) -> LatentAttention | None:
    if not s.get("kv_lora_rank"):
        return None
    return LatentAttention(
        int(s.get("q_lora_rank") or 0),
        int(s["kv_lora_rank"]),
        int(s["qk_nope_head_dim"]),
        int(s["qk_rope_head_dim"]),
        int(s["v_head_dim"]),
    )
