"""The engine of several processes, seen from the one that asks."""

import gc

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from workers.rollout.async_engine import AsyncEngine


def test_a_full_garbage_collection_does_not_look_at_what_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda arguments: None)
    before = len(gc.get_objects())
    assert before > 100_000, "torch and vLLM"
    try:
        AsyncEngine({})
        assert len(gc.get_objects()) < before / 100
    finally:
        gc.unfreeze()
