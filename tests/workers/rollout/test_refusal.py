"""Models that vLLM cannot run are refused in a sentence."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.types import Request
from workers.rollout import rollout_worker
from workers.rollout.refusal import refusing_model
from workers.rollout.vllm_requests import Stops


class Settings(BaseModel):
    heads: int


def refused(error: Exception) -> str:
    with pytest.raises(ConfigError) as refusal, refusing_model("some/model"):
        raise error
    return str(refusal.value)


def test_an_exception_of_a_library_becomes_one_sentence_with_a_way_out():
    message = refused(ModuleNotFoundError("No module named 'torchvision'\nand more"))
    assert message.startswith("model.path: the engines cannot run some/model here: ModuleNotFoundError: No module")
    assert message.endswith("Use another model, or a machine on which vLLM runs it.")
    assert "\n" not in message


def test_a_validation_error_is_quoted_without_its_frame():
    with pytest.raises(ValidationError) as invalid:
        Settings(heads="many")  # type: ignore[arg-type]
    assert "Input should be a valid integer" in refused(invalid.value)
    assert "https" not in refused(invalid.value)


def test_a_heading_is_quoted_with_the_line_below_it():
    message = refused(ValueError("Validation error for field 'layer_types':\n    ValueError: hash_moe is none\nmore"))
    assert "here: ValueError: Validation error for field 'layer_types': ValueError: hash_moe is none. Use" in message


class Layer:
    def split(self) -> None:
        raise AssertionError


def test_an_error_without_words_says_where_it_was_raised():
    with pytest.raises(ConfigError, match=r"here: AssertionError in Layer\.split\. Use another"), refusing_model("a"):
        Layer().split()


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("cannot allocate memory"), RuntimeError("Engine core initialization failed")]
)
def test_a_machine_that_is_short_of_something_is_no_reason_to_refuse_a_model(error):
    with pytest.raises(type(error)), refusing_model("some/model"):
        raise error


class BrokenEngine:
    """An engine that vLLM builds, and whose attention then knows no such heads."""

    def __init__(self, settings: dict[str, Any], exact: bool):
        pass

    async def generate(self, requests: list[Request], stops: Stops) -> AsyncIterator[list[Any]]:
        raise ValueError("Head dimension 64 is not supported")
        yield []


def test_an_engine_that_fails_at_its_first_tokens_is_refused_at_its_start(
    tiny: Callable[..., Config], model: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rollout_worker, "InProcessEngine", BrokenEngine)
    worker = object.__new__(rollout_worker.RolloutWorker)
    worker.config, worker.index = tiny(), 0
    with pytest.raises(
        ConfigError, match=r"cannot run .*: ValueError: Head dimension 64 is not supported\. Use another"
    ):
        asyncio.run(worker.start(model, "shared_memory", 18))
