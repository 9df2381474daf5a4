"""Folds the modules that mix along the sequence and are no attention: linear attention, Mamba, short convolutions.

On the flat tokens of a pack they would run on from one sequence into the next. Folded, they run on the blocks of the
pack's `Layout`: a row is one sequence from its start, with a copy of the prompt that it shares.

    flat     a b c | d e           the mixer's state at d still holds a b c
    folded   a b c                 each row starts from the beginning
             d e ·

Which modules are mixers is found by what they do, not by their names.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlsys.forward.context import PackContext, pack_context
from rlsys.forward.layout import BlocksToPack, PackToBlocks

PROBE_TOKENS = 13  # of each of two sequences
FIRST, SECOND = slice(0, PROBE_TOKENS), slice(PROBE_TOKENS, None)
MIDDLE, END = slice(PROBE_TOKENS, PROBE_TOKENS + 6), slice(PROBE_TOKENS + 6, None)
# Of a module's largest output; rounding is smaller, what a mixer hands on is larger.
LEAK = {torch.float32: 1e-4, torch.bfloat16: 0.01, torch.float16: 0.01}


def fold_mixers(decoder: Any) -> list[str]:
    """Patch: makes every mixer of a decoder run on blocks. Returns the names of their classes."""
    kinds, context = find_mixers(decoder), pack_context(decoder)
    for module in decoder.modules():
        if type(module) in kinds:
            module.forward = run_on_blocks(module.forward, context)
    context.mixers = sorted(kind.__name__ for kind in kinds)
    return context.mixers


def run_on_blocks(forward: Callable[..., Any], context: PackContext) -> Callable[..., Any]:
    """Wraps a mixer's `forward`: hidden states [1, T, D] of a pack go in and come out, computed block by block."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(forward)
    def folded(*arguments: Any, **keywords: Any) -> Any:
        layout, hidden = context.layout, first_hidden_states((*arguments, *keywords.values()))
        assert layout, "a mixer is called without a pack"
        assert hidden is not None, "a mixer is called without hidden states"
        blocks = PackToBlocks.apply(hidden[0], layout, True)
        idle = [min(blocks, key=lambda block: block.shape[1])[:1]] * (context.runs - len(blocks))
        outputs = [
            forward(*replace_hidden(arguments, hidden, block), **replace_in(keywords, hidden, block))
            for block in (*blocks, *idle)
        ]
        mixed = [output if isinstance(output, Tensor) else output[0] for output in outputs]
        cells = [m[:, block.prefix :].flatten(0, 1) for m, block in zip(mixed, layout.blocks, strict=False)]
        unfolded = BlocksToPack.apply(torch.cat(cells), layout.cell_of_token)[None]
        for unused in mixed[len(blocks) :]:
            unfolded = unfolded + 0 * unused.sum()  # so that its backward runs too
        return unfolded if isinstance(outputs[0], Tensor) else (unfolded, *outputs[0][1:])

    return folded


def find_mixers(decoder: Any) -> set[type[nn.Module]]:
    """Returns the classes of the innermost modules that carry something from one sequence of a pack into the next.

    Two sequences go through the decoder. Each kind of module is then run again on what it was given, with other values
    in the first sequence. Packed attention keeps sequences apart, so what changes in the second has leaked.
    """
    leaks: dict[type[nn.Module], bool] = {}
    probing = False

    def examine(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        nonlocal probing
        hidden, result = first_hidden_states((*arguments, *keywords.values())), first_hidden_states(as_tuple(output))
        inner = any(leaks.get(type(m)) for m in module.modules() if m is not module)
        if probing or type(module) in leaks or inner or hidden is None or result is None:
            return
        if hidden.shape[1] != 2 * PROBE_TOKENS:  # a convolution is given [1, D, T]
            return

        def changes(changed: slice, seen: slice) -> bool:
            other = change_tokens(hidden, changed)
            again = module(*replace_hidden(arguments, hidden, other), **replace_in(keywords, hidden, other))
            computed = first_hidden_states(as_tuple(again))
            return computed is not None and differ(result[:, seen], computed[:, seen])

        probing = True
        leaks[type(module)] = changes(FIRST, SECOND)
        if leaks[type(module)] and changes(END, MIDDLE):
            raise ValueError(
                f"{type(module).__name__} is not causal: its tokens see later ones, which cannot be trained."
            )
        probing = False

    hooks = [m.register_forward_hook(examine, with_kwargs=True) for m in decoder.modules() if m is not decoder]
    try:
        run_probe(decoder)
    finally:
        for hook in hooks:
            hook.remove()
    return {kind for kind, leaking in leaks.items() if leaking}


def refuse_inconsistent(decoder: Any) -> None:
    """Raises unless a decoder gives equal sequences of a pack equal results, and the same ones while it is trained."""
    trained, states = run_probe(decoder.train()), run_probe(decoder.eval())
    if differ(states, trained):
        raise ValueError(f"{type(decoder).__name__} computes something else while it is trained, such as dropout.")
    if differ(states[:, FIRST], states[:, SECOND]):
        raise ValueError(f"{type(decoder).__name__} computes a sequence otherwise if another one comes before it.")


def run_probe(decoder: Any) -> Tensor:
    """Returns the last hidden states of two equal sequences in a pack."""
    device = next(decoder.parameters()).device
    positions = torch.arange(PROBE_TOKENS, device=device).repeat(2)[None]
    tokens = positions % decoder.get_input_embeddings().num_embeddings
    layout = pack_context(decoder).start([PROBE_TOKENS] * 2, [-1, -1], device)
    inputs = {"input_ids": tokens, "position_ids": positions, "layout": layout}
    with torch.no_grad():
        return decoder(**inputs, use_cache=False).last_hidden_state


def change_tokens(hidden: Tensor, tokens: slice) -> Tensor:
    other = hidden.clone()
    noise = torch.randn(other[:, tokens].shape, generator=torch.Generator().manual_seed(0))
    other[:, tokens] = (noise * hidden.float().std().cpu()).to(other)
    return other


def differ(first: Tensor, second: Tensor) -> bool:
    return bool((second - first).abs().max() > LEAK[first.dtype] * first.abs().max())


def first_hidden_states(values: tuple[Any, ...]) -> Tensor | None:
    """Returns the first tensor [1, T, D] with D numbers for each token."""
    floats = (v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() == 3)
    return next((v for v in floats if v.shape[0] == 1), None)


def replace_hidden(arguments: tuple[Any, ...], hidden: Tensor, other: Tensor) -> tuple[Any, ...]:
    return tuple(other if a is hidden else a for a in arguments)


def replace_in(keywords: dict[str, Any], hidden: Tensor, other: Tensor) -> dict[str, Any]:
    return {name: other if value is hidden else value for name, value in keywords.items()}


def as_tuple(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)
