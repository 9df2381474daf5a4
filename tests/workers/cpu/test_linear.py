"""Products of a compiled engine: correct, and for each row the same bits beside any others."""

import time
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.config as dynamo
import torch.nn.functional as F

from rlsys.forward import exact
from workers.cpu import linear


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def compiled() -> Iterator[None]:
    with dynamo.patch(disable=False):
        yield


@pytest.mark.parametrize(("width", "columns"), [(16, 1), (64, 7), (256, 512), (896, 1151), (1536, 256)])
def test_a_row_has_the_same_bits_alone_beside_others_and_with_two_threads(width: int, columns: int) -> None:
    weight, bias, rows = random(columns, width), random(columns, seed=1), random(130, width, seed=2)
    product = linear.compiled_linear()
    whole = product(rows, weight, bias)
    expected = F.linear(rows.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), expected, atol=1e-6 * width, rtol=1e-6)
    for count in (1, 2, 3, 4, 5, 31, 32, 33, 64, 129):
        assert torch.equal(product(rows[-count:], weight, bias), whole[-count:]), count
    assert torch.equal(product(rows.view(10, 13, width), weight, bias), whole.view(10, 13, columns))
    assert torch.equal(product(rows.t().contiguous().t(), weight, bias), whole)  # rows that are not contiguous
    torch.testing.assert_close(product(rows, weight, None) + bias, whole)
    assert product(rows[:0], weight, bias).shape == (0, columns)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(product(rows, weight, bias), whole)
    finally:
        torch.set_num_threads(threads)


def test_few_rows_are_not_far_slower_than_with_torchs_library() -> None:
    """With more sums than registers it took six times as long. Which of the two is faster depends on the machine
    (`tests/bench/linear.py`)."""
    weight, rows = random(2048, 256), random(16, 256, seed=1)
    products = {"ours": linear.compiled_linear(), "torch": F.linear}
    least = dict.fromkeys(products, float("inf"))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for _ in range(200):
            for name, product in products.items():
                began = time.perf_counter()
                product(rows, weight, None)
                least[name] = min(least[name], time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    assert least["ours"] < 3 * least["torch"], least


@pytest.mark.usefixtures("compiled")
def test_an_unsupported_matrix_is_multiplied_by_the_exact_function() -> None:
    assert linear.linear_for(random(8, 32)) is linear.compiled_linear()
    for weight in (random(8, 24), random(8, 32).bfloat16(), random(32, 8).t()):
        product, rows = linear.linear_for(weight), random(5, weight.shape[1], seed=1).to(weight.dtype)
        assert product is linear.exact_linear_op()
        assert torch.equal(product(rows, weight, None), exact.linear(rows, weight))


@pytest.mark.long
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("width", [32, 24])
def test_it_compiles_for_any_number_of_rows(width: int) -> None:
    weight, bias = random(8, width), random(8, seed=1)
    product = linear.linear_for(weight)
    layer = torch.compile(lambda x: product(x, weight, bias).relu(), dynamic=True, fullgraph=True)
    for count in (2, 3, 40, 300):
        rows = random(count, width, seed=count)
        assert torch.equal(layer(rows), product(rows, weight, bias).relu())


def test_an_engine_that_is_not_compiled_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "compiled_linear", lambda: pytest.fail("it was compiled"))
    with dynamo.patch(disable=True):
        assert linear.linear_for(random(8, 32)) is exact.linear
