"""The one forward pass: policy, old and reference log-probs all come from `PackedLogprobs`."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlsys.forward import exact
from rlsys.forward.decoder import decoder_inputs, run_decoder, to_indices
from rlsys.forward.logit_transform import LogitTransform
from rlsys.forward.logprob_head import LogprobHead, Slopes, exclude
from rlsys.forward.transfer import to_device
from rlsys.types import Pack


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

    def forward(self, pack: Pack, plain: bool = False, slopes: Slopes | None = None) -> tuple[Tensor, Tensor]:
        """Returns the log-probs [K] of a pack's targets, and entropies [K] of their distributions ([0] while gradients are off).

        `plain`: from the logits that the model itself computes, without entropies. `slopes`: see `ChunkedLogprobs`.
        """
        device = next(self.lm.parameters()).device
        targets = to_device(pack.targets, device, torch.long)
        early = to_device(pack.places < self.min_new_tokens, device) if self.min_new_tokens else None
        if plain:
            return self.plain_logprobs(pack, targets, early), targets.new_zeros(0)
        own = run_decoder(self.decoder, pack, device)
        early = None if early is None else early[own.indices]
        own_slopes = slopes and (lambda part, *outputs: slopes(own.indices[part], *outputs))
        logprobs, entropies = self.lm.get_output_embeddings()(own.hidden, targets[own.indices], early, own_slopes)
        return own.gather(logprobs), own.gather(entropies) if torch.is_grad_enabled() else entropies

    def plain_logprobs(self, pack: Pack, targets: Tensor, early: Tensor | None) -> Tensor:
        head, device = self.lm.get_output_embeddings(), targets.device
        inputs = decoder_inputs(self.decoder, pack, device)
        logits = self.lm(input_ids=inputs["input_ids"], use_cache=False).logits[0]  # positions are the model's own
        logits = logits.index_select(0, to_indices(pack.logit_positions, device)).float() / head.temperature
        excluded = None if early is None else (early, head.end_ids)
        return exclude(logits, excluded, slice(None)).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
