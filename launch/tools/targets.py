"""Finds what a command line names: the run that something belongs to, or a model."""

from pathlib import Path

from rlsys.config.schema import ConfigError
from rlsys.runs import checkpoint


def find_run(target: str) -> Path | None:
    """The run directory that is the target or lies above it."""
    path = Path(target).expanduser().resolve()
    folders = (path, *path.parents)
    return next((p for p in folders if (p / "config.yaml").is_file() and (p / "metrics.jsonl").is_file()), None)


def model_directory(source: Path) -> Path:
    """The model of a run (its newest checkpoint), of a checkpoint, or the directory itself."""
    if not source.is_dir():
        raise ConfigError(f"{source} is not a directory. Give a run, a checkpoint, or a model directory.")
    if (source / "config.json").is_file():
        return source
    if (source / "model" / "config.json").is_file():
        if (source / checkpoint.SUMS).is_file():
            checkpoint.require_undamaged(source)
        return source / "model"
    if checkpoints := checkpoint.list_checkpoints(source / "checkpoints"):
        _, newest = checkpoints[-1]
        checkpoint.require_undamaged(newest)
        return newest / "model"
    raise ConfigError(f"{source} holds no model: no config.json, no model/, no finished checkpoint in checkpoints/.")
