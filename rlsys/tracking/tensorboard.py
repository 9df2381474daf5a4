"""TensorBoard: event files in the run directory. `tensorboard --logdir runs` shows all runs side by side."""

import json
from pathlib import Path
from typing import Any

from rlsys.tracking.tracker import RunInfo, Tracker
from rlsys.types import Metrics


class TensorBoard(Tracker):
    overwrites = True  # TensorBoard purges the later steps of earlier files as it reads them

    def __init__(self, run_info: RunInfo, *, dir: str = ""):
        """`dir` is a folder that runs share, with a subfolder for each; empty: tensorboard/ in the run directory."""
        from torch.utils.tensorboard.writer import SummaryWriter

        folder = Path(dir).expanduser() / run_info.name if dir else run_info.path / "tensorboard"
        self.writer = SummaryWriter(str(folder), purge_step=run_info.first_step if run_info.resumed else None)
        if not run_info.resumed:
            lines = "\n".join(f"    {key}: {json.dumps(value)}" for key, value in run_info.config.items())
            self.writer.add_text("config", lines, 0)

    def step(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.writer.add_text("samples", samples_table(rows), step)
        self.writer.flush()

    def end(self, how: str) -> None:
        self.writer.close()


def samples_table(rows: list[dict[str, Any]]) -> str:
    """Returns the samples as a Markdown table, each text as code."""

    def cell(value: Any) -> str:
        return "" if value is None else f"`{' '.join(str(value).replace('`', chr(39)).replace('|', '¦').split())}`"

    names = ("prompt", "completion", "reward")
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    return "\n".join(lines + ["| " + " | ".join(cell(row[name]) for name in names) + " |" for row in rows])
