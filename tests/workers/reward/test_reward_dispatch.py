"""Which worker gets which samples. The workers answer when the test says so."""

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from rlsys.errors import WorkerFailed, WorkerLost
from rlsys.types import Verdict
from workers.fleet.cluster import CallFailed, Receive
from workers.fleet.replaceable_workers import ReplaceableWorkers
from workers.fleet.watchdog import Watchdog
from workers.reward.dispatch import MAX_ATTEMPTS, Dispatcher, Service
from workers.reward.sample_queue import JudgeResult, RewardItem


class ManualWorker:
    """Keeps the lists it is sent until the test calls `answer`."""

    def __init__(self) -> None:
        self.lists: list[tuple[list[RewardItem], Receive]] = []
        self.dispatcher: Dispatcher | None = None

    def ask(self, items: list[RewardItem], receive: Receive) -> None:
        self.lists.append((items, receive))

    def answer(self, *answers: JudgeResult) -> None:
        items, receive = self.lists.pop(0)
        receive(list(answers) or [Verdict(i.inputs["n"]) for i in items])
        self.step()

    def fail(self, error: CallFailed) -> None:
        self.lists.pop(0)[1](error)
        self.step()

    def step(self) -> None:
        assert self.dispatcher
        self.dispatcher.step(0)

    @property
    def numbers(self) -> list[int]:
        return [item.inputs["n"] for items, _ in self.lists for item in items]


class ManualCluster:
    """An actor is a list with the worker: another list is another process."""

    def ask(self, actor: list[ManualWorker], method: str, items: list[RewardItem], receive: Receive) -> None:
        actor[0].ask(items, receive)

    def kill(self, actor: list[ManualWorker]) -> None: ...


class SteppedDispatcher(Dispatcher):
    """Without a thread: each call of `judge` sends what can be sent."""

    def judge(self, *arguments: Any) -> Any:
        judging = super().judge(*arguments)
        self.step(0)
        return judging.future


def make_dispatcher(*workers: ManualWorker, list_size: int = 1, seconds: float = 0.001) -> Dispatcher:
    by_name = {f"reward-{i}": worker for i, worker in enumerate(workers)}
    watchdog = Watchdog(Path("/nonexistent"), cluster=ManualCluster(), note=lambda text: None)  # type: ignore[arg-type]
    fleet = ReplaceableWorkers(list(by_name), lambda name: [by_name[name]], watchdog)
    service = Service({"": {}}, list(by_name), list_size, seconds_per_verdict=seconds)
    dispatcher = SteppedDispatcher(fleet, watchdog, [service])
    for worker in workers:
        worker.dispatcher = dispatcher
    return dispatcher


def make_items(*numbers: int) -> list[RewardItem]:
    return [RewardItem("", {"n": n}) for n in numbers]


def slow_dispatcher(*workers: ManualWorker, list_size: int = 1) -> Dispatcher:
    """A dispatcher that expects a second per verdict."""
    return make_dispatcher(*workers, list_size=list_size, seconds=1.0)


def test_verdicts_come_in_the_order_of_the_samples():
    one, two = ManualWorker(), ManualWorker()
    verdicts = slow_dispatcher(one, two).judge(make_items(1, 2, 3))
    assert (one.numbers, two.numbers) == ([1], [2])
    two.answer()
    assert two.numbers == [3]
    two.answer()
    assert not verdicts.done()
    one.answer()
    assert [v.score for v in verdicts.result()] == [1, 2, 3]


def test_nothing_to_judge_is_done_at_once():
    assert make_dispatcher(ManualWorker()).judge([]).result() == []


class PicklingWorker(ManualWorker):
    """Pickles what it is sent, as Ray does."""

    def ask(self, items: list[RewardItem], receive: Receive) -> None:
        pickle.dumps(items)
        super().ask(items, receive)


@pytest.mark.parametrize("seconds_per_verdict", [0.0001, 1.0])
@pytest.mark.parametrize("count", [1, 2, 500])
def test_a_row_that_cannot_be_sent_fails_alone_and_holds_up_nobody(count, seconds_per_verdict):
    worker = PicklingWorker()
    dispatcher = make_dispatcher(worker, seconds=seconds_per_verdict)
    first = dispatcher.judge(make_items(1, 2))
    bad = dispatcher.judge([RewardItem("", {"n": 0, "lock": threading.Lock()}) for _ in range(count)])
    later = [dispatcher.judge(make_items(n)) for n in (3, 4, 5)]
    while worker.lists:
        worker.answer()
    assert [v.score for v in first.result(0)] == [1, 2]
    assert [v.score for verdicts in later for v in verdicts.result(0)] == [3, 4, 5]
    assert [v.failure for v in bad.result(0)] == ["exception"] * count
    assert "cannot pickle '_thread.lock' object" in bad.result(0)[0].detail
    assert dispatcher.pool.busy == []


def test_samples_in_a_list_with_one_that_cannot_be_sent_are_judged():
    worker = PicklingWorker()
    dispatcher = make_dispatcher(worker, list_size=4)
    bad = RewardItem("", {"n": 2, "lock": threading.Lock()})
    verdicts = dispatcher.judge([*make_items(0, 1), bad, *make_items(3)])
    while worker.lists:
        worker.answer()
    assert [v.score for v in verdicts.result(0)] == [0, 1, None, 3]


def test_slow_samples_are_sent_one_by_one_and_fast_ones_in_lists():
    worker = ManualWorker()
    dispatcher = slow_dispatcher(worker)
    dispatcher.judge(make_items(*range(40)))
    assert worker.numbers == [0]
    dispatcher.services[0].seconds_per_verdict = 0.0005
    worker.answer()
    assert len(worker.lists[0][0]) > 10


def test_fast_samples_are_shared_by_all_workers():
    one, two = ManualWorker(), ManualWorker()
    dispatcher = make_dispatcher(one, two, seconds=0.0001)
    dispatcher.judge(make_items(*range(10)))
    assert len(one.lists[0][0]) == 5
    assert two.numbers


def test_a_sample_that_comes_back_is_retried_before_pending_ones():
    worker = ManualWorker()
    dispatcher = slow_dispatcher(worker, list_size=2)
    verdicts = dispatcher.judge(make_items(1, 2, 3))
    first, second = worker.lists[0][0]
    worker.answer(first, second)
    assert worker.numbers == [1, 2]
    worker.answer()
    worker.answer()
    assert [v.score for v in verdicts.result()] == [1, 2, 3]


def test_a_suspect_sample_is_judged_alone():
    worker = ManualWorker()
    dispatcher = slow_dispatcher(worker, list_size=2)
    dispatcher.judge(make_items(1, 2))
    dispatcher.judge(make_items(3, 4))
    suspect = RewardItem("", {"n": 1}, alone=True)
    worker.answer(suspect, Verdict(2.0))
    assert worker.numbers == [1]
    worker.answer()
    assert worker.numbers == [3, 4]


def test_a_sample_that_comes_back_too_often_fails():
    worker = ManualWorker()
    verdicts = slow_dispatcher(worker).judge(make_items(1))
    for _ in range(MAX_ATTEMPTS):
        worker.answer(worker.lists[0][0][0])
    assert verdicts.result()[0].failure == "crash"


def test_an_error_of_a_worker_reaches_every_pending_verdict():
    worker = ManualWorker()
    dispatcher = slow_dispatcher(worker)
    verdicts = dispatcher.judge(make_items(1, 2))
    dispatcher.start()
    worker.lists.pop(0)[1](CallFailed("trace", RuntimeError("gone")))
    assert isinstance(verdicts.exception(20), WorkerFailed)
    with pytest.raises(WorkerFailed, match="judging samples: reward-0 raised RuntimeError: gone"):
        Dispatcher.judge(dispatcher, make_items(3)).future.result(20)


@pytest.mark.parametrize("losses", [1, 2])
def test_samples_of_a_lost_worker_are_sent_again_in_their_order(losses):
    worker = ManualWorker()
    dispatcher = slow_dispatcher(worker, list_size=3)
    verdicts = dispatcher.judge(make_items(*range(5)))
    for _ in range(losses):
        _, late = worker.lists[0]
        worker.fail(CallFailed("it died"))
        late([Verdict(7.0)] * 3)  # what a process says that was replaced does not count
        worker.step()
    assert worker.numbers == [0, 1, 2]
    worker.answer()
    worker.answer()
    assert [v.score for v in verdicts.result(0)] == [0, 1, 2, 3, 4]


def test_a_worker_that_is_always_lost_ends_the_run():
    worker = ManualWorker()
    dispatcher = slow_dispatcher(worker)
    dispatcher.judge(make_items(1))
    worker.fail(CallFailed("it died"))
    worker.fail(CallFailed("it died"))
    with pytest.raises(WorkerLost, match="reward-0 was lost 3 times without an answer in between"):
        worker.fail(CallFailed("it died"))
