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
    """A causal language model that returns the log-probs of given tokens instead of logits."""

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
        """Log-probs [K] of a pack's targets, and entropies [K] of their distributions ([0] while gradients are off)."""
        device = next(self.lm.parameters()).device
        hidden = target_hidden_states(self.lm.get_decoder(), pack, device)
        return self.lm.get_output_embeddings()(hidden, torch.tensor(pack.targets, dtype=torch.long, device=device))


class LogprobHead(nn.Linear):
    """An lm_head that is given the targets: [K, D], [K] -> log-probs [K], entropies [K].

    Entropies are [0] while gradients are off, because scores do not need them. One call covers all chunks: ZeRO-3
    gathers the weight once, and all ranks take part equally often.
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
    """log_softmax(hidden weightᵀ / temperature)[targets], with logits in memory for `chunk` positions at a time.

    The backward pass computes the logits again. With p the softmax and H its entropy,
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
            log_p = (linear(h, weight).float() / temperature).log_softmax(-1)  # [chunk, V]
            logprobs.append(log_p.gather(-1, t[:, None])[:, 0])
            if with_entropy:
                entropies.append(-torch.linalg.vecdot(log_p.exp(), log_p))
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        grad = torch.zeros_like(entropy) if grad is None else grad
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            h, t, g = hidden[part], targets[part], grad[part, None]
            log_p = (ctx.linear(h, weight).float() / ctx.temperature).log_softmax(-1)
            p = log_p.exp()
            grad_logits = -g * p
            grad_logits.scatter_add_(-1, t[:, None], g)
            if grad_entropy is not None:
                grad_logits -= grad_entropy[part, None] * p * (log_p + entropy[part, None])
            grad_logits = (grad_logits / ctx.temperature).to(h.dtype)
            grad_hidden[part] = grad_logits @ weight
            grad_weight += (grad_logits.t() @ h).float()
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None
