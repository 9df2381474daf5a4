"""Requests that need no cache block: vLLM's scheduler decides the same without asking its allocator."""

import random
from pathlib import Path
from typing import Any

import pytest
from core_scheduler import Core, make_request, make_scheduler, plain

from workers.rollout.kv_slots import skip_needless_allocations


def skipping(vllm_config: Any, **parts: Any) -> Any:
    scheduler = plain(vllm_config, **parts)
    skip_needless_allocations(scheduler)
    return scheduler


def history(scheduler: Any, seed: int) -> list[Any]:
    """What a scheduler plans in each step for requests that come, share prompts, are preempted and aborted."""
    from vllm.v1.request import RequestStatus

    rng, core, steps, name = random.Random(seed), Core(scheduler), list[Any](), 0
    for number in range(800):
        for _ in range(rng.choice([0] * 9 + [4]) if number < 200 else 0):
            prompt = [rng.randrange(2)] * rng.choice([5, 31, 32, 33, 64, 100])
            scheduler.add_request(make_request(str(name), prompt, rng.choice([1, 20, 31, 32, 33, 90])))
            name += 1
        if scheduler.running and rng.random() < 0.05:
            scheduler.finish_requests(scheduler.running[0].request_id, RequestStatus.FINISHED_ABORTED)
        planned, _ = core.step()
        cached = planned.scheduled_cached_reqs
        new = [(r.req_id, r.block_ids, r.num_computed_tokens) for r in planned.scheduled_new_reqs]
        preempted = set(planned.preempted_req_ids or ())
        steps.append((planned.num_scheduled_tokens, new, cached.req_ids, cached.new_block_ids, preempted))
    assert not scheduler.has_requests()
    return steps


@pytest.mark.parametrize("seed", range(3))
def test_the_plan_is_the_same_and_most_tokens_do_not_ask_for_blocks(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    allocate, calls = KVCacheManager.allocate_slots, list[str]()

    def count(self: Any, request: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(request.request_id)
        return allocate(self, request, *arguments, **options)

    monkeypatch.setattr(KVCacheManager, "allocate_slots", count)
    expected = history(make_scheduler(tmp_path, plain, blocks=24), seed)
    asked_before = len(calls)
    calls.clear()
    assert history(make_scheduler(tmp_path, skipping, blocks=24), seed) == expected
    assert any(preempted for *_, preempted in expected), "the cache is small"
    assert any(tokens for _, new, *_ in expected for *_, tokens in new), "prompts are shared"
    assert len(calls) < asked_before / 2


def test_without_asynchronous_scheduling_nothing_changes(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, skipping, asynchronous=False)
    assert "allocate_slots" not in vars(scheduler.kv_cache_manager)
