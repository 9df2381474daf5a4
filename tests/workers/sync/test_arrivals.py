"""Engines wait for each part of the weights until every rank has sent it."""

import asyncio
import time
from typing import Any

import pytest

from workers.sync import arrivals


def test_a_part_is_there_when_all_ranks_have_answered(ray: Any) -> None:
    @ray.remote
    def answer(what: str, seconds: float) -> str:
        time.sleep(seconds)
        return what

    async def both() -> list[str]:
        return await arrivals.wait_for_part([answer.remote("rank 0", 0.5), answer.remote("rank 1", 0.0)])

    assert asyncio.run(both()) == ["rank 0", "rank 1"]
    assert asyncio.run(arrivals.wait_for_part([])) == []


def test_a_rank_that_failed_is_left_to_the_driver_for_a_while_and_then_ends_who_waits(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @ray.remote
    def failing() -> None:
        raise FloatingPointError("up_proj is not finite")

    async def waiting() -> None:
        await arrivals.wait_for_part([failing.remote()])

    monkeypatch.setattr(arrivals, "GRACE_S", 1.0)
    began = time.monotonic()
    with pytest.raises(FloatingPointError, match="up_proj"):
        asyncio.run(waiting())
    assert time.monotonic() - began > 1.0
