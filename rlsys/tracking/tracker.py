"""What a tracker is, and what it is told."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, float]  # of a step, by name


@dataclass(frozen=True)
class RunInfo:
    """Of the run. `Told("demo-3f9a01c2", "demo", Path("runs/demo"), {"policy.lr": 1e-6, …}, first=31, started=True)`"""

    id: str  # the same whenever this run goes on
    name: str  # of its directory
    path: Path  # the run directory
    config: Mapping[str, Any]  # every option by its dotted name; what is secret is hidden
    first_step: int  # the first step that comes
    resumed: bool  # whether this tracker has begun this run before


class Tracker:
    """Takes figures somewhere. One thread calls it, on which no step waits: it may take its time, and raise.

    A user's own is a function that gets what it is `Told`, and its options by name, and returns one of these.
    """

    overwrites = False  # whether a step that is done again takes the place of what was said of it

    def step(self, step: int, figures: Figures) -> None:
        """A line of metrics.jsonl. Steps come in their order, each once."""
        raise NotImplementedError

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """The first completions of a few prompts of an evaluation, before its figures: `uid`, `prompt`, `completion`, `reward`."""

    def event(self, event: dict[str, Any]) -> None:
        """A line of events.jsonl, of those written since it was started."""

    def look(self) -> None:
        """About twice a second, for what is to be seen between two steps."""

    def end(self, how: str) -> None:
        """`done`, `stopped` (it may go on) or `failed`. What was said is to be sent now."""
