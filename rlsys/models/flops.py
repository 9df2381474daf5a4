"""Counts the floating-point operations of a step from the model's sizes and the samples' lengths.

A multiply-add counts as two. Counted is the least work that any implementation needs: a prompt once per group,
attention to earlier tokens only, the output layer only where a token is drawn or scored. Repeated work (padding,
recomputed activations, a prompt computed for each sample) adds nothing. So this count over the time and the machine's
peak is the share of the machine that was put to use.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class FlopCounter:
    """The work of a decoder, in floating-point operations. `ModelShape.flop_counter` derives it from the sizes."""

    flops_per_token: float  # in all layers, without the products of queries, keys and values in attention
    flops_per_pair: float  # of query and key in all layers that see all tokens, values included
    flops_per_output: float  # of the logits of a token
    flops_per_pair_in_window: float = 0.0  # in all layers with a sliding window
    window: int = 0  # tokens that such a layer sees

    def forward_flops(self, begin: int, end: int, outputs: int) -> float:
        """Returns the work of the tokens at positions begin … end - 1 of a sequence, with logits for `outputs` of them."""
        pairs = (end * (end + 1) - begin * (begin + 1)) / 2  # each token sees itself and all before it
        attention = pairs * self.flops_per_pair
        if self.window:
            attention += (self.pairs_in_window(end) - self.pairs_in_window(begin)) * self.flops_per_pair_in_window
        return (end - begin) * self.flops_per_token + attention + self.flops_per_output * outputs

    def pairs_in_window(self, tokens: int) -> float:
        """Returns how many pairs the first tokens of a sequence see in a layer with a window."""
        near = min(tokens, self.window)
        return near * (near + 1) / 2 + (tokens - near) * self.window

    def group_flops(self, prompt: int, completions: list[int]) -> float:
        """Returns the work to draw or score the completions of one prompt. Their last tokens are never inputs."""
        work = self.forward_flops(0, prompt, 1)
        return work + sum(self.forward_flops(prompt, prompt + n - 1, n - 1) for n in completions if n)
