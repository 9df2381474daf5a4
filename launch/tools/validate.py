"""Tables for people: the plan of a run, and all options."""

import ast
import dataclasses
import inspect

from rich.console import Console
from rich.table import Table

from launch.printing import print_line
from rlsys.config import schema as configuration
from rlsys.config.loading import flatten
from rlsys.config.schema import Config
from rlsys.config.shorthand import ENTRY_TYPES
from rlsys.estimates.batch_math import batch_rows, dataset_rows, method_rows, process_rows


def print_overview(config: Config, path: str, console: Console) -> None:
    table = Table(title="Batch arithmetic", title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("what")
    table.add_column("number", justify="right")
    table.add_column("from", style="dim")
    for what, how, number in batch_rows(config):
        table.add_row(what, f"{number:,}", how)
    console.print(table)
    algorithm = Table(title="\nMethod", title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False)
    for part, what in method_rows(config):
        algorithm.add_row(part, what)
    console.print(algorithm)
    data = Table(title="\nData", title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("for", "set", "how", "reward"):
        data.add_column(heading, overflow="fold", style="dim" if heading == "how" else None)
    for row in dataset_rows(config):
        data.add_row(*row)
    console.print(data)
    workers = Table(title="\nProcesses", title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    workers.add_column("role")
    workers.add_column("number", justify="right")
    workers.add_column("what", style="dim")
    for role, count, what in process_rows(config):
        workers.add_row(role, str(count), what)
    console.print(workers)
    print_line(console, f"\n✓ {path} is valid. It runs in {config.run.dir}.", "green")


def print_options(console: Console) -> None:
    """Every option with its default and the comment beside it in config.py."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("option", "default", "meaning"):
        table.add_column(name, overflow="fold")
    defaults, meaning = flatten(Config()), option_comments()
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(getattr(Config(), section.name)):
            key = f"{section.name}.{field.name}"
            table.add_row(key, repr(defaults[key]), meaning[key])
    for key, kind in ENTRY_TYPES.items():
        default = kind()
        for name in kind.__annotations__:  # a held-out set has what a training set has, and these
            table.add_row(f"{key}.NAME.{name}", repr(getattr(default, name)), meaning[f"{key}.NAME.{name}"])
    console.print(table)


def option_comments() -> dict[str, str]:
    """By option, the comment beside it in config.py; `reward.functions.NAME.weight` for settings of named entries."""
    source = inspect.getsource(configuration)
    lines = source.splitlines()
    comments = {
        (node.name, field.target.id): lines[(field.end_lineno or 0) - 1].partition("  # ")[2]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    sections = {f.name: type(getattr(Config(), f.name)) for f in dataclasses.fields(Config)}
    found = {
        f"{name}.{f.name}": comments[kind.__name__, f.name]
        for name, kind in sections.items()
        for f in dataclasses.fields(kind)
    }
    return found | {
        f"{k}.NAME.{name}": comments[kind.__name__, name]
        for k, kind in ENTRY_TYPES.items()
        for name in kind.__annotations__
    }
