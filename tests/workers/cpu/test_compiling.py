"""Compilation is enabled where there is a compiler; where there is none, the error says what to do."""

import os
from collections.abc import Iterator

import pytest
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor

from rlsys.errors import ConfigError
from workers.cpu import compiling


@pytest.fixture
def disabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disables compilation, as in a forked worker."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with dynamo.patch(disable=True), inductor.patch(compile_threads=8):
        yield


def test_a_forked_worker_can_enable_compilation(disabled: None) -> None:
    compiling.allow_compiling("policy.compile", "policy.compile false")
    assert not dynamo.disable
    assert "TORCH_COMPILE_DISABLE" not in os.environ
    assert inductor.compile_threads == 1


def test_without_a_compiler_the_error_says_what_to_do(disabled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ConfigError, match=r"policy.compile needs a C\+\+ compiler .* no-such-compiler is not found"
    ) as e:
        compiling.allow_compiling("policy.compile", "policy.compile false")
    assert str(e.value).endswith("or use policy.compile false.")
    assert dynamo.disable
