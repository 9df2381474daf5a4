"""Which worker gets which samples. The workers answer when the test says so."""

import pickle
import threading
from concurrent.futures import Future

import pytest

from rlsys.types import Verdict
from workers.reward.dispatch import MAX_ATTEMPTS, Dispatcher
from workers.reward.sample_queue import JudgeResult, RewardItem


class ManualWorker:
    """Keeps the lists it is sent until the test calls `answer`."""

    def __init__(self) -> None:
        self.lists: list[tuple[list[RewardItem], Future[list[JudgeResult]]]] = []

    def submit(self, items: list[RewardItem]) -> "Future[list[JudgeResult]]":
        self.lists.append((items, Future()))
        return self.lists[-1][1]

    def answer(self, *answers: JudgeResult) -> None:
        items, future = self.lists.pop(0)
        future.set_result(list(answers) or [Verdict(i.inputs["n"]) for i in items])

    @property
    def numbers(self) -> list[int]:
        return [item.inputs["n"] for items, _ in self.lists for item in items]


def make_items(*numbers: int) -> list[RewardItem]:
    return [RewardItem("", {"n": n}) for n in numbers]


def slow_dispatcher(*workers: ManualWorker, list_size: int = 1) -> Dispatcher:
    """A dispatcher that expects a second per verdict."""
    dispatcher = Dispatcher({f"reward-{i}": w.submit for i, w in enumerate(workers)}, list_size=list_size)
    dispatcher.seconds_per_verdict = 1.0
    return dispatcher


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
    assert Dispatcher({"reward-0": ManualWorker().submit}).judge([]).result() == []


class PicklingWorker(ManualWorker):
    """Pickles what it is sent, as Ray does."""

    def submit(self, items: list[RewardItem]) -> "Future[list[JudgeResult]]":
        pickle.dumps(items)
        return super().submit(items)


@pytest.mark.parametrize("seconds_per_verdict", [0.0001, 1.0])
@pytest.mark.parametrize("count", [1, 2, 500])
def test_a_row_that_cannot_be_sent_fails_alone_and_holds_up_nobody(count, seconds_per_verdict):
    worker = PicklingWorker()
    dispatcher = slow_dispatcher(worker)
    dispatcher.seconds_per_verdict = seconds_per_verdict
    first = dispatcher.judge(make_items(1, 2))
    bad = dispatcher.judge([RewardItem("", {"n": 0, "lock": threading.Lock()}) for _ in range(count)])
    later = [dispatcher.judge(make_items(n)) for n in (3, 4, 5)]
    while worker.lists:
        worker.answer()
    assert [v.score for v in first.result(0)] == [1, 2]
    assert [v.score for verdicts in later for v in verdicts.result(0)] == [3, 4, 5]
    assert [v.failure for v in bad.result(0)] == ["exception"] * count
    assert "cannot pickle '_thread.lock' object" in bad.result(0)[0].detail
    assert dispatcher.busy_workers() == []


def test_samples_in_a_list_with_one_that_cannot_be_sent_are_judged():
    worker = PicklingWorker()
    dispatcher = Dispatcher({"reward-0": worker.submit}, list_size=4)
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
    dispatcher.seconds_per_verdict = 0.0005
    worker.answer()
    assert len(worker.lists[0][0]) > 10


def test_fast_samples_are_shared_by_all_workers():
    one, two = ManualWorker(), ManualWorker()
    dispatcher = Dispatcher({"one": one.submit, "two": two.submit})
    dispatcher.seconds_per_verdict = 0.0001
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
    verdicts = slow_dispatcher(worker).judge(make_items(1, 2))
    worker.lists.pop(0)[1].set_exception(RuntimeError("gone"))
    assert isinstance(verdicts.exception(), RuntimeError)
