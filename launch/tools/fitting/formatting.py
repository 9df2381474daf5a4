"""Sizes, durations and lists of workers as text."""

from collections.abc import Sequence

from launch.tools.estimates.devices import GIB


def format_gib(size: float) -> str:
    """Writes GiB without the unit, with one decimal below 100."""
    return f"{size / GIB:.1f}" if abs(size) < 100 * GIB else f"{size / GIB:,.0f}"


def format_size(size: float) -> str:
    return f"{format_gib(size)} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"


def shorten_names(names: Sequence[str]) -> list[str]:
    """Joins names in a row.  ["rollout-8", "rollout-9", "policy-0"] -> ["rollout-8 to 9", "policy-0"]"""
    ranges: list[list[str]] = []
    for name in names:
        if names_before := next((r for r in ranges if is_next(name, r[-1])), None):
            names_before.append(name)
        else:
            ranges.append([name])
    return [r[0] if len(r) == 1 else f"{r[0]} to {r[-1].rpartition('-')[2]}" for r in ranges]


def is_next(name: str, before: str) -> bool:
    stem, _, number = before.rpartition("-")
    return bool(stem) and name == f"{stem}-{int(number) + 1}"
