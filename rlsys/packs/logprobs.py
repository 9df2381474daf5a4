"""The one forward pass: policy, old and reference log-probs all come from `PackedLogprobs`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlsys.packs import exact
from rlsys.packs.attention import target_hidden_states
from rlsys.types import Pack

EXCLUDED = -1e30  # the logit of a token that is not sampled; its probability is exactly 0


class PackedLogprobs(nn.Module):
    """A causal language model that returns the log-probs of given tokens instead of logits.

    Among the first `min_new_tokens` of a completion there are no `end_ids`, as in the engines.
    """

    lm: Any  # the Hugging Face model

    def __init__(
        self,
        lm: Any,
        *,
        temperature: float = 1.0,
        chunk: int = 1024,
        min_new_tokens: int = 0,
        end_ids: Sequence[int] = (),
    ):
        super().__init__()
        self.min_new_tokens = min_new_tokens
        head = lm.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ValueError(
                f"{type(lm).__name__}: the output layer must be a linear layer without bias; it is {head}."
            )
        head.linear = exact.linear if isinstance(head, exact.ExactLinear) else F.linear
        head.__class__ = LogprobHead
        head.temperature, head.chunk, head.end_ids = temperature, chunk, list(end_ids)
        self.lm = lm

    def forward(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Log-probs [K] of a pack's targets, and entropies [K] of their distributions ([0] while gradients are off)."""
        device = next(self.lm.parameters()).device
        hidden = target_hidden_states(self.lm.get_decoder(), pack, device)
        targets = torch.tensor(pack.targets, dtype=torch.long, device=device)
        early = torch.tensor(pack.places < self.min_new_tokens, device=device) if self.min_new_tokens else None
        return self.lm.get_output_embeddings()(hidden, targets, early)


class LogprobHead(nn.Linear):
    """An lm_head that is given the targets: [K, D], [K] -> log-probs [K], entropies [K].

    `early` [K] marks targets that may not be one of `end_ids`.

    Entropies are [0] while gradients are off, because scores do not need them. One call covers all chunks: ZeRO-3
    gathers the weight once, and all ranks take part equally often.
    """

    temperature: float
    chunk: int
    end_ids: list[int]
    linear: Callable[[Tensor, Tensor], Tensor]

    def forward(self, hidden: Tensor, targets: Tensor, early: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        with_entropy = torch.is_grad_enabled()
        excluded = None if early is None else (early, self.end_ids)
        return ChunkedLogprobs.apply(
            hidden, self.weight, targets, self.temperature, self.chunk, self.linear, with_entropy, excluded
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
        excluded: tuple[Tensor, list[int]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk, ctx.linear, ctx.excluded = temperature, chunk, linear, excluded
        logprobs, entropies = [], [hidden.new_zeros(0, dtype=torch.float32)]
        for start in range(0, max(len(hidden), 1), chunk):
            part = slice(start, start + chunk)
            t = targets[part]
            log_p = exclude(linear(hidden[part], weight).float() / temperature, excluded, part).log_softmax(-1)
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
            log_p = exclude(ctx.linear(h, weight).float() / ctx.temperature, ctx.excluded, part).log_softmax(-1)
            p = log_p.exp()
            grad_logits = -g * p
            grad_logits.scatter_add_(-1, t[:, None], g)
            if grad_entropy is not None:
                grad_logits -= grad_entropy[part, None] * p * (log_p + entropy[part, None])
            grad_logits = (grad_logits / ctx.temperature).to(h.dtype)
            grad_hidden[part] = grad_logits @ weight
            grad_weight += (grad_logits.t() @ h).float()
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


def exclude(logits: Tensor, excluded: tuple[Tensor, list[int]] | None, part: slice) -> Tensor:
    """Leaves tokens out of the distribution at the marked positions.  [chunk, V] -> [chunk, V]"""
    if excluded is None:
        return logits
    early, ids = excluded
    unsampled = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    unsampled[ids] = True
    return logits.masked_fill(early[part, None] & unsampled, EXCLUDED)
