"""Reward processes without Ray, to score saved samples. Deadlines, crashes and failures are handled as in a run."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlsys.rewards.settings import RewardSettings, worker_name
from workers.fleet.cluster import CallFailed, Receive
from workers.fleet.replaceable_workers import ReplaceableWorkers
from workers.fleet.watchdog import Watchdog
from workers.reward.dispatch import ASYNC_LISTS, Dispatcher, Service
from workers.reward.runner import RewardRunner


@contextmanager
def local_rewards(services: list[RewardSettings]) -> Iterator[Dispatcher]:
    """`with local_rewards([settings]) as rewards: rewards.judge([RewardItem("", inputs), …]).future.result()`"""
    with ExitStack() as stack:
        names = [[worker_name(n, i) for i in range(s.workers)] for n, s in enumerate(services)]
        runners = {name: RewardRunner(services[n]) for n, of_service in enumerate(names) for name in of_service}
        for runner in runners.values():
            stack.callback(runner.close)
        ready_infos = {name: runner.ready.result() for name, runner in runners.items()}  # raises what is wrong
        threads = stack.enter_context(ThreadPoolExecutor(len(runners) * ASYNC_LISTS))
        watchdog = Watchdog(Path(), stall_s=float("inf"), cluster=ThreadCluster(threads))  # type: ignore[arg-type]
        stack.callback(watchdog.stop.end_now)
        dispatcher = Dispatcher(
            ReplaceableWorkers(list(runners), runners.__getitem__, watchdog),
            watchdog,
            [
                Service.of_ready_workers(s, of_service, ready_infos[of_service[0]])
                for s, of_service in zip(services, names, strict=True)
            ],
        )
        dispatcher.start()
        yield dispatcher


class ThreadCluster:
    """The part of a `Cluster` that a dispatcher needs, for objects of this process."""

    def __init__(self, threads: ThreadPoolExecutor):
        self.threads = threads

    def ask(self, actor: Any, method: str, *arguments: Any, receive: Receive) -> None:
        def on_done(done: "Future[Any]") -> None:
            error = done.exception()
            receive(CallFailed(str(error), error) if error else done.result())

        self.threads.submit(getattr(actor, method), *arguments).add_done_callback(on_done)
