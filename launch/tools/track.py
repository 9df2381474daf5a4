"""`rlsys track`: sends the steps that trackers of a finished run lack."""

from pathlib import Path

from rich.console import Console

from launch.printing import print_line
from rlsys.config import loading
from rlsys.errors import ConfigError
from rlsys.runs.directory import RunDirectory, read_lines
from rlsys.tracking.builtin import missing_libraries, tracker_problems
from rlsys.tracking.tracking import Tracking

WAIT_S = 3600.0


def track(path: Path, overrides: tuple[str, ...], console: Console) -> int:
    """Returns the exit code: 1 if a tracker still lacks steps."""
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path} is no run: it has no config.yaml.")
    config = loading.load_config(path / "config.yaml", [*overrides, f"run.dir={path.resolve()}"])
    if problems := tracker_problems(config.tracking) + missing_libraries(config.tracking):
        raise ConfigError(problems)
    if not config.tracking.to:
        raise ConfigError(f"{path} names no tracker. Name one: rlsys track {path} tracking.to=tensorboard")
    lines = read_lines(path / "metrics.jsonl")
    if not lines:
        raise ConfigError(f"{path} has no metrics yet: its metrics.jsonl has no line.")
    last = lines[-1]["step"]
    run = RunDirectory(config, trains=False)
    try:
        tracking = Tracking(config, run.path, lambda text: print_line(console, text), run.record_event)
        tracking.start(last)
        tracking.end("done" if last >= config.trainer.steps else "stopped", WAIT_S)
    finally:
        run.close()
    for follower in tracking.followers:
        print_line(console, f"{follower.tracker_name} has steps up to {follower.last_step} of {last}")
    return int(any(f.last_step < last for f in tracking.followers))
