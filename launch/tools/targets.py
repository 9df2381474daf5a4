"""Finds what a command line names: the run that something belongs to, or a model."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from rlsys.config import loading
from rlsys.config.saved_runs import is_run
from rlsys.errors import ConfigError
from rlsys.models.adapters import BASE, is_adapter_directory
from rlsys.runs import checkpoint


def find_run(target: str) -> Path | None:
    """The run directory that is the target or lies above it."""
    path = Path(target).expanduser().resolve()
    return next((folder for folder in (path, *path.parents) if is_run(folder)), None)


def model_directory(source: Path) -> Path:
    """The model, or the adapter, of a run (its newest checkpoint), of a checkpoint, or the directory itself."""
    if not source.is_dir():
        raise ConfigError(f"{source} is not a directory. Give a run, a checkpoint, or a model directory.")
    if (source / "config.json").is_file() or is_adapter_directory(source):
        return source
    if (source / "model" / "config.json").is_file() or is_adapter_directory(source / "model"):
        if (source / checkpoint.SUMS).is_file():
            checkpoint.require_undamaged(source)
        return source / "model"
    if checkpoints := checkpoint.list_checkpoints(source / "checkpoints"):
        _, newest = checkpoints[-1]
        checkpoint.require_undamaged(newest)
        return newest / "model"
    raise ConfigError(f"{source} holds no model: no config.json, no model/, no finished checkpoint in checkpoints/.")


@contextlib.contextmanager
def merged_model(model: str, console: Console) -> Iterator[str]:
    """The model, or for an adapter a directory for the time being, in which it is merged into its base."""
    if not (model and is_adapter_directory(model)):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="rlsys-merged-") as merged:
        console.print("merging the adapter into its base")
        write_merged(Path(model), Path(merged))
        yield merged


def write_merged(adapter: Path, target: Path) -> None:
    """Writes the model that an adapter makes of its base, with the number formats of the adapter's run."""
    from launch.models import find_model
    from workers.learner.files.merged_model import write_merged_model

    if run := find_run(str(adapter)):
        config = loading.load_config(run / "config.yaml")
        base = find_model(config.model.path, config, lambda _: None)
        write_merged_model(
            adapter, base, target, config.policy.dtype, config.rollout.dtype, config.model.trust_remote_code
        )
        return
    if not (adapter / BASE).is_file():
        raise ConfigError(
            f"{adapter} is an adapter and belongs to no run of rlsys, so its base is unknown. Merge it with peft, or give "
            "an adapter in the checkpoint of a run."
        )
    base = json.loads((adapter / BASE).read_text())["path"]
    write_merged_model(adapter, base, target, "float32", "float32")
