"""The reward pool: Ray actors, each with a process that runs reward functions, and one more for each reward model.

driver ──lists of samples──▶ RewardWorker (actor) ──▶ RewardRunner ──▶ reward process (user's code)
       ◀─verdicts, or samples that another one's end sent back──
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.config import Config
from rlsys.progress import Note
from rlsys.rewards.judge import combined, facts
from rlsys.rewards.settings import RewardSettings, services
from rlsys.types import Prompt, Sample, Verdict
from workers.process import WorkerFailed, explain, gather, settle
from workers.reward_dispatch import LISTS, Dispatcher, Submit, Verdicts, room
from workers.reward_runner import Answer, Item, RewardRunner

OPTIONS = {"max_concurrency": LISTS + 1, "max_restarts": 3, "max_task_retries": 3}  # Ray's


def name(service: int, index: int) -> str:
    """Of a worker: reward-0, reward-1, …; reward models are services of their own, reward-1-0."""
    return f"reward-{service}-{index}" if service else f"reward-{index}"


class RewardWorker:
    """The actor around a runner."""

    def __init__(self, config: Config, service: int, index: int, logs: str):
        settle(name(service, index), logs)
        self.runner = RewardRunner(services(config)[service])

    def ready(self) -> dict[str, Any]:
        """Waits until the reward functions are imported; raises what is wrong with them."""
        return self.runner.ready.result()

    def judge(self, items: list[Item]) -> list[Answer]:
        return self.runner.judge(items)


@dataclass
class Service:
    """Workers that run the same functions."""

    settings: RewardSettings
    actors: dict[str, Any]  # by name
    dispatcher: Dispatcher | None = None


class RewardPool:
    """Deals samples to the workers. Implements `rlsys.interfaces.Rewards`."""

    def __init__(self, config: Config, actors: list[list[Any]], logs: Path):
        self.config, self.logs = config, logs
        self.services = [
            Service(s, {name(n, i): a for i, a in enumerate(own)})
            for n, (s, own) in enumerate(zip(services(config), actors, strict=True))
        ]

    def start(self, note: Note = lambda _: None) -> None:
        limit = self.config.cluster.start_timeout_s
        calls = {
            name: a.ready.options(max_task_retries=0).remote() for s in self.services for name, a in s.actors.items()
        }
        ready = gather(calls, "starting the reward pool", limit, self.logs)
        for service in self.services:
            first = ready[next(iter(service.actors))]
            service.dispatcher = Dispatcher(
                [self.submit(name, actor) for name, actor in service.actors.items()], **room(service.settings, first)
            )
        for said in dict.fromkeys(said for found in ready.values() for said in found["notes"]):
            note(said)

    def submit(self, name: str, actor: Any) -> Submit:
        def call(items: list[Item]) -> Future[list[Answer]]:
            answers: Future[list[Answer]] = Future()

            def done(ref: "Future[list[Answer]]") -> None:
                error = ref.exception()
                if error is None:
                    answers.set_result(ref.result())
                else:
                    answers.set_exception(explain(error, name, "judging samples", self.logs))  # type: ignore[arg-type]

            actor.judge.remote(items).future().add_done_callback(done)
            return answers

        return call

    def judge(self, samples: list[Sample], prompts: dict[str, Prompt]) -> Future[list[Verdict]]:
        items = [Item(prompts[s.uid].rewards, facts(prompts[s.uid], s)) for s in samples]
        parts = []
        for service in self.services:
            assert service.dispatcher is not None
            which = [i for i, item in enumerate(items) if item.set in service.settings.functions]
            parts.append((which, service.dispatcher.judge([items[i] for i in which])))
        return Sum(len(samples), parts, self.config.cluster.call_timeout_s, self.logs)


class Sum(Future[list[Verdict]]):
    """What several services say of the same samples, added up when the last one has said it."""

    def __init__(self, count: int, parts: Sequence[tuple[list[int], Verdicts]], timeout_s: float, logs: Path):
        super().__init__()
        self.count, self.parts, self.timeout_s, self.logs = count, parts, timeout_s, logs
        self.missing, self.lock = len(parts), threading.Lock()
        for _, verdicts in parts:
            verdicts.add_done_callback(self.one)

    def one(self, done: "Future[list[Verdict]]") -> None:
        with self.lock:
            self.missing -= 1
            if self.done():
                return
            if error := done.exception():
                self.set_exception(error)
            elif not self.missing:
                of_sample: list[list[Verdict]] = [[] for _ in range(self.count)]
                for which, verdicts in self.parts:
                    for i, verdict in zip(which, verdicts.result(), strict=True):
                        of_sample[i].append(verdict)
                self.set_result([combined(found) for found in of_sample])

    def result(self, timeout: float | None = None) -> list[Verdict]:
        try:
            return super().result(timeout or self.timeout_s)
        except TimeoutError:
            missing = sum(verdicts.missing for _, verdicts in self.parts)
            raise WorkerFailed(
                f"judging samples: {missing} verdicts are missing after {timeout or self.timeout_s:g} s "
                f"(cluster.call_timeout_s). Logs: {self.logs}"
            ) from None
