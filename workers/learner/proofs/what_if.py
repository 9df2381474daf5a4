"""Rescores packs with a changed forward pass: other weights, dtype, attention, positions or sampling.

Every change is a context manager that restores the model at the end, bit for bit. All ranks make the same change at the
same time. With ZeRO 3, only the forward pass gathers tensors, and the loading of other weights, one tensor at a time.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlsys.forward.context import pack_context
from rlsys.forward.decoder import own_attention
from rlsys.forward.logprob_head import LogprobHead, exclude
from rlsys.forward.lora import adapted_layers, is_adapter, trained_parameters, without_adapters
from rlsys.interfaces import STEP_0, Sampling, WhatIf
from rlsys.models.adapters import WEIGHTS, is_adapter_directory
from rlsys.types import Floats, Pack
from workers.learner.files.adapter_files import peft_name
from workers.learner.files.tensor_files import TensorFiles

Forward = Callable[[list[Pack]], list[Any]]  # `ZeroEngine.forward_all`


def rescore(
    forward: Forward, lm: Any, packs: list[Pack], what_if: WhatIf, source: str, trust_remote_code: bool = False
) -> list[Floats]:
    """Returns the log-probs [K, samplings] of each pack.

    `lm`: the model inside `forward`. `source`: the directory or hub name that it was loaded from.
    """
    bfloat16 = what_if.dtype == "bfloat16"
    with contextlib.ExitStack() as changes:
        changes.enter_context(torch.compiler.set_stance("force_eager"))  # compiled layers would not see the changes
        changes.enter_context(use_sampling_head(lm.get_output_embeddings(), what_if.samplings, bfloat16))
        if what_if.weights:
            directory = source if what_if.weights == STEP_0 else what_if.weights
            changes.enter_context(use_weights_of(directory, lm, trust_remote_code))
        if bfloat16:
            changes.enter_context(round_to_bfloat16(lm))
        elif what_if.dtype == "float32":
            changes.enter_context(compute_in_float32(lm))
        if what_if.attention:
            changes.enter_context(own_attention(lm.get_decoder()))
        scores = []
        for pack in packs:
            with use_padded_positions(lm, pack, what_if) if what_if.positions else contextlib.nullcontext():
                scores += [logprobs.float().cpu().numpy() for logprobs, _ in forward([pack])]
    return scores


# --- sampling ---------------------------------------------------------------------------------------------------------


class SamplingHead(LogprobHead):
    """Returns log-probs with a column for each sampling, and the targets in place of entropies.

    [K, D], [K] -> [K, samplings], [K]
    """

    samplings: tuple[Sampling, ...]
    round_logits: bool  # to bfloat16

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Tensor, early: Tensor | None = None, slopes: None = None
    ) -> tuple[Tensor, Tensor]:
        columns, (hidden, weight) = [], self.factors(hidden)
        for start in range(0, max(len(hidden), 1), self.chunk):
            part = slice(start, start + self.chunk)
            logits = nn.functional.linear(hidden[part], weight)
            logits = logits.to(torch.bfloat16) if self.round_logits else logits
            logits = self.transform.apply_(logits.float())
            logits = exclude(logits, None if early is None else (early, self.end_ids), part)
            columns.append(sampling_logprobs(logits, targets[part], self.samplings))
        return torch.cat(columns), targets


def sampling_logprobs(logits: Tensor, targets: Tensor, samplings: tuple[Sampling, ...]) -> Tensor:
    """Log-probs of targets after temperature, top-k and top-p, in this order.  [K, V], [K] -> [K, samplings]

    The target is never cut off: the engine has sampled it, so only rounding could cut it off here.
    """
    return torch.stack([truncated_logprobs(logits / s.temperature, targets, s) for s in samplings], dim=1)


def truncated_logprobs(logits: Tensor, targets: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs of targets after top-k and top-p.  [K, V], [K] -> [K]"""
    target_logits = logits.gather(-1, targets[:, None])
    if sampling.top_k:
        smallest = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < torch.minimum(smallest, target_logits), -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        outside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, mass_before >= sampling.top_p)
        logits = logits.masked_fill(outside & (logits != target_logits), -torch.inf)
    return (target_logits - logits.logsumexp(-1, keepdim=True))[:, 0]


@contextlib.contextmanager
def use_sampling_head(head: Any, samplings: tuple[Sampling, ...], round_logits: bool) -> Iterator[None]:
    """Gives the output layer another class, as `PackedLogprobs` does. ZeRO 3 knows the layer by identity, so it stays the same object."""
    original = head.__class__
    head.__class__, head.samplings, head.round_logits = SamplingHead, samplings, round_logits
    try:
        yield
    finally:
        head.__class__ = original


# --- weights and dtype ------------------------------------------------------------------------------------------------


def local_data(parameter: Any) -> Tensor:
    """Returns what this rank keeps of a parameter."""
    data: Tensor = getattr(parameter, "ds_tensor", parameter).data
    return data


@contextlib.contextmanager
def preserve_weights(lm: Any) -> Iterator[None]:
    """Restores the weights at the end, from a copy in main memory."""
    copies = [local_data(p).to("cpu", copy=True) for p in lm.parameters()]
    try:
        yield
    finally:
        for parameter, copy in zip(lm.parameters(), copies, strict=True):
            local_data(parameter).copy_(copy)


@contextlib.contextmanager
def use_weights_of(source: str, lm: Any, trust_remote_code: bool) -> Iterator[None]:
    """Uses the weights of a model directory. Where adapters are trained it is an adapter's; the base is without them."""
    if adapted_layers(lm) and not is_adapter_directory(source):
        with without_adapters(lm):
            yield
        return
    if adapted_layers(lm):
        files = TensorFiles([Path(source) / WEIGHTS])
        weights = {name: files.read(peft_name(name)) for name in trained_parameters(lm)}
    else:
        other = AutoModelForCausalLM.from_pretrained(source, dtype=lm.dtype, trust_remote_code=trust_remote_code)
        weights = dict(other.named_parameters())
    with preserve_weights(lm):
        for name, parameter in trained_parameters(lm).items():
            if hasattr(parameter, "ds_id"):
                import deepspeed

                # ZeRO 3 takes the weights from rank 0. Otherwise every rank fills its own copy.
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.data.copy_(weights[name].data)
            else:
                parameter.data.copy_(weights[name].data)
        yield


@contextlib.contextmanager
def round_to_bfloat16(lm: Any) -> Iterator[None]:
    """Rounds the weights and the output of every module to bfloat16, as bfloat16 kernels with float32 sums would."""

    def hook(module: nn.Module, arguments: Any, output: Any) -> Any:
        return rounded(output)

    head = lm.get_output_embeddings()
    with preserve_weights(lm), merged_as(lm, torch.bfloat16):
        merged = {f"{name}.weight" for name in adapted_layers(lm)}  # rounded when they are merged
        for name, parameter in lm.named_parameters():
            if not is_adapter(name) and name not in merged:
                local_data(parameter).copy_(local_data(parameter).to(torch.bfloat16))
        modules = [m for m in lm.get_decoder().modules() if m is not head and not isinstance(m, nn.ModuleList)]
        hooks = [module.register_forward_hook(hook) for module in modules]
        try:
            yield
        finally:
            for h in hooks:
                h.remove()


@contextlib.contextmanager
def merged_as(lm: Any, dtype: torch.dtype) -> Iterator[None]:
    """Rounds merged weights of adapters to another number format."""
    layers = list(adapted_layers(lm).values())
    formats = [layer.format for layer in layers]
    for layer in layers:
        layer.format = dtype
    try:
        yield
    finally:
        for layer, original in zip(layers, formats, strict=True):
            layer.format = original


def rounded(value: Any) -> Any:
    """Rounds float32 tensors, also inside tuples, to bfloat16. Returns anything else as it is."""
    if isinstance(value, tuple):
        return tuple(rounded(v) for v in value)
    is_float32 = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.to(torch.bfloat16).float() if is_float32 else value


@contextlib.contextmanager
def compute_in_float32(lm: Any) -> Iterator[None]:
    """Has a bfloat16 model compute in float32. Not for ZeRO 3, whose shards keep their dtype."""
    originals = [p.data for p in lm.parameters()]
    for parameter in lm.parameters():
        parameter.data = parameter.data.float()
    try:
        with merged_as(lm, torch.float32):
            yield
    finally:
        for parameter, original in zip(lm.parameters(), originals, strict=True):
            parameter.data = original


# --- positions --------------------------------------------------------------------------------------------------------


def padded_positions(pack: Pack, what_if: WhatIf) -> Tensor:
    """Position ids [T] as in a padded batch, for a pack in which every sequence is one piece.

    Prompt of 2 tokens, completion of 3 whose last is no input, longest prompt 5.   left: 3 4 5 6   right: 0 1 5 6
    """
    assert set(pack.parent) == {-1}
    positions, start = [], 0
    logit_positions, sequences = pack.logit_positions, pack.sequences
    for sequence, length in enumerate(pack.lengths):
        ids = torch.arange(length)
        of_sequence = logit_positions[sequences == sequence]
        if len(of_sequence):
            prompt = int(of_sequence[0]) - start + 1
            moved_from = prompt if what_if.positions == "right" else 0
            ids[moved_from:] += what_if.longest_prompt - prompt
        positions.append(ids)
        start += length
    return torch.cat(positions)


@contextlib.contextmanager
def use_padded_positions(lm: Any, pack: Pack, what_if: WhatIf) -> Iterator[None]:
    own = pack_context(lm.get_decoder()).group.own_tokens(padded_positions(pack, what_if).numpy())
    ids = torch.from_numpy(own)[None]

    def hook(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, keywords | {"position_ids": ids.to(keywords["position_ids"].device)}

    handle = lm.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
