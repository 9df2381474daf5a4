"""Sentences and tables that read the same on a terminal and in a file."""

import os

from rich.console import Console
from rich.table import Table

from rlsys.text import escape_control_chars


class PipeSafeConsole(Console):
    """Goes on, its words going nowhere, after whoever read them has gone away: `rlsys train CONFIG | head`."""

    def on_broken_pipe(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


def plain_console(*, stderr: bool = False) -> Console:
    """Shows a user's words as they are, in tables too: `runs/[a]` is no markup, and `:x:` no picture."""
    return PipeSafeConsole(stderr=stderr, markup=False, emoji=False, highlight=False)


def print_line(console: Console, text: str, style: str = "") -> None:
    console.print(escape_control_chars(text), style=style or None, soft_wrap=True)


def last_characters(text: str, width: int) -> str:
    """One line of its end, where the answer stands."""
    flat = escape_control_chars(" ".join(text.split()))
    return flat if len(flat) <= width else f"…{flat[1 - width :]}"


def make_table(first: str, *others: str) -> Table:
    """Plain columns, the first one text."""
    found = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    found.add_column(first, overflow="fold", min_width=8)
    for name in others:
        found.add_column(name, justify="right", no_wrap=True)
    return found
