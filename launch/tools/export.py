"""From a run, a checkpoint or a model directory to the Hugging Face directory inside it."""

import shutil
from pathlib import Path

from rlsys.config.schema import ConfigError
from rlsys.runs import checkpoint


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
    if there := checkpoint.list_checkpoints(source / "checkpoints"):
        checkpoint.require_undamaged(there[-1][1])
        return there[-1][1] / "model"
    raise ConfigError(f"{source} holds no model: no config.json, no model/, no finished checkpoint in checkpoints/.")


def export(source: Path, target: Path, force: bool) -> None:
    model, target = model_directory(source), target.resolve()  # where a link leads to
    taken = target.exists() and any(target.iterdir() if target.is_dir() else [target])
    if taken and not force:
        raise ConfigError(f"{target} exists and is not empty. Choose another directory, or --force to replace it.")
    if model.resolve() in (target, *target.parents) or target in model.resolve().parents:
        raise ConfigError(f"{target} and the model to be exported, {model}, lie one within the other.")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        shutil.copytree(model, aside)
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
