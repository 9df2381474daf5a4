"""The sums of `fingerprint.py` on GPUs, in one pass over memory: a Triton kernel instead of some twenty."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of a program
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
EXPONENTS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # all bits set: not finite


@triton.jit  # type: ignore[untyped-decorator]
def scramble(x):  # type: ignore[no-untyped-def]
    x = x * -7046029254386353131
    x = x ^ (x >> 29)
    x = x * -4658895280553007687
    return x ^ (x >> 32)


@triton.jit(do_not_specialize=["count", "first", "width", "gap"])  # type: ignore[untyped-decorator]
def add_up(  # type: ignore[no-untyped-def]
    elements, copies, totals, count, first, width, gap, positions: tl.constexpr, gaps: tl.constexpr,
    rounds: tl.constexpr, copy: tl.constexpr, exponent: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    place = program * block + tl.arange(0, block)
    inside = place < count
    x = tl.load(elements + place, mask=inside, other=0)
    if rounds:  # float32 to bfloat16, as torch does: to the nearest, halfway to the even one, and NaN to one NaN
        nearest = (x + 0x7FFF + ((x >> 16) & 1)) >> 16
        x = tl.where((x & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, nearest).to(tl.int16)
    if copy:
        tl.store(copies + place, x, mask=inside)
    if exponent:
        bad = inside & ((x & exponent) == exponent)
        tl.store(totals + tl.num_programs(0) + program, tl.sum(bad.to(tl.int64)))
    x = x.to(tl.int64)
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
    positions, gaps = place is not None, gap > 0
    add_up[(programs,)](
        integers, integers, totals, count, first, width, gap, positions, gaps, False, False, 0, BLOCK
    )  # fmt: skip
    return int(totals.sum())


def copy_and_hash(source: Tensor, target: Tensor | None, first: int) -> Tensor:
    """Copies a flat tensor, cast to the target's dtype, and hashes the copy with positions from `first` on.  [N], [N] -> [2]

    Without a target it hashes the source. Returns the sum of hashes, and how many elements are not finite, on the GPU:
    reading them makes the host wait.
    """
    target_dtype = source.dtype if target is None else target.dtype
    rounds = (source.dtype, target_dtype) == (torch.float32, torch.bfloat16)
    source = source if rounds else source.to(target_dtype)
    integers = as_integers(source.contiguous())
    copies = integers if target is None else as_integers(target)
    programs = triton.cdiv(len(source), BLOCK)
    totals = torch.empty(2, programs, dtype=torch.int64, device=source.device)
    exponent = EXPONENTS[target_dtype]
    add_up[(programs,)](
        integers, copies, totals, len(source), first + 1, 1, 0, True, False, rounds, target is not None, exponent, BLOCK
    )  # fmt: skip
    return totals.sum(1)


def as_integers(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])
