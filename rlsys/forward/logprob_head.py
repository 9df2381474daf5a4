"""The output layer of a policy: log-probs and entropies of given tokens, with a part of the logits in memory at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlsys.forward.logit_transform import UNCHANGED, LogitTransform

EXCLUDED = -1e30  # the logit of a token that is not sampled; its probability is exactly 0
SAME_SLOPE = 1e-3  # more than what rounding changes in a gradient that is computed twice

# The gradient of a loss by log-probs and entropies of some targets: (which [k], [k], [k]) -> [k], [k] or None
Slopes = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor | None]]


class LogprobHead(nn.Linear):
    """An lm_head that is given the targets: [K, D], [K] -> log-probs [K], entropies [K]. Without them, logits.

    `early` [K] marks targets that may not be one of `end_ids`. For `slopes` see `ChunkedLogprobs`.

    Entropies are [0] while gradients are off, because scores do not need them. One call covers all chunks: ZeRO-3
    gathers the weight once, and all ranks take part equally often.
    """

    temperature: float
    chunk: int
    end_ids: list[int]
    in_float32: bool  # logits are computed in single precision, from hidden states and a weight of any
    linear: Callable[[Tensor, Tensor], Tensor]
    transform: LogitTransform

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, early: Tensor | None = None, slopes: Slopes | None = None
    ) -> Any:
        hidden, weight = self.factors(hidden)
        if targets is None:
            return self.linear(hidden, weight)
        excluded = None if early is None else (early, self.end_ids)
        options = (self.temperature, self.chunk, self.linear, torch.is_grad_enabled(), excluded, self.transform)
        return ChunkedLogprobs.apply(hidden, weight, targets, *options, slopes)

    def factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the hidden states and the weight, whose product the logits are."""
        return (hidden.float(), self.weight.float()) if self.in_float32 else (hidden, self.weight)


class ChunkedLogprobs(torch.autograd.Function):
    """log_softmax(hidden weightᵀ / temperature)[targets], with logits in memory for `chunk` positions at a time.

    Logits are the largest tensors of a pass. The backward pass computes them again. Where the loss's gradient by a target's
    log-prob depends on no other target, `slopes` tells it, and the forward pass computes all gradients while it has a
    chunk's logits: 3 matrix products in place of 4.
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
        slopes: Slopes | None = None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.options = temperature, chunk, linear, excluded, transform
        chunks = Chunks(hidden, weight, targets, *ctx.options)
        gradients = HeadGradients(hidden, weight, ctx.needs_input_grad[1]) if slopes else None
        logprobs, slopes_used = [], []
        entropies = [hidden.new_zeros(0, dtype=torch.float32)]
        for part in chunks.parts():
            log_p, transform_slope = chunks.log_softmax(part, for_gradient=slopes is not None)
            logprobs.append(log_p.gather(-1, targets[part, None])[:, 0])
            if with_entropy:
                entropies.append(entropies_of(log_p))
            if slopes and gradients:
                grad, grad_entropy = slopes(part, logprobs[-1], entropies[-1])
                slopes_used.append(grad)
                grad_logits = chunks.gradient(part, log_p, transform_slope, entropies[-1], grad, grad_entropy)
                del log_p, transform_slope
                gradients.add(part, grad_logits)
                del grad_logits
            else:
                del log_p, transform_slope  # before the next ones are there
        entropy = torch.cat(entropies)
        ctx.has_gradients = gradients is not None
        if gradients:
            ctx.save_for_backward(torch.cat(slopes_used), gradients.hidden, gradients.weight_in_own_type())
        else:
            ctx.save_for_backward(hidden, weight, targets, entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        others = (None,) * 8
        if ctx.has_gradients:
            slopes_used, grad_hidden, grad_weight = ctx.saved_tensors
            return grad_hidden.mul_(one_if_same(grad, slopes_used)[:, None]), grad_weight, *others
        hidden, weight, targets, entropy = ctx.saved_tensors
        chunks, gradients = (
            Chunks(hidden, weight, targets, *ctx.options),
            HeadGradients(hidden, weight, ctx.needs_input_grad[1]),
        )
        grad = torch.zeros_like(entropy) if grad is None else grad
        for part in chunks.parts():
            log_p, transform_slope = chunks.log_softmax(part, for_gradient=True)
            of_entropy = None if grad_entropy is None else grad_entropy[part]
            grad_logits = chunks.gradient(part, log_p, transform_slope, entropy[part], grad[part], of_entropy)
            del log_p, transform_slope
            gradients.add(part, grad_logits)
            del grad_logits
        return gradients.hidden, gradients.weight_in_own_type(), *others


@dataclass(frozen=True)
class Chunks:
    """The distributions of a pass, one chunk after the other. Logits are changed in place: on a CPU new memory costs as
    much time as the arithmetic."""

    hidden: Tensor  # [K, D]
    weight: Tensor  # [V, D]
    targets: Tensor  # [K]
    temperature: float
    size: int
    linear: Callable[[Tensor, Tensor], Tensor]
    excluded: tuple[Tensor, list[int]] | None
    transform: LogitTransform

    def parts(self) -> list[slice]:
        """Returns at least one, so that every rank of ZeRO 3 uses the weight."""
        return [slice(start, start + self.size) for start in range(0, max(len(self.hidden), 1), self.size)]

    def log_softmax(self, part: slice, for_gradient: bool) -> tuple[Tensor, Tensor | float | None]:
        """Returns the log-probs of all tokens [k, V], and how steep the model's change of its logits is there; None: 1."""
        logits = self.transform.apply_(self.linear(self.hidden[part], self.weight).float())
        slope = self.transform.slope(logits) if for_gradient else None
        return log_softmax_(exclude(divide_(logits, self.temperature), self.excluded, part)), slope

    def gradient(
        self,
        part: slice,
        log_p: Tensor,
        transform_slope: Tensor | float | None,
        entropy: Tensor,
        grad: Tensor,
        grad_entropy: Tensor | None,
    ) -> Tensor:
        """Returns the gradient of a chunk's logits. It takes the memory of `log_p`.

        With p the softmax and H its entropy, d logprob / d logits = onehot(target) - p,  d H / d logits = -p (log p + H).
        """
        grad, targets = grad[:, None], self.targets[part, None]
        if grad_entropy is None:
            grad_logits = log_p.exp_().mul_(-grad).scatter_add_(-1, targets, grad)
        else:
            p = log_p.exp()
            grad_logits = (-grad * p).scatter_add_(-1, targets, grad)
            grad_logits -= p.mul_(grad_entropy[:, None]).mul_(log_p.add_(entropy[:, None]))
            del p
        grad_logits = divide_(grad_logits, self.temperature)
        grad_logits = grad_logits if transform_slope is None else grad_logits.mul_(transform_slope)
        return grad_logits.to(self.hidden.dtype)


class HeadGradients:
    """The gradients of hidden states and weight, from those of logits."""

    def __init__(self, hidden: Tensor, weight: Tensor, trained: bool):
        """Gives the weight a gradient if it is `trained`."""
        self.inputs, self.trained = (hidden, weight), trained
        self.hidden = torch.empty_like(hidden)
        self.weight: Tensor | None = None

    def add(self, part: slice, grad_logits: Tensor) -> None:
        hidden, weight = self.inputs
        self.hidden[part] = grad_logits @ weight
        if self.trained:
            self.weight = add_(self.weight, grad_logits.t() @ hidden[part])

    def weight_in_own_type(self) -> Tensor | None:
        return None if self.weight is None else self.weight.to(self.inputs[1].dtype)


def one_if_same(grad: Tensor | None, slopes_used: Tensor) -> Tensor:
    """Returns 1 for each gradient that is the one told before, else NaN: then the update is skipped, and the run says so."""
    grad = torch.zeros_like(slopes_used) if grad is None else grad
    return torch.where((grad - slopes_used).abs() <= SAME_SLOPE * slopes_used.abs(), 1.0, torch.nan).to(grad.dtype)


def entropies_of(log_p: Tensor) -> Tensor:
    """Returns -Σ p log p of each row, with little more in memory at a time.  [k, V] -> [k]"""
    rows = log_p.split(max(len(log_p) // 8, 1))
    return torch.cat([-r.exp().mul_(r).sum(-1) for r in rows])


def add_(total: Tensor | None, part: Tensor) -> Tensor:
    """Adds in float32. A GPU converts while it adds, and makes no copy."""
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
