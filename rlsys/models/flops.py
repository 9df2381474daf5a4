"""Counts the floating-point operations of a step from the model's sizes and the samples' lengths.

A multiply-add counts as two. Counted is the least work that any implementation needs: a prompt once per group,
attention to earlier tokens only, the output layer only where a token is drawn or scored. Repeated work (padding,
recomputed activations, a prompt computed for each sample) adds nothing. So this count over the time and the machine's
peak is the share of the machine that was put to use.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class FlopCounter:
    """The sizes of a decoder that decide its work. Qwen2.5-0.5B:

    FlopCounter(layers=24, hidden=896, heads=14, kv_heads=2, head_dim=64, intermediate=4864, vocabulary=151936)
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of all MLPs together that a token passes in a layer
    vocabulary: int

    @property
    def flops_per_token(self) -> float:
        """The work of one token in all layers, without the products of queries, keys and values in attention."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return 2.0 * self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def flops_per_pair(self) -> float:
        """The work of one pair of query and key in all layers, values included."""
        return 4.0 * self.layers * self.heads * self.head_dim

    def forward_flops(self, begin: int, end: int, outputs: int) -> float:
        """The work of the tokens at positions begin … end - 1 of a sequence, with logits for `outputs` of them."""
        pairs = (end * (end + 1) - begin * (begin + 1)) / 2  # each token sees itself and all before it
        logits = 2.0 * self.hidden * self.vocabulary * outputs
        return (end - begin) * self.flops_per_token + pairs * self.flops_per_pair + logits

    def group_flops(self, prompt: int, completions: list[int]) -> float:
        """The work to draw or score the completions of one prompt. Their last tokens are never inputs."""
        work = self.forward_flops(0, prompt, 1)
        return work + sum(self.forward_flops(prompt, prompt + n - 1, n - 1) for n in completions if n)
