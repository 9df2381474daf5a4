"""Engines wait for each part of the weights until every rank has sent it."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from workers.rollout import rollout_worker
from workers.sync import transport


def test_a_part_has_arrived_when_all_ranks_have_answered(ray: Any) -> None:
    @ray.remote
    def answer(text: str, seconds: float) -> str:
        time.sleep(seconds)
        return text

    async def wait() -> list[str]:
        return await transport.wait_for_part([answer.remote("rank 0", 0.5), answer.remote("rank 1", 0.0)])

    assert asyncio.run(wait()) == ["rank 0", "rank 1"]
    assert asyncio.run(transport.wait_for_part([])) == []


def test_an_engine_reports_the_failure_of_a_rank_only_after_a_grace_period(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @ray.remote
    def fail() -> None:
        raise FloatingPointError("up_proj is not finite")

    async def update_infos(parts: list[Any]) -> AsyncIterator[Any]:
        for refs in parts:
            yield await transport.wait_for_part(refs)

    async def load() -> float:
        engine: Any = SimpleNamespace(receiver=SimpleNamespace(update_infos=update_infos))
        engine.loaded_parts = defaultdict(asyncio.Event)
        waiting = asyncio.create_task(rollout_worker.RolloutWorker.wait_until_loaded(engine, 0))
        loading = asyncio.create_task(rollout_worker.RolloutWorker.load_parts(engine, [[fail.remote()]]))
        await waiting  # a rank that waits to send the next part
        start = time.monotonic()
        with pytest.raises(FloatingPointError, match="up_proj"):
            await loading
        return time.monotonic() - start

    monkeypatch.setattr(rollout_worker, "GRACE_S", 1.0)
    assert asyncio.run(load()) > 0.9
