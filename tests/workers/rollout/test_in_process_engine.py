"""The engine of CPU runs, without Ray."""

from collections.abc import Callable

import pytest
from engine_script import run_script

from rlsys.config.schema import Config
from workers.rollout.engine_settings import engine_arguments

# The first call has all it asked for, and ends only after a second call has asked for the same again.
SAME_REQUEST_TWICE = """
import asyncio, json, sys
from rlsys.types import Request
from workers.rollout.in_process_engine import InProcessEngine
from workers.rollout.vllm_requests import Stops

settings = json.load(sys.stdin)
engine = InProcessEngine(settings)
request = Request("p0", 0, [2, 3, 4, 5], seed=1, temperature=1.0, max_new_tokens=6, ignore_end=True)

async def main():
    first = engine.generate([request], Stops([]))
    [before] = await anext(first)
    second = engine.generate([request], Stops([]))
    sampling = asyncio.ensure_future(anext(second))
    await asyncio.sleep(0)
    await first.aclose()
    [after] = await asyncio.wait_for(sampling, 30)
    print("same", before.outputs[0].token_ids == after.outputs[0].token_ids)

asyncio.run(main())
"""


@pytest.mark.long
def test_a_call_that_ends_late_does_not_abort_the_same_request_of_the_next(
    tiny: Callable[..., Config], model: str
) -> None:
    settings = engine_arguments(tiny(), model, "rlsys_host_memory", 18)
    done = run_script(SAME_REQUEST_TWICE, settings)
    assert "same True" in done.stdout, done.stderr[-2000:]
