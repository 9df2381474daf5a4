"""Compiling is allowed where there is a compiler, and where there is none it says so."""

import os
from collections.abc import Iterator

import pytest
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor

from rlsys.config.schema import ConfigError
from workers.cpu import compiling


@pytest.fixture
def disabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process of a nursery."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with dynamo.patch(disable=True), inductor.patch(compile_threads=8):
        yield


def test_what_a_nursery_has_disabled_is_allowed_in_this_process_alone(disabled: None) -> None:
    compiling.allow_compiling("policy.compile", "policy.compile false")
    assert not dynamo.disable
    assert "TORCH_COMPILE_DISABLE" not in os.environ
    assert inductor.compile_threads == 1


def test_without_a_compiler_it_says_what_to_do(disabled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ConfigError, match=r"policy.compile needs a C\+\+ compiler .* no-such-compiler is not found"
    ) as e:
        compiling.allow_compiling("policy.compile", "policy.compile false")
    assert str(e.value).endswith("or use policy.compile false.")
    assert dynamo.disable
