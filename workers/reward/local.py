"""Reward processes without Ray, to score saved samples. Deadlines, crashes and failures are handled as in a run."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from rlsys.rewards.settings import RewardSettings
from workers.reward.dispatch import ASYNC_LISTS, Dispatcher, Submit, dispatch_limits
from workers.reward.runner import RewardRunner


@contextmanager
def local_rewards(settings: RewardSettings) -> Iterator[Dispatcher]:
    """`with local_rewards(settings) as rewards: rewards.judge([RewardItem("", inputs), …]).result()`"""
    with ExitStack() as stack:
        runners = [RewardRunner(settings) for _ in range(settings.workers)]
        for runner in runners:
            stack.callback(runner.close)
        ready_infos = [runner.ready.result() for runner in runners]  # raises what is wrong with a function
        threads = stack.enter_context(ThreadPoolExecutor(len(runners) * ASYNC_LISTS))

        def make_submit(runner: RewardRunner) -> Submit:
            return lambda items: threads.submit(runner.judge, items)

        submits = {f"reward-{i}": make_submit(runner) for i, runner in enumerate(runners)}
        yield Dispatcher(submits, **dispatch_limits(settings, ready_infos[0]))
