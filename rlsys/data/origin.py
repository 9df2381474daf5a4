"""Where the rows of a data set are: files, a folder, a saved Hugging Face data set, the hub, or a task."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlsys.config.shorthand import GYM, VERIFIERS
from rlsys.errors import ConfigError
from rlsys.tasks import gym, taskset
from rlsys.tasks.builtin import ROWS

EXTENSIONS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".csv", ".parquet")
SPLITS = {  # words in the names of files on the hub, and the splits they mean
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Origin:
    """One data set. Origin("openai/gsm8k", split="test", subset="main")    Origin("data/sums.jsonl", source="sums")"""

    path: str
    split: str = "train"
    subset: str = ""
    source: str = ""  # its name in metrics; empty: the row's own, or the name of file or folder
    options: str = "{}"  # of a task or taskset of a package, as JSON


@dataclass(frozen=True)
class DataLocation:
    """The files or the data set that a path leads to."""

    kind: Literal["builtin", "gym", "verifiers", "files", "saved", "hub"]
    name: str  # of the data set, where neither configuration nor row names it
    files: tuple[Path, ...] = ()


def locate_data(origin: Origin) -> DataLocation:
    """Finds out what a path leads to, without opening data. Raises `ConfigError` for what cannot be read."""
    path = origin.path
    if path.startswith("builtin:"):
        name = path.partition(":")[2]
        if name not in ROWS:
            raise ConfigError(f"{path} does not exist; built in: {', '.join(f'builtin:{n}' for n in ROWS)}.")
        _refuse_split(origin, "a built-in task")
        return DataLocation("builtin", name)
    if path.startswith(GYM):
        task = path.removeprefix(GYM)
        gym.check(task, json.loads(origin.options))
        _refuse_split(origin, "a task")
        return DataLocation("gym", task)
    if path.startswith(VERIFIERS):
        name = path.removeprefix(VERIFIERS)
        taskset.check(name, json.loads(origin.options))
        _refuse_split(origin, "a taskset")
        return DataLocation("verifiers", name)
    local = Path(path).expanduser()
    if local.is_file():
        if not local.name.endswith(EXTENSIONS):
            raise ConfigError(f"{path} must end in {', '.join(EXTENSIONS[:-1])} or {EXTENSIONS[-1]}.")
        _refuse_split(origin, "one file")
        return DataLocation("files", strip_extension(local), (local,))
    if local.is_dir():
        return _saved(origin, local) or _folder(origin, local)
    if looks_like_hub_name(path):
        return DataLocation("hub", path.rpartition("/")[2])
    hint = " It is taken as one name; give a folder, or files as a list: [a.jsonl, b.jsonl]."
    way_out = hint if set(path) & set("*?[,") else ""
    raise ConfigError(f"{path} does not exist (from {Path.cwd()}).{way_out}")


def _refuse_split(origin: Origin, kind: str) -> None:
    """Raises `ConfigError` if the configuration names a split or subset where there is none."""
    if origin.split != "train" or origin.subset:
        raise ConfigError(f"{origin.path} is {kind}; it has no splits or subsets. Leave `split` and `subset` out.")


def looks_like_hub_name(path: str) -> bool:
    """True for `owner/name`, unless the owner is a local folder: then it is a path that does not exist."""
    return bool(HUB_NAME.fullmatch(path)) and not path.endswith(EXTENSIONS) and not Path(path).parent.is_dir()


def strip_extension(file: Path) -> str:
    """ "sums.jsonl.gz" -> "sums" """
    ending = next((e for e in sorted(EXTENSIONS, key=len, reverse=True) if file.name.endswith(e)), file.suffix)
    return file.name.removesuffix(ending) or file.name


def _saved(origin: Origin, folder: Path) -> DataLocation | None:
    """Locates a split in what `save_to_disk` of the datasets library wrote; None if the folder is something else."""
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        try:
            names = json.loads(splits.read_text())["splits"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{splits} is damaged; it does not list the splits.") from None
        if origin.split not in names:
            raise ConfigError(f"{origin.path} has no split `{origin.split}`; it has {', '.join(names)}.")
        return DataLocation("saved", folder.resolve().name, (folder / origin.split,))
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return DataLocation("saved", folder.resolve().name, (folder,))
    return None


def _folder(origin: Origin, folder: Path) -> DataLocation:
    """Locates the files of a split in a folder.

    They are named as in a repository of the hub: `main/train-00000-of-00001.parquet`, `test/a.jsonl`.
    """
    inside = folder / origin.subset
    if not inside.is_dir():
        folders = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name[0] != ".")) or "none"
        raise ConfigError(f"{origin.path} has no folder `{origin.subset}` for its subset; folders there: {folders}.")
    files = sorted(p for p in inside.rglob("*") if p.name.endswith(EXTENSIONS) and p.is_file())
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(inside).parts)]
    if not files:
        raise ConfigError(f"{origin.path} holds no data: no file in it ends in {', '.join(EXTENSIONS)}.")
    splits = {file: _splits(file.relative_to(inside)) for file in files}
    if any(splits.values()):
        files = [file for file in files if SPLITS.get(origin.split, origin.split) in splits[file]]
        if not files:
            known = ", ".join(sorted(set().union(*splits.values())))
            raise ConfigError(f"{origin.path} has no files of a split `{origin.split}`; it has {known}.")
    elif origin.split != "train":
        raise ConfigError(
            f"{origin.path} has no files of a split `{origin.split}`: no file or folder in it is named after one. "
            "Leave `split` out."
        )
    return DataLocation("files", folder.resolve().name, tuple(files))


def _splits(file: Path) -> set[str]:
    """Returns the splits that a file is named after, by its folders or by a word of its name."""
    words = {*file.parts[:-1], *re.split(r"[^A-Za-z]+", strip_extension(file))}
    return {SPLITS[word.lower()] for word in words if word.lower() in SPLITS}
