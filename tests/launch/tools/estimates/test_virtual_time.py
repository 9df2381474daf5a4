import threading
import time as clock

import pytest

from launch.tools.estimates.virtual_time import SerialExecutor, VirtualTime


def test_an_hour_passes_at_once_and_events_happen_in_order():
    time, events = VirtualTime(), []

    def sleep_and_log(name, seconds):
        for _ in range(2):
            time.sleep(seconds)
            events.append((name, time.now()))

    def main():
        futures = [time.submit(lambda: sleep_and_log("a", 1800)), time.submit(lambda: sleep_and_log("b", 1000))]
        for future in futures:
            future.result()
        return time.now()

    began = clock.monotonic()
    assert time.run(main) == 3600
    assert clock.monotonic() - began < 5
    assert events == [("b", 1000), ("a", 1800), ("b", 2000), ("a", 3600)]


def test_a_waiter_continues_when_its_result_is_there():
    time = VirtualTime()

    def main():
        future = time.submit(lambda: time.sleep(5) or 7)
        time.sleep(2)
        assert not future.done()
        assert (future.result(), time.now()) == (7, 5)
        assert (future.result(), time.now()) == (7, 5)

    time.run(main)


def test_a_serial_executor_does_one_thing_after_the_other():
    time = VirtualTime()

    def main():
        pool = SerialExecutor(time)
        futures = [pool.submit(time.sleep, 3) for _ in range(3)]
        futures[1].result()
        assert time.now() == 6
        futures[2].exception()
        return time.now()

    assert time.run(main) == 9


def test_an_error_is_raised_where_the_result_is_awaited():
    time = VirtualTime()
    with pytest.raises(ZeroDivisionError):
        time.run(lambda: time.submit(lambda: 1 / 0).result())


def test_threads_that_still_run_at_the_end_are_ended():
    before = threading.active_count()
    time = VirtualTime()

    def forever():
        while True:
            time.sleep(1)

    def main():
        time.submit(forever)
        time.submit(lambda: time.submit(forever).result())
        time.sleep(10)

    time.run(main)
    for _ in range(100):
        if threading.active_count() == before:
            break
        clock.sleep(0.01)
    assert threading.active_count() == before


def test_a_deadlock_raises_an_error():
    time = VirtualTime()
    with pytest.raises(RuntimeError, match="wait for each other"):
        time.run(
            lambda: (first := time.submit(lambda: second.result()), second := time.submit(first.result))[0].result()
        )
