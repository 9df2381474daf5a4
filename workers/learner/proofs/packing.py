"""Proves, at the start of a run, that a model computes the sequences of a pack as it computes each alone.

Three sequences, two of them with one prompt, are computed twice: in one pack, and one by one with the attention that
transformers has for the model. Where attention, or anything else, reaches from one sequence into another, or where a
model computes something that packs leave out, the two differ. A model with sliding windows that are longer than these
sequences is proved once more, with small ones.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlsys.batching.packing import pack
from rlsys.errors import ConfigError
from rlsys.forward.decoder import own_attention
from rlsys.forward.mixers import as_tuple, first_hidden_states
from rlsys.types import Batch, Pack, Prompt, Sample
from workers.learner.proofs.small_windows import SMALL, computes_large_windows, small_windows

# The mean difference of log-probs that rounding explains.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
PROMPTS, COMPLETIONS = (9, 4), ((8, 5), (11,))  # tokens of each prompt, and of its completions
VOCABULARY = 64  # tokens that occur: of embeddings that are not read, only these are filled

Compute = Callable[[Pack], Tensor]  # a pack's log-probs, or hidden states


def prove_packing(name: str, decoder: Any, packed: Compute, alone: Compute, dtype: torch.dtype) -> None:
    """Raises if packed and alone differ by more than rounding to `dtype`, in which the model computes."""
    tolerance = TOLERANCE[dtype]
    compare_packed(name, decoder, packed, alone, tolerance)
    if computes_large_windows(decoder):
        with small_windows(decoder):
            compare_packed(name, decoder, packed, alone, tolerance, f" with windows of {SMALL} tokens")


def compare_packed(
    name: str, decoder: Any, packed: Compute, alone: Compute, tolerance: float, changed: str = ""
) -> None:
    together, single = proof_packs(min(decoder.get_input_embeddings().num_embeddings, VOCABULARY))
    with torch.no_grad():
        with own_attention(decoder):
            expected = torch.cat([alone(p) for p in single])
        actual = packed(together)
    expected, actual = expected.float(), actual.float()
    scale = expected.square().mean().sqrt().clamp(min=1) if expected.dim() == 2 else 1.0  # hidden states have any size
    gap = float(((actual - expected) / scale).abs().mean())
    if not gap <= tolerance:
        kind = first_different_module(decoder, packed, alone, tolerance, single[-1], together)
        module_note = f", first in the output of {kind}" if kind else ""
        raise ConfigError(
            f"model.path: {name}{changed} computes a pack of sequences otherwise than each sequence alone. They differ by "
            f"{gap:.2g} on average{module_note}. rlsys cannot train this architecture: rlsys/models/README.md lists those that it can."
        )


def proof_packs(vocabulary: int) -> tuple[Pack, list[Pack]]:
    """Returns three sequences in one pack, and each in a pack of its own, in the order of the first."""
    random = np.random.default_rng(0)

    def tokens(count: int) -> Any:
        return random.integers(0, vocabulary, count, dtype=np.int32)

    prompts = [Prompt(f"prompt {i}", "", "", tokens(n).tolist(), {}) for i, n in enumerate(PROMPTS)]
    groups = [g for g, lengths in enumerate(COMPLETIONS) for _ in lengths]
    samples = [
        Sample(prompts[g].uid, i, "", tokens(n), np.zeros(n, dtype=np.float32), "stop", 0)
        for i, (g, n) in enumerate(zip(groups, [n for lengths in COMPLETIONS for n in lengths], strict=True))
    ]
    batch = Batch(prompts, samples, np.array(groups), np.zeros(len(samples), dtype=np.float32), [])
    [[together]] = pack(batch, range(len(samples)), ranks=1, tokens_per_pack=10_000)
    single = [pack(batch, [m], ranks=1, tokens_per_pack=10_000)[0][0] for m in together.samples]
    return together, single


# --- in float32 -------------------------------------------------------------------------------------------------------


@contextmanager
def in_float32(decoder: Any, head: nn.Module | None = None) -> Iterator[None]:
    """Patch: while it is open, a half precision model computes in float32, with the weights of one layer at a time in it."""
    units = [unit for child in decoder.children() for unit in (child if isinstance(child, nn.ModuleList) else [child])]
    hooks = [hook for unit in [*units, *([head] if head is not None else [])] for hook in convert_in_forward(unit)]
    compiles = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if compiles else nullcontext():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def convert_in_forward(unit: nn.Module) -> list[Any]:
    """Hooks by which the unit's weights are float32 while it runs. Afterwards they are the tensors that they were."""
    originals: list[tuple[nn.Parameter, Tensor]] = []

    def convert(*_: Any) -> None:
        for parameter in unit.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                originals.append((parameter, parameter.data))
                parameter.data = parameter.data.float()

    def restore(*_: Any) -> None:
        while originals:
            parameter, original = originals.pop()
            parameter.data = original

    return [
        unit.register_forward_pre_hook(convert),
        unit.register_forward_hook(restore, prepend=True, always_call=True),
    ]


# --- where it differs -------------------------------------------------------------------------------------------------


def first_different_module(
    decoder: Any, packed: Compute, alone: Compute, tolerance: float, last: Pack, together: Pack
) -> str:
    """Returns the class of the first module that makes a difference for the last sequence of the pack, or "".

    What goes into it is the same, and what comes out is not.
    """
    count = len(last.tokens)

    def differ(first: Tensor, second: Tensor) -> bool:
        return bool((first - second).abs().mean() > tolerance * first.abs().mean())

    with own_attention(decoder):
        calls = [record_calls(decoder, lambda: alone(last), count)]
    calls += [record_calls(decoder, lambda p=p: packed(p), count) for p in (last, together)]  # type: ignore[misc]
    for first, second in pairwise(calls):
        for name in (name for name in first if name in second):
            (given, result), (other_given, other_result) = first[name], second[name]
            if not differ(given, other_given) and differ(result, other_result):
                return type(decoder.get_submodule(name)).__name__
    return ""


def record_calls(decoder: Any, run: Callable[[], object], count: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Records what goes into each module and comes out, for the last `count` tokens, in the order in which they finish."""
    calls: dict[str, tuple[Tensor, Tensor]] = {}

    def record(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        given, result = first_hidden_states((*arguments, *keywords.values())), first_hidden_states(as_tuple(output))
        if given is not None and result is not None and min(given.shape[1], result.shape[1]) >= count:
            calls[name] = given[0, -count:].float(), result[0, -count:].float()

    hooks = [
        module.register_forward_hook(partial(lambda name, _, *call: record(name, *call), name), with_kwargs=True)
        for name, module in decoder.named_modules()
        if name
    ]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls
