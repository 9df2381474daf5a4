"""Times attention over packs on a GPU, forward and backward, in bfloat16: FlashAttention on ragged sequences, FlexAttention
with a mask function (with a cap of scores too), and padded blocks.

    .venv/bin/python tests/gpu/attention.py --json tests/gpu/results/attention.json

The heads are those of Qwen2.5 7B: 28 of 128 numbers, 4 of keys and values. A pack holds either sequences of their own, or groups of
eight completions that share a prompt. Work is what the masks leave, forward and two and a half times as much backward.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlsys.forward.attention import packed_attention
from rlsys.forward.flash import flash_attention
from rlsys.forward.flex import attend_by_flex
from rlsys.forward.layout import build_layout

HEADS, KV_HEADS, SIZE = 28, 4, 128
WAYS = ("flash", "flex", "capped", "blocks")
Pieces = tuple[list[int], list[int]]


def own_sequences(total: int, length: int) -> Pieces:
    return [length] * (total // length), [-1] * (total // length)


def shared_prompts(total: int, prompt: int, completion: int) -> Pieces:
    lengths: list[int] = []
    parents: list[int] = []
    while sum(lengths) + prompt + 8 * completion <= total:
        parents += [-1] + [len(lengths)] * 8
        lengths += [prompt] + [completion] * 8
    return lengths, parents


def needed_flops(lengths: list[int], parents: list[int]) -> float:
    """Two products of `SIZE` numbers for each pair of query and key, forward; five backward."""
    before = [lengths[p] if p >= 0 else 0 for p in parents]
    pairs = sum(n * (n + 1) / 2 + n * p for n, p in zip(lengths, before, strict=True))
    return pairs * HEADS * SIZE * 2 * (2 + 5)


def median_ms(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def measure(name: str, pieces: Pieces, rounds: int) -> dict[str, Any]:
    layout = build_layout(*pieces, "cuda")
    in_blocks = replace(layout, ragged_keys=None)
    total = sum(pieces[0])
    shapes = [(1, h, total, SIZE) for h in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(s, dtype=torch.bfloat16, device="cuda", requires_grad=True) for s in shapes]
    grad = torch.randn(1, total, HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
    row: dict[str, Any] = {"pack": name, "tokens": total, "pieces": len(pieces[0])}
    query, key, value = inputs
    keys = layout.ragged_keys
    assert keys
    ways = {
        "flash": lambda: flash_attention(query[0], key[0], value[0], keys, None, None)[None],
        "flex": lambda: attend_by_flex(query, key, value, layout.paths, None, None, None, None),
        "capped": lambda: attend_by_flex(query, key, value, layout.paths, None, None, 50.0, None),
        "blocks": lambda: packed_attention(torch.nn.Module(), query, key, value, None, layout=in_blocks)[0],
    }

    def differentiate(attend: Callable[[], torch.Tensor]) -> None:
        torch.autograd.grad(attend(), inputs, grad)

    for kind, attend in ways.items():
        torch.cuda.reset_peak_memory_stats()
        ms = median_ms(partial(differentiate, attend), rounds)
        row[kind] = {
            "ms": ms,
            "tflops": needed_flops(*pieces) / ms / 1e9,
            "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="where all figures go")
    options = parser.parse_args()
    rows = []
    print(f"{'pack':>28}  {'tokens':>7}" + "".join(f"  {way + ' ms':>9}  {'TFLOP/s':>8}" for way in WAYS))
    for total in (4096, 16384, 32768):
        packs = {
            "one sequence": own_sequences(total, total),
            "sequences of 1,024": own_sequences(total, 1024),
            "256 shared by 8 of 448": shared_prompts(total, 256, 448),
            "1,024 shared by 8 of 128": shared_prompts(total, 1024, 128),
        }
        for name, pieces in packs.items():
            row = measure(name, pieces, options.rounds)
            rows.append(row)
            figures = "".join(f"  {row[way]['ms']:9.2f}  {row[way]['tflops']:8.0f}" for way in WAYS)
            print(f"{name:>28}  {row['tokens']:7}{figures}", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"card": torch.cuda.get_device_name(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
