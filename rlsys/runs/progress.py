"""What a person sees while a run goes on: a line for each step that fits the terminal, below them what it is at; plain lines elsewhere."""

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
from rlsys.types import Metrics


@dataclass(frozen=True)
class Column:
    """Of a step's line. The first ones are shown on every terminal, the others as far as there is room."""

    name: str
    width: int
    cell: Callable[[Metrics], str]


class Progress:
    """`with Progress(...) as p: p.note("starting Ray"); p.at("step 1: rollout"); p.step(1, {...})`"""

    HEADING = 20  # steps after which the names of the columns are shown again

    def __init__(self, console: Console, steps: int):
        self.console, self.steps = console, steps
        self.began, self.first_step, self.first_time = time.monotonic(), -1, 0.0
        self.last, self.accuracy = -1, ""
        self.rows_printed = 0  # lines of steps
        self.phase, self.since = "", self.began
        self.spinner = Spinner("dots")
        self.lock = threading.Lock()  # trackers and those who replace workers have something to say too
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

    def show_phase(self, doing: str) -> None:
        """What is going on now: to be seen on a terminal as long as it does."""
        self.phase, self.since = doing, time.monotonic()

    def note(self, text: str) -> None:
        """A fact worth keeping on the screen. Before the first step it is also what is going on."""
        text, starting = escape_control_chars(text), self.first_step < 0
        if starting and not is_copyable(text):
            self.show_phase(text.partition("\n")[0])
        style = "dim" if starting else None  # later they are nearly always faults
        with self.lock:
            for line in text.splitlines():
                self.print_line(line, style)

    def step(self, step: int, found: Metrics) -> None:
        if self.first_step < 0:
            self.first_step, self.first_time = step, time.monotonic()
        self.show_phase("")
        self.last = step
        if value := accuracy_cell(found):
            self.accuracy = f"accuracy {value} at step {step}"
        with self.lock:
            if self.live:
                self.print_row(step, found)
            else:
                cells = [f"{c.name} {c.cell(found)}" for c in COLUMNS[:PLAIN_COLUMNS] if c.cell(found)]
                left = [f"left {self.eta(step)}"] if self.eta(step) else []
                self.print_line("  ".join([f"step {step}/{self.steps}", *cells, *left]))

    def print_row(self, step: int, found: Metrics) -> None:
        """Under the names of the columns."""
        columns, width = (
            columns_that_fit(self.console.width - 2 * len(str(self.steps)) - 1),
            2 * len(str(self.steps)) + 1,
        )
        if self.rows_printed % self.HEADING == 0:
            names = "".join(f"  {c.name:>{c.width}}" for c in columns)
            self.console.print(Text(f"{'step':>{width}}{names}", style="dim"), soft_wrap=True)
        self.rows_printed += 1
        cells = "".join(f"{c.cell(found):>{c.width + 2}}" for c in columns)  # a long one takes of the blanks before it
        style = "bold" if accuracy_cell(found) else ""
        self.console.print(Text(f"{f'{step}/{self.steps}':>{width}}{cells}", style=style), soft_wrap=True)

    def print_line(self, text: str, style: str | None = None) -> None:
        """With the seconds since the start. On a terminal words stay whole; what may be copied is not broken."""
        when = f"[{time.monotonic() - self.began:6.1f}s] "
        if self.live and not is_copyable(text):
            grid = Table.grid()
            grid.add_row(Text(when), Text(text))
            self.console.print(grid, style=style)
        else:
            self.console.print(when + text, style=style, highlight=False, markup=False, soft_wrap=True)

    def eta(self, step: int) -> str:
        done = step - self.first_step
        if done <= 0:
            return ""
        left = round((time.monotonic() - self.first_time) / done * (self.steps - step))
        return f"{left // 3600}h{left % 3600 // 60:02}m" if left >= 3600 else f"{left // 60}m{left % 60:02}s"

    def draw(self) -> RenderableType:
        """What is below the lines: how far it is, and what it is at."""
        seconds = round(time.monotonic() - self.since)
        at = f"{self.phase}, {seconds} s" if self.phase and seconds else self.phase
        if self.last < 0 or not self.steps:
            grid = Table.grid(padding=(0, 1, 0, 0))
            grid.add_row(self.spinner, Text(at, style="dim", no_wrap=True, overflow="ellipsis"))
            return grid
        left = f"{self.eta(self.last)} left" if self.eta(self.last) else ""
        said = "  ".join(part for part in (f"{self.last}/{self.steps}", left, self.accuracy) if part)
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(
            ProgressBar(total=max(self.steps, 1), completed=self.last, width=max(10, self.console.width // 4)),
            Text(said, no_wrap=True, overflow="ellipsis"),
        )
        return Group(grid, Text(at, style="dim", no_wrap=True, overflow="ellipsis"))


def is_copyable(text: str) -> bool:
    """It has an address or a command, which a line break of ours would spoil."""
    return "://" in text or "`" in text


def metric_cell(key: str, form: str) -> Callable[[Metrics], str]:
    return lambda found: format(found[key], form) if key in found else ""


def failed_cell(found: Metrics) -> str:
    return f"{found['reward/failed']:,.0f}" if found.get("reward/failed") else ""


def accuracy_cell(found: Metrics) -> str:
    """The mean over the data sets, where this step was evaluated."""
    accuracies = {k: v for k, v in found.items() if k.startswith("eval/") and k.endswith("/accuracy")}
    values = [v for k, v in accuracies.items() if k != "eval/all/accuracy"] or list(accuracies.values())
    return format_scores([sum(values) / len(values)])[0] if values else ""


def format_scores(scores: list[float]) -> list[str]:
    """In per cent, unless one of them is no share of anything: several functions together may say more than 1, or less than 0."""
    shares = all(0 <= score <= 1 for score in scores)
    return [f"{score:.1%}" if shares else f"{score:.3f}" for score in scores]


def columns_that_fit(width: int) -> list[Column]:
    """The columns that have room, two blanks before each."""
    found = []
    for column in COLUMNS:
        width -= column.width + 2
        if width < 0:
            break
        found.append(column)
    return found


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
PLAIN_COLUMNS = 8  # of them in a plain line
Note = Callable[[str], None]
