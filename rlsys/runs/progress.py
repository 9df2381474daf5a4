"""The progress display: on a terminal a row per step and the current phase below; plain lines elsewhere."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlsys.text import escape_control_chars
from rlsys.types import TRUNCATIONS, Metrics


@dataclass(frozen=True)
class Column:
    """A column of the rows of steps. The first ones are always shown, the others as far as there is room."""

    name: str
    width: int
    cell: Callable[[Metrics], str]


class Progress:
    """`with Progress(...) as p: p.note("starting Ray"); p.show_phase("step 1: rollout"); p.step(1, {...})`"""

    HEADING = 20  # rows after which the names of the columns are printed again

    def __init__(self, console: Console, steps: int):
        self.console, self.steps = console, steps
        self.began, self.first_step, self.first_time = time.monotonic(), -1, 0.0
        self.last, self.accuracy = -1, ""
        self.rows_printed = 0  # lines of steps
        self.columns: tuple[Column, ...] = COLUMNS
        self.phase, self.since = "", self.began
        self.spinner = Spinner("dots")
        self.lock = threading.Lock()  # trackers and the replacement of workers print notes from other threads
        self.live = (
            Live(get_renderable=self.draw, console=console, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> "Progress":
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def show_phase(self, phase: str) -> None:
        """Shows what is going on now. A terminal shows it until it ends."""
        self.phase, self.since = phase, time.monotonic()

    def note(self, text: str) -> None:
        """Prints a fact. Before the first step, it is also shown as the current phase."""
        text, starting = escape_control_chars(text), self.first_step < 0
        if starting and not is_copyable(text):
            self.show_phase(text.partition("\n")[0])
        style = "dim" if starting else None  # later notes are nearly always faults
        with self.lock:
            for line in text.splitlines():
                self.print_line(line, style)

    def step(self, step: int, metrics: Metrics) -> None:
        if self.first_step < 0:
            self.first_step, self.first_time = step, time.monotonic()
        self.show_phase("")
        self.last = step
        if any("episode/" in name for name in metrics):
            self.columns = EPISODE_COLUMNS
        elif any(name == "loss" or name.endswith("/loss") for name in metrics) and "reward/mean" not in metrics:
            self.columns = SUPERVISED_COLUMNS
        if value := accuracy_cell(metrics):
            self.accuracy = f"accuracy {value} at step {step}"
        with self.lock:
            if self.live:
                self.print_row(step, metrics)
            else:
                plain = [c for c in self.columns if c.name in PLAIN_COLUMNS and c.cell(metrics)]
                cells = [f"{c.name} {c.cell(metrics)}" for c in plain]
                left = [f"left {self.eta(step)}"] if self.eta(step) else []
                self.print_line("  ".join([f"step {step}/{self.steps}", *cells, *left]))

    def print_row(self, step: int, metrics: Metrics) -> None:
        """Prints the row of a step, and every `HEADING` rows the names of the columns above it."""
        width = 2 * len(str(self.steps)) + 1
        columns = columns_that_fit(self.columns, self.console.width - width)
        if self.rows_printed % self.HEADING == 0:
            names = "".join(f"  {c.name:>{c.width}}" for c in columns)
            self.console.print(Text(f"{'step':>{width}}{names}", style="dim"), soft_wrap=True)
        self.rows_printed += 1
        cells = "".join(f"{c.cell(metrics):>{c.width + 2}}" for c in columns)  # a long one uses the blanks before it
        style = "bold" if accuracy_cell(metrics) else ""
        self.console.print(Text(f"{f'{step}/{self.steps}':>{width}}{cells}", style=style), soft_wrap=True)

    def print_line(self, text: str, style: str | None = None) -> None:
        """Prints a line with the seconds since the start. A terminal wraps it at words, unless it may be copied."""
        when = f"[{time.monotonic() - self.began:6.1f}s] "
        if self.live and not is_copyable(text):
            grid = Table.grid()
            grid.add_row(Text(when), Text(text))
            self.console.print(grid, style=style)
        else:
            self.console.print(when + text, style=style, highlight=False, markup=False, soft_wrap=True)

    def eta(self, step: int) -> str:
        """Estimates the time left after a step, such as 3m20s; empty after the first."""
        done = step - self.first_step
        if done <= 0:
            return ""
        seconds = round((time.monotonic() - self.first_time) / done * (self.steps - step))
        return (
            f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
            if seconds >= 3600
            else f"{seconds // 60}m{seconds % 60:02}s"
        )

    def draw(self) -> RenderableType:
        """Draws what is below the rows: how far the run is, and its current phase."""
        seconds = round(time.monotonic() - self.since)
        phase = f"{self.phase}, {seconds} s" if self.phase and seconds else self.phase
        if self.last < 0 or not self.steps:
            grid = Table.grid(padding=(0, 1, 0, 0))
            grid.add_row(self.spinner, Text(phase, style="dim", no_wrap=True, overflow="ellipsis"))
            return grid
        left = f"{self.eta(self.last)} left" if self.eta(self.last) else ""
        status = "  ".join(part for part in (f"{self.last}/{self.steps}", left, self.accuracy) if part)
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(
            ProgressBar(total=max(self.steps, 1), completed=self.last, width=max(10, self.console.width // 4)),
            Text(status, no_wrap=True, overflow="ellipsis"),
        )
        return Group(grid, Text(phase, style="dim", no_wrap=True, overflow="ellipsis"))


def is_copyable(text: str) -> bool:
    """Returns whether the text has an address or a command, which a line break would spoil."""
    return "://" in text or "`" in text


def metric_cell(key: str, format_spec: str) -> Callable[[Metrics], str]:
    return lambda metrics: format(metrics[key], format_spec) if key in metrics else ""


def failed_cell(metrics: Metrics) -> str:
    return f"{metrics['reward/failed']:,.0f}" if metrics.get("reward/failed") else ""


def limit_cell(metrics: Metrics) -> str:
    """Returns the limit that most episodes ended at, and their share: "turns 62%"."""
    shares = {reason: metrics.get(f"episode/finish/{reason}", 0.0) for reason in TRUNCATIONS}
    reason = max(shares, key=lambda reason: shares[reason])
    return f"{reason} {shares[reason]:.0%}" if shares[reason] else ""


def accuracy_cell(metrics: Metrics) -> str:
    """Returns the mean accuracy over the data sets, if this step was evaluated."""
    accuracies = {k: v for k, v in metrics.items() if k.startswith("eval/") and k.endswith("/accuracy")}
    values = [v for k, v in accuracies.items() if k != "eval/all/accuracy"] or list(accuracies.values())
    return format_scores([sum(values) / len(values)])[0] if values else ""


def held_out_loss_cell(metrics: Metrics) -> str:
    """Returns the mean loss over the held-out sets, if this step was evaluated."""
    losses = [v for k, v in metrics.items() if k.startswith("eval/") and k.endswith("/loss") and k != "eval/all/loss"]
    return f"{sum(losses) / len(losses):.4f}" if losses else ""


def format_scores(scores: list[float]) -> list[str]:
    """Formats scores as percentages if all are between 0 and 1. Sums of several reward functions may not be."""
    shares = all(0 <= score <= 1 for score in scores)
    return [f"{score:.1%}" if shares else f"{score:.3f}" for score in scores]


def columns_that_fit(columns: tuple[Column, ...], width: int) -> list[Column]:
    """Returns the columns that fit, with two blanks before each."""
    fitting = []
    for column in columns:
        width -= column.width + 2
        if width < 0:
            break
        fitting.append(column)
    return fitting


COLUMNS = (
    Column("reward", 6, metric_cell("reward/mean", ".3f")),
    Column("accuracy", 8, accuracy_cell),
    Column("s/step", 6, metric_cell("time/step", ".2f")),
    Column("tokens/s", 8, metric_cell("tokens_per_second", ",.0f")),
    Column("kl", 6, metric_cell("kl", ".4f")),
    Column("entropy", 7, metric_cell("entropy", ".3f")),
    Column("mismatch", 8, metric_cell("mismatch/max_abs", ".1e")),
    Column("failed", 6, failed_cell),
    Column("tokens", 6, metric_cell("length/mean", ",.0f")),
    Column("cut", 4, metric_cell("length/truncated", ".0%")),
    Column("clipped", 7, metric_cell("clip_fraction", ".1%")),
    Column("gradient", 8, metric_cell("grad_norm", ".2f")),
    Column("rollout", 7, metric_cell("time/rollout", ".2f")),
    Column("verdict", 7, metric_cell("time/reward", ".2f")),
    Column("score", 6, metric_cell("time/score", ".2f")),
    Column("update", 6, metric_cell("time/update", ".2f")),
    Column("sync", 6, metric_cell("time/sync", ".2f")),
)
EPISODE_COLUMNS = (
    *COLUMNS[:2],
    Column("turns", 5, metric_cell("episode/turns", ".1f")),
    Column("cut by", 11, limit_cell),
    *COLUMNS[2:],
)
SUPERVISED_COLUMNS = (
    Column("loss", 7, metric_cell("loss", ".4f")),
    Column("held-out", 8, held_out_loss_cell),
    *(c for c in COLUMNS if c.name not in ("reward", "rollout", "verdict")),
)
PLAIN_COLUMNS = [c.name for c in (*EPISODE_COLUMNS[:10], *SUPERVISED_COLUMNS[:2])]  # those that a plain line has
Note = Callable[[str], None]
