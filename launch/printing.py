"""Lines and tables that read the same on a terminal and in a file."""

import io
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from rlsys.text import escape_control_chars


class PipeSafeConsole(Console):
    """Goes on without output after the reader of a pipe has gone, as in `rlsys train CONFIG | head`."""

    def on_broken_pipe(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.file.fileno())
        os.close(null)


def plain_console(*, stderr: bool = False) -> Console:
    """Prints a user's words unchanged: `runs/[a]` is not markup, and `:x:` not an emoji."""
    return PipeSafeConsole(stderr=stderr, markup=False, emoji=False, highlight=False)


def print_line(console: Console, text: str, style: str = "") -> None:
    console.print(escape_control_chars(text), style=style or None, soft_wrap=True)


def last_characters(text: str, width: int) -> str:
    """The end of a text in one line: an answer stands at the end."""
    line = escape_control_chars(" ".join(text.split()))
    return line if len(line) <= width else f"…{line[1 - width :]}"


def text_column(name: str, style: str = "") -> Column:
    return Column(name, overflow="fold", style=style)


def number_column(name: str) -> Column:
    return Column(name, justify="right", no_wrap=True)


def make_table(
    first: str | Column, *others: str | Column, title: str = "", show_header: bool = True, gap: int = 2
) -> Table:
    """A table without lines. Of columns given by name alone, the first holds text, and the others numbers."""
    return Table(
        Column(first, overflow="fold", min_width=8) if isinstance(first, str) else first,
        *(number_column(c) if isinstance(c, str) else c for c in others),
        title=title or None,
        title_justify="left",
        show_header=show_header,
        box=None,
        padding=(0, gap, 0, 0),
        header_style="dim",
    )


def print_unwrapped(console: Console, table: Table) -> None:
    """Prints a table as wide as the terminal. A pipe or file gets one line per row, however long it is."""
    if console.is_terminal:
        console.print(table)
        return
    wide = Console(file=io.StringIO(), width=10_000, markup=False, emoji=False, highlight=False)
    with wide.capture() as capture:
        wide.print(table)
    for line in capture.get().splitlines():
        print_line(console, line.rstrip())


def write_figures(file: str, figures: dict[str, Any], console: Console) -> None:
    """Writes figures as JSON, and prints where."""
    from rlsys.runs.directory import write_user_file

    write_user_file(Path(file), json.dumps(figures, indent=2) + "\n")
    print_line(console, f"figures: {file}")
