"""What the core of an engine spends its steps on, in the process that `decoding.py` has vLLM start.

`build_clocked` is its `scheduler_cls`. Requests whose names begin with `single` are read as vLLM reads them, token by token; others
in our blocks. When the last request of a call has ended, the core prints the parts of its steps: ms of the clock, and of the CPU.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from workers.rollout.output_blocks import build_scheduler

SINGLE = "single"
SECONDS: defaultdict[str, list[float]] = defaultdict(
    lambda: [0.0, 0.0, 0.0]
)  # by part: of the clock, of the CPU, calls
AFTER_LAST = 3  # steps that are still on their way when the last request has ended
STEP, UPDATE, WAIT = "schedule", "update_from_output", "wait in get_output"


def clocked(part: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            return work(*arguments, **options)
        finally:
            spent = time.perf_counter() - began, time.thread_time() - cpu, 1.0
            SECONDS[part] = [sum(pair) for pair in zip(SECONDS[part], spent, strict=True)]

    return call


def build_clocked(vllm_config: Any, **parts: Any) -> Any:
    """Our scheduler. The core calls it, and vLLM's executor and outputs, by the names that are replaced here."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    scheduler = build_scheduler(vllm_config, **parts)
    clock_executors()
    for kind in subclasses(AsyncModelRunnerOutput):
        if "get_output" in vars(kind):
            kind.get_output = clocked(WAIT, kind.get_output)
    scheduler.schedule = clocked(STEP, scheduler.schedule)
    switch_by_names(scheduler)
    return scheduler


def clock_executors() -> None:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    for executor in (UniProcExecutor, MultiprocExecutor):
        for name in ("execute_model", "sample_tokens"):
            setattr(executor, name, clocked(name, getattr(executor, name)))


def subclasses(kind: Any) -> list[Any]:
    direct: list[Any] = kind.__subclasses__()
    return [*direct, *(deeper for one in direct for deeper in subclasses(one))]


def switch_by_names(scheduler: Any) -> None:
    """Both ways in one engine: a comparison of two engines would be one of two starts."""
    manager, add = scheduler.kv_cache_manager, scheduler.add_request
    ways = {
        False: (scheduler.update_from_output, manager.allocate_slots),
        True: (type(scheduler).update_from_output.__get__(scheduler), type(manager).allocate_slots.__get__(manager)),
    }

    def add_request(request: Any) -> None:
        if not scheduler.requests:
            SECONDS.clear()
            update, manager.allocate_slots = ways[request.request_id.startswith(SINGLE)]
            timed = clocked(UPDATE, update)

            def update_and_report(*arguments: Any) -> Any:
                messages = timed(*arguments)
                if not scheduler.requests and SECONDS[UPDATE][2] > AFTER_LAST:
                    report()
                return messages

            scheduler.update_from_output = update_and_report
        add(request)

    scheduler.add_request = add_request


def report() -> None:
    import torch

    steps = SECONDS[UPDATE][2]
    parts = (f"{name} {1e3 * clock / steps:.2f} ({1e3 * cpu / steps:.2f})" for name, (clock, cpu, _) in SECONDS.items())
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    print(f"    core, ms a step: {', '.join(parts)}; {memory:.2f} GiB allocated at most", flush=True)
    SECONDS.clear()
