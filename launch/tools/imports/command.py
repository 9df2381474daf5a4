"""`rlsys import`: makes a checked Hugging Face directory of a GGUF file, a model of the hub, or the text model of another."""

import shutil
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from launch.printing import print_line
from launch.tools.imports.gguf_file import import_gguf
from launch.tools.imports.hub import import_from_hub
from launch.tools.imports.text_model import import_directory
from launch.tools.imports.trained_directory import check_directory
from rlsys.errors import ConfigError

Importer = Callable[[str, Path], list[str]]
IMPORTERS: dict[str, Importer] = {"gguf": import_gguf, "hf": import_from_hub, "dir": import_directory}


def import_model(source: str, target: Path, licenses: tuple[Path, ...], console: Console) -> None:
    """Writes into a folder next to the target first, so that the target is whole or does not exist."""
    kind, _, name = source.partition(":")
    if kind not in IMPORTERS or not name:
        raise ConfigError(
            f"{source} is neither gguf:PATH of a file, nor hf:NAME of a model on the hub, nor dir:PATH of a model of more than text."
        )
    if missing := [str(file) for file in licenses if not file.is_file()]:
        raise ConfigError(f"--license: {', '.join(missing)} does not exist.")
    target = target.expanduser().resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty. Choose another directory, or remove it.")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        facts = [*IMPORTERS[kind](name, unfinished), *check_directory(unfinished)]
        for file in licenses:
            shutil.copy(file, unfinished)
        if target.is_dir():
            target.rmdir()
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print_line(console, f"{target} is ready for model.path", "green")
    for fact in facts:
        print_line(console, f"  {fact}")
