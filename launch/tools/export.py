"""`rlsys export`: writes the model of a run or a checkpoint to a Hugging Face directory of its own."""

import shutil
from pathlib import Path

from launch.tools.targets import model_directory, write_merged
from rlsys.errors import ConfigError
from rlsys.models.adapters import is_adapter_directory


def export(source: Path, target: Path, force: bool, adapter: bool = False) -> None:
    """Copies or merges into a folder next to the target first, so that the target is never half-written.

    `adapter`: of a run with policy.lora, the adapter alone instead of the merged model.
    """
    model, target = model_directory(source), target.resolve()  # the directory that a link leads to
    if adapter and not is_adapter_directory(model):
        raise ConfigError(f"{model} is a whole model; its run had no policy.lora. Leave out --adapter.")
    in_use = target.exists() and any(target.iterdir() if target.is_dir() else [target])
    if in_use and not force:
        raise ConfigError(f"{target} exists and is not empty. Choose another directory, or --force to replace it.")
    if model.resolve() in (target, *target.parents) or target in model.resolve().parents:
        raise ConfigError(f"{target} and the model to be exported, {model}, lie one within the other.")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        if is_adapter_directory(model) and not adapter:
            write_merged(model, unfinished)
        else:
            shutil.copytree(model, unfinished)
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
