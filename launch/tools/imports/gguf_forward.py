"""The plain computation of a GGUF file's model, from its own keys and tensors. It shares nothing with what was imported.

It follows llama.cpp's graphs of llama, qwen2, qwen3, gemma2 and gemma3: no cache, no batch, one sequence.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Read = Callable[[str], Tensor]


def file_logprobs(
    facts: dict[str, Any], read: Read, names: set[str], ids: Tensor, positions: Tensor, last: int
) -> Tensor:
    """Log-probs after each of the last tokens.  [T], [T] -> [last, V]"""
    kind = facts["general.architecture"]
    key = {name.removeprefix(f"{kind}."): value for name, value in facts.items()}
    is_gemma = kind.startswith("gemma")
    embeddings = read("token_embd.weight")
    x = embeddings[ids]
    if is_gemma:
        x = x * math.sqrt(key["embedding_length"])
    for i in range(key["block_count"]):
        tensor = LayerTensors(read, names, i)
        attended = attend(key, kind, tensor, i, norm(key, x, tensor["attn_norm.weight"]), positions)
        if is_gemma:
            attended = norm(key, attended, tensor["post_attention_norm.weight"])
        x = x + attended
        fed = feed(tensor, norm(key, x, tensor["ffn_norm.weight"]), is_gemma)
        if is_gemma:
            fed = norm(key, fed, tensor["post_ffw_norm.weight"])
        x = x + fed
    x = norm(key, x[-last:], read("output_norm.weight"))
    logits = x @ (read("output.weight") if "output.weight" in names else embeddings).T
    if kind == "gemma2":
        logits = soft_cap(logits, key.get("final_logit_softcapping", 30.0))
    return logits.log_softmax(-1)


class LayerTensors:
    """Tensors of one layer, by the part of their name after the layer's."""

    def __init__(self, read: Read, names: set[str], layer: int) -> None:
        self.read, self.names, self.prefix = read, names, f"blk.{layer}."

    def __getitem__(self, name: str) -> Tensor:
        return self.read(self.prefix + name)

    def project(self, name: str, x: Tensor) -> Tensor:
        y = x @ self[f"{name}.weight"].T
        return y + self[f"{name}.bias"] if f"{self.prefix}{name}.bias" in self.names else y


def norm(key: dict[str, Any], x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + key["attention.layer_norm_rms_epsilon"]).rsqrt() * weight


def feed(tensor: LayerTensors, x: Tensor, is_gemma: bool) -> Tensor:
    gate = tensor.project("ffn_gate", x)
    gate = torch.nn.functional.gelu(gate, approximate="tanh") if is_gemma else torch.nn.functional.silu(gate)
    return tensor.project("ffn_down", gate * tensor.project("ffn_up", x))


def attend(key: dict[str, Any], kind: str, tensor: LayerTensors, i: int, x: Tensor, positions: Tensor) -> Tensor:
    count, heads = len(x), key["attention.head_count"]
    shared = key.get("attention.head_count_kv", heads)
    size = key.get("attention.key_length", key["embedding_length"] // heads)
    window = window_of(key, kind, i)
    q, k, v = (
        tensor.project(f"attn_{name}", x).view(count, n, size).transpose(0, 1)
        for name, n in (("q", heads), ("k", shared), ("v", shared))
    )
    if f"{tensor.prefix}attn_q_norm.weight" in tensor.names:
        q, k = norm(key, q, tensor["attn_q_norm.weight"]), norm(key, k, tensor["attn_k_norm.weight"])
    divisors = tensor.read("rope_freqs.weight") if "rope_freqs.weight" in tensor.names else torch.ones(size // 2)
    cos, sin = turns(key, kind, size, positions, divisors, window > 0)
    q, k = (turn(each, cos, sin, neighbors=kind == "llama") for each in (q, k))
    k, v = (each.repeat_interleave(heads // shared, 0) for each in (k, v))
    scores = q @ k.transpose(1, 2) * attention_scale(key, kind, size)
    if kind == "gemma2":
        scores = soft_cap(scores, key.get("attn_logit_softcapping", 50.0))
    distance = torch.arange(count)[:, None] - torch.arange(count)[None]
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    return tensor.project("attn_output", mixed.transpose(0, 1).reshape(count, heads * size))


def attention_scale(key: dict[str, Any], kind: str, size: int) -> float:
    if (kind, key["block_count"]) in (("gemma2", 46), ("gemma3", 62)):  # the models of 27 billion parameters
        size = key["embedding_length"] // key["attention.head_count"]
    return 1 / math.sqrt(size)


def window_of(key: dict[str, Any], kind: str, i: int) -> int:
    """The number of tokens that layer i sees, or 0 for all."""
    if kind not in ("gemma2", "gemma3"):
        return 0
    pattern = key.get("attention.sliding_window_pattern", 2 if kind == "gemma2" else 6)
    slides = pattern[i] if isinstance(pattern, list) else i % pattern < pattern - 1
    return int(key.get("attention.sliding_window", 4096 if kind == "gemma2" else 0)) if slides else 0


def turns(
    key: dict[str, Any], kind: str, size: int, positions: Tensor, divisors: Tensor, is_local: bool
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each pair's angle.  -> [T, size / 2], [T, size / 2]"""
    base, factor = key.get("rope.freq_base", 10000.0), key.get("rope.scaling.factor", 1.0)
    scaling = key.get("rope.scaling.type", "linear")
    if kind == "gemma3" and is_local:
        base, factor, scaling = key.get("rope.freq_base_swa", 10000.0), 1.0, "none"
    frequencies = 1 / base ** (torch.arange(0, size, 2).float() / size) / divisors
    length = 1.0
    if scaling == "yarn":
        # Pairs that turn often in the original context keep their frequency; slow ones are stretched by the factor.
        original = key.get("rope.scaling.original_context_length", key["context_length"])
        fast, slow = key.get("rope.scaling.yarn_beta_fast", 32.0), key.get("rope.scaling.yarn_beta_slow", 1.0)
        first, final = (size * math.log(original / (n * 2 * math.pi)) / (2 * math.log(base)) for n in (fast, slow))
        low, high = max(0, math.floor(first)), min(size - 1, math.ceil(final))
        kept = 1 - ((torch.arange(size // 2) - low) / max(0.001, high - low)).clamp(0, 1)
        frequencies = frequencies / factor * (1 - kept) + frequencies * kept
        length = 1 + 0.1 * math.log(factor)
    elif scaling == "linear":
        frequencies = frequencies / factor
    angles = positions[:, None].float() * frequencies
    return angles.cos() * length, angles.sin() * length


def turn(x: Tensor, cos: Tensor, sin: Tensor, neighbors: bool) -> Tensor:
    """[heads, T, size]"""
    a, b = (x[..., 0::2], x[..., 1::2]) if neighbors else x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return (x / cap).tanh() * cap
