"""`rlsys export`: copies the model of a run or a checkpoint to a Hugging Face directory of its own."""

import shutil
from pathlib import Path

from launch.tools.targets import model_directory
from rlsys.config.schema import ConfigError


def export(source: Path, target: Path, force: bool) -> None:
    """Copies beside the target first, so that the target is never half-written."""
    model, target = model_directory(source), target.resolve()  # the directory that a link leads to
    in_use = target.exists() and any(target.iterdir() if target.is_dir() else [target])
    if in_use and not force:
        raise ConfigError(f"{target} exists and is not empty. Choose another directory, or --force to replace it.")
    if model.resolve() in (target, *target.parents) or target in model.resolve().parents:
        raise ConfigError(f"{target} and the model to be exported, {model}, lie one within the other.")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        shutil.copytree(model, unfinished)
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
