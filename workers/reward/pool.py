"""The reward pool: Ray actors that each run reward functions in a process, and further actors for reward models.

driver ──lists of samples──▶ RewardWorker (actor) ──▶ RewardRunner ──▶ reward process (user's code)
       ◀──verdicts, or samples to be retried──
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlsys.config.schema import Config
from rlsys.errors import WorkerLost
from rlsys.rewards.judge import combine_verdicts, reward_inputs
from rlsys.rewards.settings import RewardSettings, reward_services, worker_name
from rlsys.runs.timeline import recorded
from rlsys.types import Prompt, Sample, Verdict
from workers.fleet.process_registry import restart_actors
from workers.fleet.ray_cluster import call_failed
from workers.fleet.replaceable_workers import MAX_ATTEMPTS
from workers.fleet.watchdog import POLL_S, Watchdog, explain_failure
from workers.reward.dispatch import ASYNC_LISTS, Dispatcher, PendingVerdicts, Submit, dispatch_limits
from workers.reward.runner import RewardRunner
from workers.reward.sample_queue import JudgeResult, RewardItem
from workers.start.worker_setup import setup_worker_process

# Ray itself restarts a lost reward worker and repeats the calls it was running.
RAY_OPTIONS = {"max_concurrency": ASYNC_LISTS + 1, "max_restarts": -1, "max_task_retries": -1}


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


@dataclass
class RewardService:
    """Workers that run the same functions."""

    settings: RewardSettings
    actors: dict[str, Any]  # by name
    dispatcher: Dispatcher | None = None  # once the workers are ready


class RewardPool:
    """Sends samples to the workers. Implements `rlsys.interfaces.Rewards`."""

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        self.config, self.watchdog = config, watchdog
        self.services = [
            RewardService(s, {name: spawn(name) for i in range(s.workers) for name in [worker_name(n, i)]})
            for n, s in enumerate(reward_services(config))
        ]

    def start(self) -> None:
        limit = self.config.cluster.start_timeout_s
        actors = {name: actor for service in self.services for name, actor in service.actors.items()}
        calls = {name: actor.ready.options(max_task_retries=0).remote() for name, actor in actors.items()}
        ready_infos = self.watchdog.gather(calls, "starting the reward pool", limit)
        for service in self.services:
            submits = {name: self.make_submit(name, actor) for name, actor in service.actors.items()}
            limits = dispatch_limits(service.settings, ready_infos[next(iter(service.actors))])
            service.dispatcher = Dispatcher(submits, **limits)
        for note in dict.fromkeys(note for info in ready_infos.values() for note in info["notes"]):
            self.watchdog.note(note)

    def make_submit(self, name: str, actor: Any) -> Submit:
        def submit(items: list[RewardItem]) -> Future[list[JudgeResult]]:
            results: Future[list[JudgeResult]] = Future()

            def on_done(call: "Future[list[JudgeResult]]") -> None:
                error = call.exception()
                if error is None:
                    results.set_result(call.result())
                else:
                    logs = self.watchdog.logs
                    failure = explain_failure(call_failed(error), name, "judging samples", logs)  # type: ignore[arg-type]
                    results.set_exception(failure)

            actor.judge.remote(items).future().add_done_callback(on_done)
            return results

        return submit

    def judge(self, samples: list[Sample], prompts: dict[str, Prompt]) -> Future[list[Verdict]]:
        items = [RewardItem(prompts[s.uid].rewards, reward_inputs(prompts[s.uid], s)) for s in samples]
        parts = []
        for service in self.services:
            assert service.dispatcher is not None
            indices = [i for i, item in enumerate(items) if item.function_set in service.settings.functions]
            parts.append((indices, service.dispatcher.judge([items[i] for i in indices])))
        return CombinedVerdicts([s.uid for s in samples], parts, self)

    def waiting_samples(self) -> int:
        """Counts the samples that no reward process has taken yet. Any thread may call it."""
        return sum(len(s.dispatcher.pending) for s in self.services if s.dispatcher is not None)

    def replace_stalled_workers(self, waited_s: float, uids: list[str], attempt: int) -> None:
        """Kills the workers that have samples and do not answer. Ray restarts them and repeats their calls."""
        stalled = [name for s in self.services if s.dispatcher is not None for name in s.dispatcher.busy_workers()]
        error = self.watchdog.report_stall(stalled, "judging samples", waited_s, uids)
        if not stalled or not isinstance(error, WorkerLost) or attempt == MAX_ATTEMPTS:
            raise error
        self.watchdog.event("replaced", worker=", ".join(stalled), cause=str(error))
        actors = {name: actor for service in self.services for name, actor in service.actors.items()}
        restart_actors({name: actors[name] for name in stalled}, self.watchdog.logs)


class CombinedVerdicts(Future[list[Verdict]]):
    """The verdicts of several services on the same samples, combined when the last one has arrived."""

    def __init__(self, uids: list[str], parts: Sequence[tuple[list[int], PendingVerdicts]], pool: RewardPool):
        super().__init__()
        self.uids, self.parts, self.pool = uids, parts, pool
        self.open_parts, self.lock = len(parts), threading.Lock()
        for _, verdicts in parts:
            verdicts.add_done_callback(self.on_part)
        if not parts:  # episodes score themselves
            self.set_result([combine_verdicts([]) for _ in uids])

    def on_part(self, part: "Future[list[Verdict]]") -> None:
        with self.lock:
            self.open_parts -= 1
            if self.done():
                return
            if error := part.exception():
                self.set_exception(error)
            elif not self.open_parts:
                by_sample: list[list[Verdict]] = [[] for _ in self.uids]
                for indices, verdicts in self.parts:
                    for i, verdict in zip(indices, verdicts.result(), strict=True):
                        by_sample[i].append(verdict)
                self.set_result([combine_verdicts(verdicts) for verdicts in by_sample])

    def count_missing(self) -> int:
        return sum(verdicts.missing for _, verdicts in self.parts)

    def result(self, timeout: float | None = None) -> list[Verdict]:
        """Waits while verdicts arrive. If none arrives for too long, the busy workers have stalled and are replaced."""
        timer, missing = self.pool.watchdog.start_timer(timeout or 0), self.count_missing()
        stalls = 0  # since the last verdict
        while True:
            try:
                return super().result(POLL_S)
            except TimeoutError:
                if self.done():  # it has arrived after the timeout
                    return super().result()
            if missing != self.count_missing():
                missing, stalls = self.count_missing(), 0
                timer.reset()
            elif waited := timer.expired():
                stalls += 1
                self.pool.replace_stalled_workers(waited, list(dict.fromkeys(self.uids)), stalls)
                timer.reset(self.pool.config.cluster.start_timeout_s)
