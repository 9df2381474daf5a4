"""Who judges what: dealt to workers that answer when the test says so."""

from concurrent.futures import Future

from rlsys.types import Verdict
from workers.reward.dispatch import MAX_ATTEMPTS, Dispatcher
from workers.reward.supervisor import JudgeResult, RewardItem


class Worker:
    """Keeps what it is given until it is told to answer."""

    def __init__(self) -> None:
        self.given: list[tuple[list[RewardItem], Future[list[JudgeResult]]]] = []

    def submit(self, items: list[RewardItem]) -> "Future[list[JudgeResult]]":
        self.given.append((items, Future()))
        return self.given[-1][1]

    def answer(self, *answers: JudgeResult) -> None:
        items, future = self.given.pop(0)
        future.set_result(list(answers) or [Verdict(i.inputs["n"]) for i in items])

    @property
    def has(self) -> list[int]:
        return [item.inputs["n"] for items, _ in self.given for item in items]


def items(*numbers: int) -> list[RewardItem]:
    return [RewardItem("", {"n": n}) for n in numbers]


def slow(*workers: Worker, together: int = 1) -> Dispatcher:
    """A pool in which a verdict has been taking a second of late."""
    pool = Dispatcher({f"reward-{i}": w.submit for i, w in enumerate(workers)}, together=together)
    pool.seconds_per_verdict = 1.0
    return pool


def test_verdicts_come_in_the_order_of_the_samples():
    one, two = Worker(), Worker()
    verdicts = slow(one, two).judge(items(1, 2, 3))
    assert (one.has, two.has) == ([1], [2])
    two.answer()
    assert two.has == [3]
    two.answer()
    assert not verdicts.done()
    one.answer()
    assert [v.score for v in verdicts.result()] == [1, 2, 3]


def test_nothing_to_judge_is_done_at_once():
    assert Dispatcher({"reward-0": Worker().submit}).judge([]).result() == []


def test_slow_samples_are_dealt_one_by_one_and_fast_ones_in_lists():
    worker = Worker()
    pool = slow(worker)
    pool.judge(items(*range(40)))
    assert worker.has == [0]
    pool.seconds_per_verdict = 0.0005
    worker.answer()
    assert len(worker.given[0][0]) > 10


def test_fast_samples_are_shared_by_all_workers():
    one, two = Worker(), Worker()
    pool = Dispatcher({"one": one.submit, "two": two.submit})
    pool.seconds_per_verdict = 0.0001
    pool.judge(items(*range(10)))
    assert len(one.given[0][0]) == 5
    assert two.has


def test_what_comes_back_is_dealt_again_before_what_waits():
    worker = Worker()
    pool = slow(worker, together=2)
    verdicts = pool.judge(items(1, 2, 3))
    first, second = worker.given[0][0]
    worker.answer(first, second)
    assert worker.has == [1, 2]
    worker.answer()
    worker.answer()
    assert [v.score for v in verdicts.result()] == [1, 2, 3]


def test_a_sample_that_may_end_processes_is_judged_with_nothing_beside_it():
    worker = Worker()
    pool = slow(worker, together=2)
    pool.judge(items(1, 2))
    pool.judge(items(3, 4))
    suspect = RewardItem("", {"n": 1}, alone=True)
    worker.answer(suspect, Verdict(2.0))
    assert worker.has == [1]
    worker.answer()
    assert worker.has == [3, 4]


def test_a_sample_that_never_gets_its_turn_fails_in_the_end():
    worker = Worker()
    verdicts = slow(worker).judge(items(1))
    for _ in range(MAX_ATTEMPTS):
        worker.answer(worker.given[0][0][0])
    assert verdicts.result()[0].failure == "crash"


def test_an_error_of_a_worker_reaches_who_waits():
    worker = Worker()
    verdicts = slow(worker).judge(items(1, 2))
    worker.given.pop(0)[1].set_exception(RuntimeError("gone"))
    assert isinstance(verdicts.exception(), RuntimeError)
