"""The products of an engine's linear layers on CPU.

The weights stay as the policy wrote them, and a row's result does not depend on the other rows of the batch. An engine
that is not compiled multiplies with `rlsys.forward.exact`. A compiled one has a C++ compiler, and uses `linear.cpp`. A
matrix library first copies the weights into its own layout, which pays off with many rows; a step of an engine has one
row per running sample.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch._dynamo.config as dynamo
from torch import Tensor

from rlsys.forward import exact

LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
LIBRARY = torch.library.Library("rlsys", "FRAGMENT")
LANES = 16  # of linear.cpp, at most: it reads a row of weights in steps of this many numbers


def linear_for(weight: Tensor) -> LinearFunction:
    """Returns the function that multiplies with this matrix. It is called as `F.linear` is."""
    if dynamo.disable:
        return exact.linear
    fits = weight.dtype == torch.float32 and weight.is_contiguous() and weight.shape[1] % LANES == 0
    return compiled_linear() if fits else exact_linear_op()


@cache
def compiled_linear() -> LinearFunction:
    from torch._inductor.codecache import CppCodeCache

    source = Path(__file__).with_suffix(".cpp").read_text()
    cache_key = f"-DFOR_{torch.backends.cpu.get_cpu_capability()}"  # machines with other CPUs may share the cache
    flags = ("-ffp-contract=fast", cache_key)  # a product is added before it is rounded
    CppCodeCache.load(source, extra_flags=flags)
    torch.library.register_fake("rlsys::linear", output_shape)
    return torch.ops.rlsys.linear.default


@cache
def exact_linear_op() -> LinearFunction:
    """Wraps `exact.linear` in a custom operator: a compiler must not trace code that depends on the number of rows."""
    LIBRARY.define("exact_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    LIBRARY.impl("exact_linear", exact.linear, "CPU")
    torch.library.register_fake("rlsys::exact_linear", output_shape, lib=LIBRARY)
    return torch.ops.rlsys.exact_linear.default


def output_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
