"""The one forward pass: policy, old and reference log-probs all come from `PackedLogprobs`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlsys.packs import exact
from rlsys.packs.decoder import decoder_inputs, run_decoder, to_indices
from rlsys.packs.logit_transform import UNCHANGED, LogitTransform
from rlsys.packs.transfer import to_device
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
        float32_head: bool = False,
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
        head.in_float32 = float32_head
        head.transform = LogitTransform.from_config(lm.config)
        self.lm = lm

    @property
    def decoder(self) -> Any:
        return self.lm.get_decoder()

    def forward(self, pack: Pack, plain: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs [K] of a pack's targets, and entropies [K] of their distributions ([0] while gradients are off).

        `plain`: from the logits that the model itself computes, without entropies.
        """
        device = next(self.lm.parameters()).device
        targets = to_device(pack.targets, device, torch.long)
        early = to_device(pack.places < self.min_new_tokens, device) if self.min_new_tokens else None
        if plain:
            return self.plain_logprobs(pack, targets, early), targets.new_zeros(0)
        own = run_decoder(self.decoder, pack, device)
        early = None if early is None else early[own.indices]
        logprobs, entropies = self.lm.get_output_embeddings()(own.hidden, targets[own.indices], early)
        return own.gather(logprobs), own.gather(entropies) if torch.is_grad_enabled() else entropies

    def plain_logprobs(self, pack: Pack, targets: Tensor, early: Tensor | None) -> Tensor:
        head, device = self.lm.get_output_embeddings(), targets.device
        inputs = decoder_inputs(self.decoder, pack, device)
        logits = self.lm(input_ids=inputs["input_ids"], use_cache=False).logits[0]  # positions are the model's own
        logits = logits.index_select(0, to_indices(pack.logit_positions, device)).float() / head.temperature
        excluded = None if early is None else (early, head.end_ids)
        return exclude(logits, excluded, slice(None)).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


class LogprobHead(nn.Linear):
    """An lm_head that is given the targets: [K, D], [K] -> log-probs [K], entropies [K]. Without them, logits.

    `early` [K] marks targets that may not be one of `end_ids`.

    Entropies are [0] while gradients are off, because scores do not need them. One call covers all chunks: ZeRO-3
    gathers the weight once, and all ranks take part equally often.
    """

    temperature: float
    chunk: int
    end_ids: list[int]
    in_float32: bool  # logits are computed in single precision, from hidden states and a weight of any
    linear: Callable[[Tensor, Tensor], Tensor]
    transform: LogitTransform

    def forward(self, hidden: Tensor, targets: Tensor | None = None, early: Tensor | None = None) -> Any:
        hidden, weight = self.factors(hidden)
        if targets is None:
            return self.linear(hidden, weight)
        excluded = None if early is None else (early, self.end_ids)
        options = (self.temperature, self.chunk, self.linear, torch.is_grad_enabled(), excluded, self.transform)
        return ChunkedLogprobs.apply(hidden, weight, targets, *options)

    def factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states and the weight, whose product the logits are."""
        return (hidden.float(), self.weight.float()) if self.in_float32 else (hidden, self.weight)


class ChunkedLogprobs(torch.autograd.Function):
    """log_softmax(hidden weightᵀ / temperature)[targets], with logits in memory for `chunk` positions at a time.

    Logits are the largest tensors of a pass. They are changed in place, because on a CPU new memory costs as much time
    as the arithmetic. The backward pass computes them again. With p the softmax and H its entropy,
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
        transform: LogitTransform = UNCHANGED,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk, ctx.linear = temperature, chunk, linear
        ctx.excluded, ctx.transform = excluded, transform
        logprobs, entropies = [], [hidden.new_zeros(0, dtype=torch.float32)]
        for start in range(0, max(len(hidden), 1), chunk):
            part = slice(start, start + chunk)
            t = targets[part]
            logits = divide_(transform.apply_(linear(hidden[part], weight).float()), temperature)
            log_p = log_softmax_(exclude(logits, excluded, part))
            logprobs.append(log_p.gather(-1, t[:, None])[:, 0])
            if with_entropy:
                entropies.append(-log_p.exp().mul_(log_p).sum(-1))
            del logits, log_p  # before the next ones are there
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        grad = torch.zeros_like(entropy) if grad is None else grad
        for start in range(0, max(len(hidden), 1), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            h, t, g = hidden[part], targets[part], grad[part, None]
            logits = ctx.transform.apply_(ctx.linear(h, weight).float())
            slope = ctx.transform.slope(logits)
            log_p = log_softmax_(exclude(divide_(logits, ctx.temperature), ctx.excluded, part))
            del logits
            if grad_entropy is None:
                grad_logits = log_p.exp_().mul_(-g).scatter_add_(-1, t[:, None], g)
            else:
                p = log_p.exp()
                grad_logits = (-g * p).scatter_add_(-1, t[:, None], g)
                grad_logits -= p.mul_(grad_entropy[part, None]).mul_(log_p.add_(entropy[part, None]))
                del p
            grad_logits = divide_(grad_logits, ctx.temperature)
            grad_logits = (grad_logits if slope is None else grad_logits.mul_(slope)).to(h.dtype)
            del log_p, slope
            grad_hidden[part] = grad_logits @ weight
            if ctx.needs_input_grad[1]:  # not frozen
                grad_weight = add_(grad_weight, grad_logits.t() @ h)
            del grad_logits
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
            None,
            None,
            None,
            None,
            None,
        )


def add_(total: Tensor | None, part: Tensor) -> Tensor:
    """The sum in float32. A GPU converts while it adds, and makes no copy."""
    return part.float() if total is None else total.add_(part)


def divide_(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits.div_(temperature)


def log_softmax_(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1, out=logits)


def exclude(logits: Tensor, excluded: tuple[Tensor, list[int]] | None, part: slice) -> Tensor:
    """Leaves tokens out of the distribution at the marked positions.  [chunk, V] -> [chunk, V]"""
    if excluded is None:
        return logits
    early, ids = excluded
    unsampled = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    unsampled[ids] = True
    return logits.masked_fill(early[part, None] & unsampled, EXCLUDED)
