"""The reward pool: Ray actors that each run reward functions in a process, and further actors for reward models.

driver ──lists of samples──▶ RewardWorker (actor) ──▶ RewardRunner ──▶ reward process (user's code)
       ◀──verdicts, or samples to be retried──
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rlsys.config.schema import Config
from rlsys.rewards.episode_verdict import add_own_verdict
from rlsys.rewards.judge import combine_verdicts, reward_inputs
from rlsys.rewards.settings import reward_services, worker_name
from rlsys.runs.timeline import recorded
from rlsys.types import Prompt, Sample, Verdict
from workers.fleet.replaceable_workers import ReplaceableWorkers
from workers.fleet.watchdog import Watchdog
from workers.reward.dispatch import ASYNC_LISTS, Dispatcher, Service
from workers.reward.runner import RewardRunner
from workers.reward.sample_queue import JudgeResult, RewardItem
from workers.start.worker_setup import setup_worker_process


def ray_options(config: Config) -> dict[str, Any]:
    return {"max_concurrency": ASYNC_LISTS + 1}


def worker_numbers(name: str) -> tuple[int, int]:
    """ "reward-1-0" → service 1, index 0;  "reward-3" → service 0, index 3"""
    *service, index = (int(part) for part in name.split("-")[1:])
    return (service or [0])[0], index


class RewardWorker:
    """The actor around a runner."""

    def __init__(self, config: Config, service: int, index: int, logs: str):
        setup_worker_process(worker_name(service, index), logs)
        self.runner = RewardRunner(reward_services(config)[service])

    def ready(self) -> dict[str, Any]:
        """Waits until the reward functions are imported; raises what is wrong with them."""
        return self.runner.ready.result()

    @recorded(lambda _, items: {"items": len(items)})
    def judge(self, items: list[RewardItem]) -> list[JudgeResult]:
        return self.runner.judge(items)


class RewardPool:
    """Sends samples to the workers. Implements `rlsys.interfaces.Rewards`."""

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        self.config, self.watchdog = config, watchdog
        self.settings = reward_services(config)
        self.names = [[worker_name(n, i) for i in range(s.workers)] for n, s in enumerate(self.settings)]
        self.workers = ReplaceableWorkers([name for names in self.names for name in names], spawn, watchdog)
        self.dispatcher: Dispatcher | None = None  # once the workers are ready

    def start(self) -> None:
        limit, doing = self.config.cluster.start_timeout_s, "starting the reward pool"
        ready_infos = self.workers.call("ready", doing=doing, limit_s=limit, replay=True)
        services = [
            Service.of_ready_workers(settings, names, ready_infos[names[0]])
            for settings, names in zip(self.settings, self.names, strict=True)
        ]
        self.dispatcher = Dispatcher(self.workers, self.watchdog, services)
        self.dispatcher.start()
        for note in dict.fromkeys(note for info in ready_infos.values() for note in info["notes"]):
            self.watchdog.note(note)

    def judge(self, samples: list[Sample], prompts: dict[str, Prompt]) -> Future[list[Verdict]]:
        """Episodes may have a verdict of their own, and no other."""
        assert self.dispatcher is not None
        items = [RewardItem(prompts[s.uid].rewards, reward_inputs(prompts[s.uid], s), uid=s.uid) for s in samples]

        def combine(place: int, verdicts: list[Verdict]) -> Verdict:
            return add_own_verdict(samples[place], combine_verdicts(verdicts))

        return self.dispatcher.judge(items, combine).future

    def waiting_samples(self) -> int:
        """Counts the samples that no reward worker has yet. Any thread may call it."""
        return self.dispatcher.waiting_count() if self.dispatcher else 0
