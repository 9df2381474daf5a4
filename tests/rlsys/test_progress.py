import io

import pytest
from rich.console import Console

from rlsys import progress as module
from rlsys.progress import Progress

FOUND = {
    "reward/mean": 0.25,
    "eval/a/accuracy": 0.5,
    "eval/b/accuracy": 1.0,
    "kl": 0.01234,
    "entropy": 1.5,
    "mismatch/max_abs": 0.00002,
    "tokens_per_second": 12345.6,
    "time/step": 1.25,
}


class Watch:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def watch(monkeypatch):
    watch = Watch()
    monkeypatch.setattr(module, "time", watch)
    return watch


def make(steps: int = 10, terminal: bool = False) -> Progress:
    return Progress(Console(file=io.StringIO(), width=120, force_terminal=terminal, color_system=None), steps)


def shown(progress: Progress) -> str:
    return progress.console.file.getvalue()


def test_without_a_terminal_every_step_is_a_plain_line(watch):
    with make() as progress:
        progress.note("starting [Ray]")
        watch.now = 2.5
        progress.step(3, FOUND)
    first, second = shown(progress).splitlines()
    assert first == "[   0.0s] starting [Ray]"
    assert second == (
        "[   2.5s] step 3/10  reward 0.250  accuracy 75.0%  kl 0.0123  entropy 1.500  mismatch 2.0e-05  "
        "tokens/s 12,346  s/step 1.25"
    )


def test_figures_that_are_missing_are_left_out(watch):
    with make() as progress:
        progress.step(0, {})
    assert shown(progress).strip() == "[   0.0s] step 0/10"


def test_on_a_terminal_the_last_steps_stay_when_it_is_over(watch):
    with make(terminal=True) as progress:
        for step in range(1, 12):
            progress.step(step, FOUND)
    table = shown(progress)
    assert "11/10" in table
    assert "4/10" in table
    assert " 3/10" not in table.replace("13/10", ""), "only the last eight are kept"


def test_the_live_picture_shows_what_is_going_on_and_then_the_table():
    progress = make()
    progress.note("syncing weights")
    progress.console.print(progress.draw())
    assert "syncing weights" in shown(progress)
    progress.step(2, FOUND)
    progress.console.print(progress.draw())
    assert "75.0%" in shown(progress)


@pytest.mark.parametrize(
    ("seconds", "steps", "eta"),
    [
        (1.0, 11, "0m09s"),
        (59.7, 3, "1m00s"),
        (10.0, 8, "1m00s"),
        (400.0, 101, "11h00m"),
        (3599.8, 3, "1h00m"),
        (1.0, 2, "0m00s"),
    ],
)
def test_the_time_left_is_reckoned_from_the_steps_done(watch, seconds, steps, eta):
    progress = make(steps)
    progress.step(1, {})
    assert progress.eta(1) == "", "one step tells nothing yet"
    watch.now = seconds
    assert progress.eta(2) == eta


def test_after_a_resume_the_time_left_counts_this_process_only(watch):
    progress = make(steps=100)
    progress.step(90, {})
    watch.now = 10.0
    assert progress.eta(95) == "0m10s"
