"""What each layer of a model mixes tokens by: `full_attention`, `sliding_attention` or the name of a mixer."""

from typing import Any

Settings = dict[str, Any]  # of a config.json
FULL, WINDOWED = "full_attention", "sliding_attention"


def all_full(s: Settings) -> list[str]:
    return [FULL] * int(s["num_hidden_layers"])


def all_mixers(s: Settings) -> list[str]:
    return ["linear_attention"] * int(s["num_hidden_layers"])


def one_in_full(period: int, s: Settings) -> list[str]:
    return every_nth_full(s, int(s.get("sliding_window_pattern") or period), WINDOWED)


def one_with_attention(period: int, s: Settings) -> list[str]:
    return every_nth_full(s, int(s.get("full_attention_interval") or period), "linear_attention")


def every_nth_full(s: Settings, period: int, others: str) -> list[str]:
    return [FULL if (i + 1) % period == 0 else others for i in range(int(s["num_hidden_layers"]))]


def listed_in_full(s: Settings) -> list[str]:
    full = s.get("full_attn_idxs")
    return [FULL if full is None or i in full else "conv" for i in range(int(s["num_hidden_layers"]))]


def windowed_from_layer(s: Settings) -> list[str]:
    first = int(s.get("max_window_layers", 28))
    return [FULL if i < first else WINDOWED for i in range(int(s["num_hidden_layers"]))]


def is_attention(kind: str) -> bool:
    return kind in (FULL, WINDOWED, "attention")
