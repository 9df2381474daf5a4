"""Engines wait for each part of the weights until every rank has sent it."""

import asyncio
import time
from typing import Any

import pytest

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

    async def wait() -> None:
        await transport.wait_for_part([fail.remote()])

    monkeypatch.setattr(transport, "GRACE_S", 1.0)
    start = time.monotonic()
    with pytest.raises(FloatingPointError, match="up_proj"):
        asyncio.run(wait())
    assert time.monotonic() - start > 1.0
