"""The policy's forward pass as it might have been. What is changed for it is put back, bit for bit.

All ranks compute the same variant at the same time. Of a ZeRO 3 model nothing is gathered that its forward pass does not gather,
except, one tensor after the other, where other weights are put in.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlsys.interfaces import ModelFacts, Sampling, WhatIf
from rlsys.packs.attention import Layout
from rlsys.packs.logprobs import LogprobHead
from rlsys.types import Floats, Pack

PLAIN = "rlsys_plain"
Score = Callable[[list[Pack]], list[Any]]  # `ZeroEngine.scored`


def rescore(score: Score, lm: Any, packs: list[Pack], what_if: WhatIf, trust_remote_code: bool = False) -> list[Floats]:
    """Log-probs [K, samplings] of each pack under a variant. `lm` is the model inside `score`."""
    with contextlib.ExitStack() as changes:
        changes.enter_context(torch.compiler.set_stance("force_eager"))  # compiled layers would not see what is changed
        coarse = what_if.dtype == "bfloat16"
        changes.enter_context(truncated(lm.get_output_embeddings(), what_if.samplings, coarse))
        if what_if.weights:
            changes.enter_context(other_weights(lm, what_if.weights, trust_remote_code))
        if coarse:
            changes.enter_context(rounded(lm))
        elif what_if.dtype == "float32":
            changes.enter_context(widened(lm))
        if what_if.attention:
            changes.enter_context(plain(lm))
        found = []
        for pack in packs:
            with moved(lm, pack, what_if) if what_if.positions else contextlib.nullcontext():
                found += [logprobs.float().cpu().numpy() for logprobs, _ in score([pack])]
    return found


# --- sampling --------------------------------------------------------------------------------------------------------------


class TruncatedHead(LogprobHead):
    """Answers with a column for each sampling: [K, D], [K] -> [K, samplings], and entropies nobody asks for."""

    samplings: tuple[Sampling, ...]
    coarse: bool  # whether logits are rounded to bfloat16

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        columns = []
        for h, t in zip(hidden.split(self.chunk), targets.split(self.chunk), strict=True):
            logits = nn.functional.linear(h, self.weight)
            logits = logits.to(torch.bfloat16) if self.coarse else logits
            columns.append(truncated_logprobs(logits.float(), t, self.samplings))
        return torch.cat(columns), targets


def truncated_logprobs(logits: Tensor, targets: Tensor, samplings: tuple[Sampling, ...]) -> Tensor:
    """Log-probs of targets after temperature, top-k and top-p, in this order.  [K, V], [K] -> [K, samplings]

    The target always stays in: the engine has sampled it, so that it was left out by rounding at most.
    """
    return torch.stack([one_sampling(logits / s.temperature, targets, s) for s in samplings], dim=1)


def one_sampling(logits: Tensor, targets: Tensor, s: Sampling) -> Tensor:
    own = logits.gather(-1, targets[:, None])
    if s.top_k:
        least = logits.topk(min(s.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < torch.minimum(least, own), -torch.inf)
    if s.top_p < 1:
        ordered, places = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        out = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, places, before >= s.top_p)
        logits = logits.masked_fill(out & (logits != own), -torch.inf)
    return (own - logits.logsumexp(-1, keepdim=True))[:, 0]


@contextlib.contextmanager
def truncated(head: Any, samplings: tuple[Sampling, ...], coarse: bool) -> Iterator[None]:
    was = head.__class__
    head.__class__, head.samplings, head.coarse = TruncatedHead, samplings, coarse
    try:
        yield
    finally:
        head.__class__ = was


# --- weights ---------------------------------------------------------------------------------------------------------------


def own_part(parameter: Any) -> Tensor:
    """What this rank keeps of a parameter."""
    part: Tensor = getattr(parameter, "ds_tensor", parameter).data
    return part


@contextlib.contextmanager
def kept(lm: Any) -> Iterator[None]:
    """Puts the weights back at the end. The copy is in main memory."""
    before = [own_part(p).to("cpu", copy=True) for p in lm.parameters()]
    try:
        yield
    finally:
        for parameter, was in zip(lm.parameters(), before, strict=True):
            own_part(parameter).copy_(was)


@contextlib.contextmanager
def other_weights(lm: Any, source: str, trust_remote_code: bool) -> Iterator[None]:
    """Those of a model directory, instead of the present ones."""
    # Rank 0's are taken where ZeRO 3 spreads them; elsewhere every rank fills its own.
    there = AutoModelForCausalLM.from_pretrained(source, dtype=lm.dtype, trust_remote_code=trust_remote_code)
    new = dict(there.named_parameters())
    with kept(lm):
        for name, parameter in lm.named_parameters():
            if hasattr(parameter, "ds_id"):
                import deepspeed

                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.data.copy_(new[name].data)
            else:
                parameter.data.copy_(new[name].data)
        yield


@contextlib.contextmanager
def rounded(lm: Any) -> Iterator[None]:
    """Weights, and what every module gives, are rounded to bfloat16: what a bfloat16 kernel that adds up in float32 would do."""

    def nearest(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(nearest(v) for v in value)
        floating = isinstance(value, Tensor) and value.dtype == torch.float32
        return value.to(torch.bfloat16).float() if floating else value

    def hook(module: nn.Module, arguments: Any, answer: Any) -> Any:
        return nearest(answer)

    head = lm.get_output_embeddings()
    with kept(lm):
        for parameter in lm.parameters():
            own_part(parameter).copy_(own_part(parameter).to(torch.bfloat16))
        inner = [m for m in lm.get_decoder().modules() if m is not head and not isinstance(m, nn.ModuleList)]
        hooks = [module.register_forward_hook(hook) for module in inner]
        try:
            yield
        finally:
            for h in hooks:
                h.remove()


@contextlib.contextmanager
def widened(lm: Any) -> Iterator[None]:
    """A bfloat16 model computes in float32. Not for ZeRO 3, whose shards have the dtype they have."""
    before = [p.data for p in lm.parameters()]
    for parameter in lm.parameters():
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, was in zip(lm.parameters(), before, strict=True):
            parameter.data = was


# --- attention and positions -----------------------------------------------------------------------------------------------


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """One sequence, no kernel: softmax(q kᵀ · scale) v.  [1, H, T, D] each -> [1, T, H, D]"""
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, dim=1), value.repeat_interleave(share, dim=1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3)).float() * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1).to(value.dtype)
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register(PLAIN, plain_attention)


@contextlib.contextmanager
def plain(lm: Any) -> Iterator[None]:
    was = lm.config._attn_implementation
    lm.config._attn_implementation = PLAIN
    try:
        yield
    finally:
        lm.config._attn_implementation = was


def positions(pack: Pack, variant: WhatIf) -> Tensor:
    """Position ids [T] as padding would have made them, of a pack in which every sequence is one piece."""
    assert set(pack.parent) == {-1}
    ids, start = [], 0
    predict, sequences = pack.logit_positions, pack.sequences
    for sequence, length in enumerate(pack.lengths):
        own = torch.arange(length)
        predicting = predict[sequences == sequence]
        if len(predicting):
            prompt = int(predicting[0]) - start + 1
            moved_from = prompt if variant.positions == "right" else 0
            own[moved_from:] += variant.longest_prompt - prompt
        ids.append(own)
        start += length
    return torch.cat(ids)


@contextlib.contextmanager
def moved(lm: Any, pack: Pack, variant: WhatIf) -> Iterator[None]:
    """The decoder is given other positions."""
    ids = positions(pack, variant)[None]

    def hook(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, keywords | {"position_ids": ids.to(keywords["position_ids"].device)}

    handle = lm.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# --- what the model's files say --------------------------------------------------------------------------------------------


def read_model_facts(source: str, texts: list[str], trust_remote_code: bool = False) -> ModelFacts:
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    settings = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    ends, generation = numbers(settings.eos_token_id), {}
    with contextlib.suppress(OSError):  # the model has no generation_config.json
        own = GenerationConfig.from_pretrained(source)
        ends += numbers(own.eos_token_id)
        names = ("temperature", "top_p", "top_k")
        generation = {n: float(v) for n in names if (v := getattr(own, n, None)) is not None}
    return ModelFacts(
        bos=tokenizer.bos_token_id,
        eos=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        ends=sorted(set(ends)),
        symbols=max(tokenizer.get_vocab().values()) + 1,
        embeddings=settings.get_text_config().vocab_size,
        generation=generation,
        encoded=[list(tokenizer(t, add_special_tokens=True)["input_ids"]) for t in texts],
        bare=[list(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts],
    )


def numbers(ids: int | list[int] | None) -> list[int]:
    return [ids] if isinstance(ids, int) else list(ids or [])
