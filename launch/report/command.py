"""`rlsys report`: the page of a run, or of several side by side, as one file."""

import contextlib
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from launch.printing import say
from launch.report.gather import Run, page_data
from launch.report.page import page
from launch.report.sampled import UNREADABLE, files, kept, numbers, packed, unread
from launch.report.words import words
from rlsys.config.schema import ConfigError
from rlsys.runs.directory import write
from rlsys.runs.errors import disk_trouble


@dataclass(frozen=True)
class Wanted:
    runs: tuple[str, ...]
    out: str | None = None
    megabytes: float = 16.0  # of texts and tokens
    open: bool = False


def report(wanted: Wanted, console: Console) -> None:
    runs = [Run.read(Path(name)) for name in wanted.runs]
    target = _target(wanted.out, runs)
    data = page_data(runs)
    pieces: dict[str, Any] = {"main": data}
    if len(runs) == 1:
        found = samples(runs[0], round(wanted.megabytes * (1 << 20)))
        pieces["numbers"] = found.numbers
        none = [] if found.numbers else ["No samples are saved in samples/."]
        data["runs"][0]["missing"] += found.unread or none
    else:
        why = f"A comparison has no samples: `rlsys report {runs[0].name}` shows those of one run."
        found = Samples([], {}, left_out=why, unread=[])
    data["left_out"] = found.left_out
    text = page(
        " and ".join(run["name"] for run in data["runs"]), {n: packed(p) for n, p in pieces.items()} | found.pieces
    )
    with _writing(target):
        write(target, text)
    say(console, f"{target}: {len(text) / (1 << 20):.1f} MiB, everything inside. Open it in a browser.")
    for sentence in found.unread:
        say(console, sentence, "yellow")
    if found.left_out:
        say(console, found.left_out, "dim")
    if wanted.open and not webbrowser.open(target.resolve().as_uri()):
        say(console, "No browser could be started here. Copy the file to where there is one.")


@dataclass(frozen=True)
class Samples:
    numbers: list[dict[str, Any]]  # of all of them, a file each
    pieces: dict[str, bytes]  # texts and tokens of as many as there is room for
    left_out: str  # what has no room, in words
    unread: list[str]  # what is damaged, in words


def samples(run: Run, most: int) -> Samples:
    """Texts and tokens take at most `most` bytes."""
    found, why = {}, {}
    for file in files(run.path):
        try:
            found[file] = numbers(file)
        except UNREADABLE as error:
            why[file.stem] = str(error)
    words_of = words(run.path, str(run.options.get("model.path", "")))
    chosen, worse = kept(list(found), most, words_of, lambda file: len(found[file]["groups"]))
    whole = [one for one in found.values() if one["name"] not in worse]
    pieces: dict[str, bytes] = {}
    for one in whole:
        has = chosen.get(one["name"])
        one["kept"] = has.groups if has else 0
        if has:
            pieces |= {f"texts-{one['name']}": has.texts, f"tokens-{one['name']}": has.tokens}
    return Samples(whole, pieces, left_out(whole), unread(why | worse))


def left_out(found: list[dict[str, Any]]) -> str:
    """A sentence, or nothing where nothing was."""
    groups, there = sum(len(one["groups"]) for one in found), sum(one["kept"] for one in found)
    if there == groups:
        return ""
    some = sum(bool(one["kept"]) for one in found)
    return (
        f"Texts and tokens of {there:,} of {groups:,} groups are in this file, from {some:,} of {len(found):,} steps and evaluations, evenly "
        "chosen; rewards, lengths and failures of all samples are. `rlsys report --megabytes` takes more, `rlsys watch` all."
    )


def _target(out: str | None, runs: list[Run]) -> Path:
    """Where the page goes, in a folder that is there."""
    target = Path(out).expanduser() if out else _default(runs)
    with _writing(target):
        if target.is_dir() or (out and out.endswith("/")):
            raise ConfigError(f"--out: {target} is a directory. Name a file in it: --out {target / 'report.html'}")
        if target.exists() and not target.is_file():  # a device would be replaced by the page
            raise ConfigError(f"--out: {target} is no plain file. Name another one.")
        target.parent.mkdir(parents=True, exist_ok=True)
    return target


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if disk_trouble(error):
            raise
        raise ConfigError(f"{target} cannot be written: {error.strerror}. Name another file with --out.") from None


def _default(runs: list[Run]) -> Path:
    return runs[0].path / "report.html" if len(runs) == 1 else Path(f"report-{'-'.join(run.name for run in runs)}.html")
