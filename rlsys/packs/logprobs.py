"""The one forward pass: policy, old and reference log-probs all come from `PackedLogprobs`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlsys.packs import exact
from rlsys.packs.attention import target_hidden_states
from rlsys.types import Pack


class PackedLogprobs(nn.Module):
    """A causal language model that answers with log-probs of given tokens instead of logits."""

    lm: Any  # the Hugging Face model

    def __init__(self, lm: Any, *, temperature: float = 1.0, chunk: int = 1024):
        super().__init__()
        head = lm.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ValueError(
                f"{type(lm).__name__}: the output layer must be a linear layer without bias; it is {head}."
            )
        head.linear = exact.linear if isinstance(head, exact.ExactLinear) else F.linear
        head.__class__ = LogprobHead
        head.temperature, head.chunk = temperature, chunk
        self.lm = lm

    def forward(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Log-probs [K] of a pack's targets and entropies [K] of the distributions they are drawn from; none without gradients."""
        device = next(self.lm.parameters()).device
        picked = target_hidden_states(self.lm.get_decoder(), pack, device)
        return self.lm.get_output_embeddings()(picked, torch.tensor(pack.targets, dtype=torch.long, device=device))


class LogprobHead(nn.Linear):
    """An lm_head that is given the answers: [K, D], [K] -> log-probs [K], entropies [K], or [0] where gradients are off: scores
    have no use for them.

    One module call whatever the number of chunks: ZeRO-3 gathers the weight once, and all ranks take part equally often.
    """

    temperature: float
    chunk: int
    linear: Callable[[Tensor, Tensor], Tensor]

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        with_entropy = torch.is_grad_enabled()
        return ChunkedLogprobs.apply(
            hidden, self.weight, targets, self.temperature, self.chunk, self.linear, with_entropy
        )


class ChunkedLogprobs(torch.autograd.Function):
    """log_softmax(hidden weightᵀ / temperature)[targets], logits existing for `chunk` positions at a time.

    The backward pass computes them again. With p the softmax and H its entropy,
    d logprob / d logits = onehot(target) - p,  d H / d logits = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        linear: Callable[[Tensor, Tensor], Tensor] = F.linear,
        with_entropy: bool = True,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk, ctx.linear = temperature, chunk, linear
        logprobs, entropies = [], [hidden.new_zeros(0, dtype=torch.float32)]
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            whole = (linear(h, weight).float() / temperature).log_softmax(-1)  # [chunk, V]
            logprobs.append(whole.gather(-1, t[:, None])[:, 0])
            if with_entropy:
                entropies.append(-torch.linalg.vecdot(whole.exp(), whole))
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, targets, entropy = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        grad = torch.zeros_like(entropy) if grad is None else grad
        for start in range(0, len(hidden), ctx.chunk):
            where = slice(start, start + ctx.chunk)
            h, t, g = hidden[where], targets[where], grad[where, None]
            whole = (ctx.linear(h, weight).float() / ctx.temperature).log_softmax(-1)
            p = whole.exp()
            slope = -g * p
            slope.scatter_add_(-1, t[:, None], g)
            if grad_entropy is not None:
                slope -= grad_entropy[where, None] * p * (whole + entropy[where, None])
            slope = (slope / ctx.temperature).to(h.dtype)
            grad_hidden[where] = slope @ weight
            grad_weight += (slope.t() @ h).float()
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None
