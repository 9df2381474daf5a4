"""TensorBoard: event files in the run directory. `tensorboard --logdir runs` shows all runs side by side."""

import json
from pathlib import Path
from typing import Any

from rlsys.tracking.tracker import Figures, RunInfo, Tracker


class TensorBoard(Tracker):
    overwrites = True  # what an earlier file has of later steps is purged by TensorBoard as it reads

    def __init__(self, told: RunInfo, *, dir: str = ""):
        """`dir` is a folder that several runs share, each in one of its name; empty: tensorboard/ in the run directory."""
        from torch.utils.tensorboard.writer import SummaryWriter

        folder = Path(dir).expanduser() / told.name if dir else told.path / "tensorboard"
        self.writer = SummaryWriter(str(folder), purge_step=told.first_step if told.resumed else None)
        if not told.resumed:
            lines = "\n".join(f"    {key}: {json.dumps(value)}" for key, value in told.config.items())
            self.writer.add_text("config", lines, 0)

    def step(self, step: int, figures: Figures) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.writer.add_text("samples", samples_table(rows), step)
        self.writer.flush()

    def end(self, how: str) -> None:
        self.writer.close()


def samples_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown, each text as code."""

    def cell(value: Any) -> str:
        return "" if value is None else f"`{' '.join(str(value).replace('`', chr(39)).replace('|', '¦').split())}`"

    names = ("prompt", "completion", "reward")
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    return "\n".join(lines + ["| " + " | ".join(cell(row[name]) for name in names) + " |" for row in rows])
