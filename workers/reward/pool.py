"""The reward pool: Ray actors, each with a process that runs reward functions, and one more for each reward model.

driver ──lists of samples──▶ RewardWorker (actor) ──▶ RewardRunner ──▶ reward process (user's code)
       ◀─verdicts, or samples that another one's end sent back──
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlsys.config.schema import Config
from rlsys.rewards.judge import combine_verdicts, reward_inputs
from rlsys.rewards.settings import RewardSettings, reward_services, worker_name
from rlsys.runs.errors import WorkerLost
from rlsys.runs.timeline import recorded
from rlsys.types import Prompt, Sample, Verdict
from workers.reward.dispatch import ASYNC_LISTS, Dispatcher, PendingVerdicts, Submit, dispatch_limits
from workers.reward.supervisor import JudgeResult, RewardItem, RewardRunner
from workers.supervision.process_registry import kill_processes
from workers.supervision.watchdog import POLL_S, Watchdog, explain_failure
from workers.supervision.worker_setup import setup_worker_process

# Ray's: it starts a worker again that is lost, and gives it again what it was at.
RAY_OPTIONS = {"max_concurrency": ASYNC_LISTS + 1, "max_restarts": -1, "max_task_retries": -1}


def worker_numbers(name: str) -> tuple[int, int]:
    """Service and index of the worker of that name."""
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
    dispatcher: Dispatcher | None = None


class RewardPool:
    """Deals samples to the workers. Implements `rlsys.interfaces.Rewards`."""

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        self.config, self.watchdog = config, watchdog
        self.services = [
            RewardService(s, {name: spawn(name) for i in range(s.workers) for name in [worker_name(n, i)]})
            for n, s in enumerate(reward_services(config))
        ]

    def start(self) -> None:
        limit = self.config.cluster.start_timeout_s
        calls = {
            name: a.ready.options(max_task_retries=0).remote() for s in self.services for name, a in s.actors.items()
        }
        ready = self.watchdog.gather(calls, "starting the reward pool", limit)
        for service in self.services:
            first = ready[next(iter(service.actors))]
            service.dispatcher = Dispatcher(
                {name: self.submit(name, actor) for name, actor in service.actors.items()},
                **dispatch_limits(service.settings, first),
            )
        for said in dict.fromkeys(said for found in ready.values() for said in found["notes"]):
            self.watchdog.note(said)

    def submit(self, name: str, actor: Any) -> Submit:
        def call(items: list[RewardItem]) -> Future[list[JudgeResult]]:
            answers: Future[list[JudgeResult]] = Future()

            def done(ref: "Future[list[JudgeResult]]") -> None:
                error = ref.exception()
                if error is None:
                    answers.set_result(ref.result())
                else:
                    answers.set_exception(explain_failure(error, name, "judging samples", self.watchdog.logs))  # type: ignore[arg-type]

            actor.judge.remote(items).future().add_done_callback(done)
            return answers

        return call

    def judge(self, samples: list[Sample], prompts: dict[str, Prompt]) -> Future[list[Verdict]]:
        items = [RewardItem(prompts[s.uid].rewards, reward_inputs(prompts[s.uid], s)) for s in samples]
        parts = []
        for service in self.services:
            assert service.dispatcher is not None
            which = [i for i, item in enumerate(items) if item.function_set in service.settings.functions]
            parts.append((which, service.dispatcher.judge([items[i] for i in which])))
        return CombinedVerdicts([s.uid for s in samples], parts, self)

    def waiting_samples(self) -> int:
        """Samples that no reward process has taken yet. May be asked at any time, by any thread."""
        return sum(len(s.dispatcher.waiting) for s in self.services if s.dispatcher is not None)

    def replace_stalled_workers(self, waited_s: float, uids: list[str]) -> None:
        """Ends the workers that have samples and say nothing: Ray starts them again, with the same samples."""
        late = {
            name: s.actors[name]
            for s in self.services
            if s.dispatcher is not None
            for name in s.dispatcher.busy_workers()
        }
        lost = self.watchdog.report_stall(list(late), "judging samples", waited_s, uids)
        if not late or not isinstance(lost, WorkerLost):
            raise lost
        self.watchdog.event("replaced", worker=", ".join(late), cause=str(lost))
        kill_processes(list(late), self.watchdog.logs)


class CombinedVerdicts(Future[list[Verdict]]):
    """What several services say of the same samples, added up when the last one has said it."""

    def __init__(self, uids: list[str], parts: Sequence[tuple[list[int], PendingVerdicts]], pool: RewardPool):
        super().__init__()
        self.uids, self.parts, self.pool = uids, parts, pool
        self.open, self.lock = len(parts), threading.Lock()
        for _, verdicts in parts:
            verdicts.add_done_callback(self.one)

    def one(self, done: "Future[list[Verdict]]") -> None:
        with self.lock:
            self.open -= 1
            if self.done():
                return
            if error := done.exception():
                self.set_exception(error)
            elif not self.open:
                of_sample: list[list[Verdict]] = [[] for _ in self.uids]
                for which, verdicts in self.parts:
                    for i, verdict in zip(which, verdicts.result(), strict=True):
                        of_sample[i].append(verdict)
                self.set_result([combine_verdicts(found) for found in of_sample])

    def missing(self) -> int:
        return sum(verdicts.missing for _, verdicts in self.parts)

    def result(self, timeout: float | None = None) -> list[Verdict]:
        """Waits as long as verdicts come in: workers from which none does have stalled."""
        patience, missing = self.pool.watchdog.start_timer(timeout or 0), self.missing()
        while True:
            try:
                return super().result(POLL_S)
            except TimeoutError:
                if self.done():  # it came just now
                    return super().result()
            if missing != self.missing():
                missing = self.missing()
                patience.reset()
            elif waited := patience.expired():
                self.pool.replace_stalled_workers(waited, list(dict.fromkeys(self.uids)))
                patience.reset(self.pool.config.cluster.start_timeout_s)
