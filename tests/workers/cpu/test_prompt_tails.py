"""A prompt is computed once per group, in a real engine, and each sample is what it is alone."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from engine_script import run_script

from rlsys.config.schema import Config
from workers.rollout.engine_settings import engine_arguments

pytestmark = pytest.mark.long

SAMPLES = 4
GENERATE = """
import asyncio, json, sys
from rlsys.types import Request
from workers.rollout.in_process_engine import InProcessEngine
from workers.rollout.vllm_requests import Stops

given = json.load(sys.stdin)
engine = InProcessEngine(given["settings"])
core = engine.engine.engine_core.engine_core
schedule, computed, preempted = core.scheduler.schedule, [], []

def count_tokens(*arguments):
    output = schedule(*arguments)
    computed.append(output.total_num_scheduled_tokens)
    preempted.extend(output.preempted_req_ids or ())
    return output

core.scheduler.schedule = count_tokens

def requests(prompt, new_tokens, part=slice(None)):
    tokens = [2 + (7 * i + prompt) % 11 for i in range(prompt)]
    return [
        Request(f"p{prompt}", i, tokens, seed=100 * prompt + i, temperature=1.0, max_new_tokens=n, ignore_end=True)
        for i, n in list(enumerate(new_tokens))[part]
    ]

async def generate(asked):
    samples = {}
    async for outputs in engine.generate(asked, Stops([])):
        samples |= {o.request_id: [list(o.outputs[0].token_ids), list(o.outputs[0].logprobs.logprobs)] for o in outputs}
    await engine.reset_prefix_cache()
    return samples

async def abort_the_first(new_tokens):
    "The first sample's call ends while the others wait for its tail."
    first = engine.generate(requests(44, new_tokens, slice(1)), Stops([]))
    begun = asyncio.ensure_future(anext(first))
    others = asyncio.ensure_future(generate(requests(44, new_tokens, slice(1, None))))
    await asyncio.sleep(0)
    begun.cancel()
    return await others

async def main():
    prompts, new_tokens = given["prompts"], given["new_tokens"]
    together = await generate([r for prompt in prompts for r in requests(prompt, new_tokens)])
    counted = sum(computed)
    if given["abort"]:
        together = await abort_the_first(new_tokens)
    alone = {}
    for prompt in prompts:
        for i in range(len(new_tokens)):
            alone |= await generate(requests(prompt, new_tokens, slice(i, i + 1)))
    left = core.scheduler.connector
    print("result", json.dumps([together, alone, counted, len(preempted), sum(map(len, (left.requests_of, left.prompt_of, left.have_waited)))]))

asyncio.run(main())
"""


def generate(
    config: Config, model: str, prompts: list[int], new_tokens: list[int], abort: bool = False, **settings: Any
) -> Any:
    settings = engine_arguments(config, model, "rlsys_host_memory", 64) | settings
    given = {"settings": settings, "prompts": prompts, "new_tokens": new_tokens, "abort": abort}
    done = run_script(GENERATE, given)
    results = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    assert results, done.stderr[-3000:]
    together, alone, computed, preempted, left = json.loads(results[0].removeprefix("result "))
    assert together == {name: alone[name] for name in together}
    assert left == 0, "finished requests are forgotten"
    return computed, preempted


PROMPTS = [3, 20, 31, 32, 33, 34, 50]


@pytest.mark.parametrize("overrides", [(), ("rollout.exact=true",)])
def test_all_but_the_last_token_of_a_prompt_is_computed_once(
    tiny: Callable[..., Config], model: str, overrides: tuple[str, ...]
) -> None:
    computed, _ = generate(tiny(*overrides), model, PROMPTS, [2] * SAMPLES)
    assert computed == sum(prompt + SAMPLES - 1 + SAMPLES for prompt in PROMPTS)


def test_samples_that_start_later_copy_from_one_that_still_runs(tiny: Callable[..., Config], model: str) -> None:
    """Two at a time: the second sample outlives the first, the third the second."""
    new_tokens = [3, 6, 6, 2]
    computed, _ = generate(tiny("rollout.max_sequences=2"), model, [44], new_tokens)
    assert computed == 44 + SAMPLES - 1 + sum(n - 1 for n in new_tokens)


def test_samples_wait_once_for_one_that_ends_with_its_first_token(tiny: Callable[..., Config], model: str) -> None:
    computed, _ = generate(tiny(), model, [44], [1, 3, 3, 3])
    assert computed == 44 + 3 * (44 - 32) + 3 * 2, "they share the full block, and compute the rest themselves"


def test_samples_that_lose_their_blocks_are_not_copied_from(tiny: Callable[..., Config], model: str) -> None:
    _, preempted = generate(tiny(), model, [30, 31], [8, 20, 30, 12], num_gpu_blocks_override=6)
    assert preempted


def test_samples_do_not_wait_for_one_that_was_aborted(tiny: Callable[..., Config], model: str) -> None:
    generate(tiny(), model, [44], [3] * SAMPLES, abort=True)
