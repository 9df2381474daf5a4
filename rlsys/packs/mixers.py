"""Folds the modules that mix along the sequence and are no attention: linear attention, Mamba, short convolutions.

On the flat tokens of a pack they would run on from one sequence into the next. Folded, they run on the blocks of the
pack's `Layout`: a row is one sequence from its start, with a copy of the prompt that it shares.

    flat     a b c | d e           the mixer's state at d still holds a b c
    folded   a b c                 each row starts anew
             d e ·

Which modules are mixers is found by what they do, not by their names.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlsys.packs.layout import BlocksToPack, PackToBlocks, build_layout

PROBE_TOKENS = 13  # of each of two sequences
LEAK = 0.01  # of a module's largest output; rounding is smaller, what a mixer hands on is larger


def fold_mixers(decoder: Any) -> list[str]:
    """Patch: makes every mixer of a decoder run on blocks. Returns the names of their classes."""
    kinds = find_mixers(decoder)
    for module in decoder.modules():
        if type(module) in kinds:
            module.forward = run_on_blocks(module.forward, decoder)
    decoder.mixers = sorted(kind.__name__ for kind in kinds)
    return list(decoder.mixers)


def run_on_blocks(forward: Callable[..., Any], decoder: Any) -> Callable[..., Any]:
    """Wraps a mixer's `forward`: hidden states [1, T, D] of a pack go in and come out, computed block by block."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(forward)
    def folded(*arguments: Any, **keywords: Any) -> Any:
        layout, hidden = decoder.pack_layout, first_hidden_states((*arguments, *keywords.values()))
        assert hidden is not None, "a mixer is called without hidden states"
        outputs = []
        for block in PackToBlocks.apply(hidden[0], layout, True):
            outputs.append(forward(*replace_hidden(arguments, hidden, block), **replace_in(keywords, hidden, block)))
        mixed = [output if isinstance(output, Tensor) else output[0] for output in outputs]
        cells = [m[:, block.prefix :].flatten(0, 1) for m, block in zip(mixed, layout.blocks, strict=True)]
        unfolded = BlocksToPack.apply(torch.cat(cells), layout.cell_of_token)[None]
        return unfolded if isinstance(outputs[0], Tensor) else (unfolded, *outputs[0][1:])

    return folded


def find_mixers(decoder: Any) -> set[type[nn.Module]]:
    """The classes of the innermost modules that carry something from one sequence of a pack into the next.

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
        other, probing = change_first_sequence(hidden), True
        again = module(*replace_hidden(arguments, hidden, other), **replace_in(keywords, hidden, other))
        probing = False
        leaks[type(module)] = leaked(result, first_hidden_states(as_tuple(again)))

    hooks = [m.register_forward_hook(examine, with_kwargs=True) for m in decoder.modules() if m is not decoder]
    device = next(decoder.parameters()).device
    tokens = torch.arange(2 * PROBE_TOKENS, device=device) % decoder.get_input_embeddings().num_embeddings
    positions = torch.arange(PROBE_TOKENS, device=device).repeat(2)
    layout = build_layout([PROBE_TOKENS] * 2, [-1, -1], device)
    with torch.no_grad():
        decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout)
    for hook in hooks:
        hook.remove()
    return {kind for kind, leaking in leaks.items() if leaking}


def change_first_sequence(hidden: Tensor) -> Tensor:
    other = hidden.clone()
    noise = torch.randn(other[:, :PROBE_TOKENS].shape, generator=torch.Generator().manual_seed(0))
    other[:, :PROBE_TOKENS] = (noise * hidden.float().std().cpu()).to(other)
    return other


def leaked(first: Tensor, second: Tensor | None) -> bool:
    if second is None:
        return False
    change = (second - first)[:, PROBE_TOKENS:].abs().max()
    return bool(change > LEAK * first.abs().max())


def first_hidden_states(values: tuple[Any, ...]) -> Tensor | None:
    """The first tensor [1, T, D] with D numbers for each token."""
    floats = (v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() == 3)
    return next((v for v in floats if v.shape[0] == 1), None)


def replace_hidden(arguments: tuple[Any, ...], hidden: Tensor, other: Tensor) -> tuple[Any, ...]:
    return tuple(other if a is hidden else a for a in arguments)


def replace_in(keywords: dict[str, Any], hidden: Tensor, other: Tensor) -> dict[str, Any]:
    return {name: other if value is hidden else value for name, value in keywords.items()}


def as_tuple(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)
