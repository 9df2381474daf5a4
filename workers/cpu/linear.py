"""The products of an engine's linear layers on CPU. The weights stay as the policy wrote them, and what a row of a batch gets does
not depend on the rows beside it.

Where engines are not compiled, `rlsys.packs.exact` multiplies. Where they are there is a compiler, and `linear.cpp` does. A matrix library
first copies a matrix into an order of its own, which many rows repay; a step of an engine has one row for each sample under way.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch._dynamo.config as dynamo
from torch import Tensor

from rlsys.packs import exact

LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
LIBRARY = torch.library.Library("rlsys", "FRAGMENT")
LANES = 16  # of linear.cpp, at most: a row of weights is read by so many numbers


def linear_for(weight: Tensor) -> LinearFunction:
    """What multiplies with this matrix, called as `F.linear` is."""
    if dynamo.disable:
        return exact.linear
    fits = weight.dtype == torch.float32 and weight.is_contiguous() and weight.shape[1] % LANES == 0
    return compiled_linear() if fits else exact_linear_op()


@cache
def compiled_linear() -> LinearFunction:
    from torch._inductor.codecache import CppCodeCache

    source = Path(__file__).with_suffix(".cpp").read_text()
    own = f"-DFOR_{torch.backends.cpu.get_cpu_capability()}"  # unlike machines may share the cache
    CppCodeCache.load(source, extra_flags=("-ffp-contract=fast", own))  # products are added before they are rounded
    torch.library.register_fake("rlsys::linear", output_shape)
    return torch.ops.rlsys.linear.default


@cache
def exact_linear_op() -> LinearFunction:
    """`exact.linear`, as a compiler can call it: it must not look into what depends on the number of rows."""
    LIBRARY.define("filled_up(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    LIBRARY.impl("filled_up", exact.linear, "CPU")
    torch.library.register_fake("rlsys::filled_up", output_shape, lib=LIBRARY)
    return torch.ops.rlsys.filled_up.default


def output_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
