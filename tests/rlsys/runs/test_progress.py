"""The progress display, on terminals and elsewhere."""

import io
import re

import pytest
from rich.console import Console

from rlsys.runs import progress as module
from rlsys.runs.progress import Progress, format_scores

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


def make(steps: int = 10, terminal: bool = False, width: int = 120) -> Progress:
    return Progress(Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None), steps)


def printed(progress: Progress) -> str:
    return progress.console.file.getvalue()


def rows(progress: Progress) -> list[str]:
    """The lines on a terminal, without what moves the cursor."""
    return [line for line in re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\r", "", printed(progress)).splitlines() if line.strip()]


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_terminal_would_obey_is_spelt_out_in_words_of_others(terminal):
    with make(terminal=terminal) as progress:
        progress.note("a verdict failed: \x1b]0;mine\x07\x1b[2J\x9b2J gone\rnow")
    assert "]0;mine\\x07\\x1b[2J\\x9b2J gone\\x0dnow" in printed(progress)
    assert not {"]0;", "[2J"} & set(re.split("\x1b", printed(progress)))


def test_without_a_terminal_every_step_is_a_plain_line(watch):
    with make() as progress:
        progress.note("starting [Ray]")
        progress.show_phase("step 3: rollout")
        watch.now = 2.5
        progress.step(3, FOUND)
    first, second = printed(progress).splitlines()
    assert first == "[   0.0s] starting [Ray]"
    assert second == (
        "[   2.5s] step 3/10  reward 0.250  accuracy 75.0%  s/step 1.25  tokens/s 12,346  kl 0.0123  entropy 1.500  "
        "mismatch 2.0e-05"
    )
    assert "\x1b" not in printed(progress), "nothing that moves a cursor"


def test_without_a_terminal_the_time_left_ends_the_line(watch):
    with make(steps=3) as progress:
        progress.step(1, {})
        watch.now = 2.0
        progress.step(2, {"reward/failed": 3.0})
    assert printed(progress).splitlines()[1] == "[   2.0s] step 2/3  failed 3  left 0m02s"


def test_figures_that_are_missing_are_left_out(watch):
    with make() as progress:
        progress.step(0, {})
    assert printed(progress).strip() == "[   0.0s] step 0/10"


def test_a_terminal_keeps_a_row_per_step_under_the_names_of_the_columns(watch):
    progress = make(steps=100, terminal=True, width=80)
    for step in range(1, 23):
        progress.step(step, FOUND)
    lines = rows(progress)
    assert [line.split()[0] for line in lines] == [
        "step",
        *(f"{i}/100" for i in range(1, 21)),
        "step",
        "21/100",
        "22/100",
    ]
    assert lines[0].split()[1:] == ["reward", "accuracy", "s/step", "tokens/s", "kl", "entropy", "mismatch", "failed"]
    assert lines[1].split()[1:] == ["0.250", "75.0%", "1.25", "12,346", "0.0123", "1.500", "2.0e-05"]
    ends = [[m.end() for m in re.finditer(r"\S+", line)] for line in lines[:2]]
    assert ends[0][:-1] == ends[1], "figures stand under their names"


EPISODES = FOUND | {"episode/turns": 3.25, "episode/finish/turns": 0.62, "episode/finish/length": 0.1}


def test_a_step_of_episodes_has_their_turns_and_the_limit_that_most_of_them_reach(watch):
    with make() as progress:
        progress.step(3, EPISODES | {"reward/failed": 2.0})
    assert printed(progress).strip() == (
        "[   0.0s] step 3/10  reward 0.250  accuracy 75.0%  turns 3.2  cut by turns 62%  s/step 1.25  tokens/s 12,346  "
        "kl 0.0123  entropy 1.500  mismatch 2.0e-05  failed 2"
    )
    with make() as progress:
        progress.step(3, {"episode/turns": 2.0, "episode/finish/stop": 1.0, "episode/finish/turns": 0.0})
    assert printed(progress).strip() == "[   0.0s] step 3/10  turns 2.0"


def test_a_terminal_shows_columns_of_episodes_only_where_there_are_some(watch):
    progress = make(terminal=True, width=80)
    progress.step(0, {"eval/a/episode/turns": 2.0})
    progress.step(1, EPISODES)
    names, _, figures = rows(progress)
    assert re.split("  +", names.strip())[:5] == ["step", "reward", "accuracy", "turns", "cut by"]
    assert re.split("  +", figures.strip())[:5] == ["1/10", "0.250", "75.0%", "3.2", "turns 62%"]
    assert [line.find("cut by") + len("cut by") for line in [names]] == [figures.find("62%") + 3]


@pytest.mark.parametrize(
    ("width", "last"), [(20, "reward"), (60, "entropy"), (80, "failed"), (160, "sync"), (300, "sync")]
)
def test_a_line_has_as_many_figures_as_fit(watch, width, last):
    progress = make(terminal=True, width=width)
    progress.step(1, FOUND)
    assert rows(progress)[0].split()[-1] == last
    assert all(len(line) <= width for line in rows(progress))


def test_a_figure_that_is_longer_than_its_column_does_not_push_the_others(watch):
    progress = make(steps=1000, terminal=True, width=80)
    progress.step(1, FOUND | {"reward/mean": -12.345, "reward/failed": 3.0})
    names, figures = rows(progress)
    assert len(names) == len(figures) == 80
    assert figures.split()[:2] == ["1/1000", "-12.345"]


def test_what_is_below_the_lines_fits_too(watch):
    for width in (40, 80, 160):
        progress = make(terminal=False, width=width)
        progress.step(2, FOUND)
        progress.show_phase(
            "step 3: rollout, which is told in so many words that no terminal of this width has room for them " * 2
        )
        watch.now = 30.0
        progress.console.print(progress.draw())
        assert all(len(line) <= width for line in printed(progress).splitlines()[1:])


def test_the_live_display_shows_the_phase_its_duration_and_the_progress(watch):
    progress = make()
    progress.note("syncing weights")
    watch.now = 7.0
    progress.console.print(progress.draw())
    assert "syncing weights, 7 s" in printed(progress)
    progress.step(2, FOUND)
    progress.show_phase("step 3: rollout")
    watch.now = 10.0
    progress.console.print(progress.draw())
    assert "2/10  accuracy 75.0% at step 2" in printed(progress)
    assert "step 3: rollout, 3 s" in printed(progress)


def test_a_terminal_wraps_at_words_and_does_not_break_what_may_be_copied(watch):
    progress = make(terminal=True, width=40)
    progress.live.start()
    progress.note("a reward verdict failed because of something long")
    progress.note("go on with `rlsys train configs/tiny_cpu.yaml run.dir=runs/some`")
    progress.live.stop()
    lines = rows(progress)
    assert "[   0.0s] a reward verdict failed" in [line.strip() for line in lines]
    assert any("`rlsys train configs/tiny_cpu.yaml run.dir=runs/some`" in line for line in lines)


def test_a_note_between_steps_is_no_new_activity(watch):
    progress = make()
    progress.step(1, {})
    progress.show_phase("step 2: update")
    progress.note("tracking: wandb failed")
    assert progress.phase == "step 2: update"


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


def test_what_is_no_share_is_not_told_in_per_cent():
    assert format_scores([0.176, 1.0]) == ["17.6%", "100.0%"]
    assert format_scores([0.533, 1.15]) == ["0.533", "1.150"]
    assert format_scores([-0.1]) == ["-0.100"]
