"""How fast an engine's linear layers multiply on CPU, by number of rows: as torch does, filled up to 16 rows, and by `linear.cpp`.

    python tests/bench/linear.py          # half a minute; --threads 2

The matrices are those of 8 layers of the 8 M-parameter model that is compared with TRL, one after the other, as in an engine's step.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from bench_models import CASES
from torch import Tensor

from rlsys.forward import exact
from workers.cpu.linear import LinearFunction, compiled_linear

ROUNDS, SPAN_S = 5, 0.1
ROWS = (1, 4, 8, 16, 24, 32, 64, 128, 256)


def matrices() -> list[Tensor]:
    case = CASES["8m"]
    shapes = [(2 * case.hidden, case.hidden), (case.hidden, case.hidden), (2 * case.inner, case.hidden)]
    return [torch.randn(shape) for _ in range(case.layers) for shape in (*shapes, (case.hidden, case.inner))]


def rate(product: LinearFunction, weights: list[Tensor], rows: int) -> float:
    """GFLOP/s of going through all matrices."""
    inputs = {width: torch.randn(rows, width) for width in {w.shape[1] for w in weights}}
    passes, began = 0, time.perf_counter()
    while time.perf_counter() - began < SPAN_S:
        for weight in weights:
            product(inputs[weight.shape[1]], weight, None)
        passes += 1
    return 2e-9 * rows * sum(w.numel() for w in weights) * passes / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    weights = matrices()
    products = {"torch": F.linear, "filled up": exact.linear, "linear.cpp": compiled_linear()}
    print("GFLOP/s by rows".ljust(18) + "".join(f"{rows:>8}" for rows in ROWS))
    times = {
        (name, rows): [rate(product, weights, rows) for _ in range(ROUNDS)]
        for rows in ROWS
        for name, product in products.items()
    }
    for name in products:
        print(name.ljust(18) + "".join(f"{statistics.median(times[name, rows]):>8.0f}" for rows in ROWS))


if __name__ == "__main__":
    main()
