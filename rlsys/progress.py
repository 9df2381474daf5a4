"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlsys.metrics import Metrics


class Progress:
    """`with Progress(...) as p: p.note("starting Ray"); p.step(1, {...})`"""

    SHOWN = 8  # last steps in the live table

    def __init__(self, console: Console, steps: int):
        self.console, self.steps = console, steps
        self.began, self.first_step, self.first_time = time.monotonic(), -1, 0.0
        self.rows: list[tuple[int, Metrics]] = []
        self.accuracies: list[str] = []
        self.doing = ""
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
            if len(self.rows) > 1:
                self.console.print(self.table())

    def note(self, text: str) -> None:
        """What is going on now, or a fact worth keeping on the screen."""
        self.doing = text
        line = f"[{time.monotonic() - self.began:6.1f}s] {text}"
        self.console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    def step(self, step: int, found: Metrics) -> None:
        self.doing = ""
        if self.first_step < 0:
            self.first_step, self.first_time = step, time.monotonic()
        self.rows = [*self.rows, (step, found)][-self.SHOWN :]
        if value := accuracy(found):
            self.accuracies.append(f"{step}: {value}")
        if not self.live:
            cells = [f"{name} {value}" for name, value in zip(COLUMNS, self.cells(step, found), strict=True) if value]
            self.console.print(
                f"[{time.monotonic() - self.began:6.1f}s] " + "  ".join(cells),
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def eta(self, step: int) -> str:
        done = step - self.first_step
        if done <= 0:
            return ""
        left = round((time.monotonic() - self.first_time) / done * (self.steps - step))
        return f"{left // 3600}h{left % 3600 // 60:02}m" if left >= 3600 else f"{left // 60}m{left % 60:02}s"

    def cells(self, step: int, found: Metrics) -> list[str]:
        def cell(key: str, form: str) -> str:
            return format(found[key], form) if key in found else ""

        return [
            f"{step}/{self.steps}",
            cell("reward/mean", ".3f"),
            cell("reward/failed", ",.0f") if found.get("reward/failed") else "",
            accuracy(found),
            cell("kl", ".4f"),
            cell("entropy", ".3f"),
            cell("mismatch/max_abs", ".1e"),
            cell("tokens_per_second", ",.0f"),
            cell("time/step", ".2f"),
            self.eta(step),
        ]

    def table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for step, found in self.rows:
            table.add_row(*self.cells(step, found))
        return table

    def draw(self) -> RenderableType:
        if not self.rows:
            return Spinner("dots", Text(f" {self.doing}  {time.monotonic() - self.began:.0f}s", style="dim"))
        bar = ProgressBar(total=max(self.steps, 1), completed=self.rows[-1][0], width=60)
        held_out = Text(f"accuracy at step {'   '.join(self.accuracies[-self.SHOWN :])}" if self.accuracies else "")
        return Group(self.table(), held_out, bar, Text(self.doing, style="dim"))


def accuracy(found: Metrics) -> str:
    """The mean over the data sets, where this step was evaluated."""
    accuracies = {k: v for k, v in found.items() if k.startswith("eval/") and k.endswith("/accuracy")}
    values = [v for k, v in accuracies.items() if k != "eval/all/accuracy"] or list(accuracies.values())
    return f"{sum(values) / len(values):.1%}" if values else ""


COLUMNS = ("step", "reward", "failed", "accuracy", "kl", "entropy", "mismatch", "tokens/s", "s/step", "eta")
Note = Callable[[str], None]
