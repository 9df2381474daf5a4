"""What a check of this machine has found, and how it is printed."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console

from launch.printing import print_line

State = Literal["ok", "warning", "wrong"]
MARKS: dict[State, tuple[str, str]] = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "wrong": ("✗", "red")}


@dataclass(frozen=True)
class CheckResult:
    """`CheckResult("open files", "warning", "1,024 at a time", "ulimit -n 65536")`"""

    subject: str
    state: State
    message: str
    fix: str = ""  # a command


def ok(subject: str, message: str) -> list[CheckResult]:
    return [CheckResult(subject, "ok", message)]


def warning(subject: str, message: str, fix: str) -> list[CheckResult]:
    return [CheckResult(subject, "warning", message, fix)]


def wrong(subject: str, message: str, fix: str) -> list[CheckResult]:
    return [CheckResult(subject, "wrong", message, fix)]


def print_results(results: list[CheckResult], console: Console, brief: bool = False) -> int:
    """Returns the exit code: 1 if something is wrong. `brief` leaves out what is fine."""
    width = max((len(r.subject) for r in results), default=0)
    for result in results:
        if brief and result.state == "ok":
            continue
        mark, style = MARKS[result.state]
        print_line(
            console, f"{mark} {result.subject:<{width}}  {result.message}", style if result.state != "ok" else ""
        )
        if result.fix:
            print_line(console, f"  {'':<{width}}  → {result.fix}", "dim")
    errors = sum(r.state == "wrong" for r in results)
    warnings = sum(r.state == "warning" for r in results)
    if not brief:
        summary = f"{errors} wrong, {warnings} to look at" if errors or warnings else "this machine is fine"
        print_line(console, f"\n{summary}", "red" if errors else "yellow" if warnings else "green")
    return int(errors > 0)


def to_json(results: list[CheckResult]) -> str:
    return json.dumps([asdict(r) for r in results], indent=2) + "\n"
