"""`hash_with_positions` and `hash_unordered` on GPUs, in one pass over memory: a Triton kernel instead of some twenty."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of a program


@triton.jit  # type: ignore[untyped-decorator]
def scramble(x):  # type: ignore[no-untyped-def]
    x = x * -7046029254386353131
    x = x ^ (x >> 29)
    x = x * -4658895280553007687
    return x ^ (x >> 32)


@triton.jit(do_not_specialize=["count", "first", "width", "gap"])  # type: ignore[untyped-decorator]
def add_up(  # type: ignore[no-untyped-def]
    elements, totals, count, first, width, gap, positions: tl.constexpr, gaps: tl.constexpr, block: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    place = program * block + tl.arange(0, block)
    inside = place < count
    x = tl.load(elements + place, mask=inside, other=0).to(tl.int64)
    if positions:
        position = first + place
        if gaps:  # the division takes longer than all else
            position += place // width * gap
        x = x ^ scramble(position)
    tl.store(totals + program, tl.sum(tl.where(inside, scramble(x), 0)))


def sum_of_hashes(integers: Tensor, place: tuple[int, int, int] | None = None) -> int:
    """Adds up the hashes of all elements.

    integers: [rows, width], without gaps; elements as integers of their size. `place`: row and column of the first
    element in the whole tensor, and the whole tensor's width; None: positions do not count.
    """
    count, width = integers.numel(), integers.shape[-1]
    if not count:
        return 0
    programs = triton.cdiv(count, BLOCK)
    totals = torch.empty(programs, dtype=torch.int64, device=integers.device)
    row, column, full_width = place or (0, 0, width)
    first, gap = row * full_width + column + 1, full_width - width  # the first position, and those between two rows
    add_up[(programs,)](integers, totals, count, first, width, gap, place is not None, gap > 0, BLOCK)
    return int(totals.sum())
