"""`rlsys report`: the page of a run, or of several side by side, as one file."""

import contextlib
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from launch.printing import print_line
from launch.report.gather import ReportedRun, page_data
from launch.report.page import build_page
from launch.report.sample_pieces import (
    READ_ERRORS,
    choose_pieces,
    compress_piece,
    describe_unreadable,
    sample_files,
    sample_numbers,
)
from launch.report.token_texts import load_token_texts
from rlsys.config.schema import ConfigError
from rlsys.runs.directory import write_atomically
from rlsys.runs.errors import describe_disk_error


@dataclass(frozen=True)
class ReportOptions:
    runs: tuple[str, ...]
    out: str | None = None
    megabytes: float = 16.0  # of texts and tokens
    open: bool = False


def write_report(wanted: ReportOptions, console: Console) -> None:
    runs = [ReportedRun.read(Path(name)) for name in wanted.runs]
    target = _target(wanted.out, runs)
    data = page_data(runs)
    pieces: dict[str, Any] = {"main": data}
    if len(runs) == 1:
        found = collect_samples(runs[0], round(wanted.megabytes * (1 << 20)))
        pieces["numbers"] = found.numbers
        none = [] if found.numbers else ["No samples are saved in samples/."]
        data["runs"][0]["missing"] += found.unread or none
    else:
        why = f"A comparison has no samples: `rlsys report {runs[0].name}` shows those of one run."
        found = PageSamples([], {}, left_out=why, unread=[])
    data["left_out"] = found.left_out
    text = build_page(
        " and ".join(run["name"] for run in data["runs"]),
        {n: compress_piece(p) for n, p in pieces.items()} | found.pieces,
    )
    with _writing(target):
        write_atomically(target, text)
    print_line(console, f"{target}: {len(text) / (1 << 20):.1f} MiB, everything inside. Open it in a browser.")
    for sentence in found.unread:
        print_line(console, sentence, "yellow")
    if found.left_out:
        print_line(console, found.left_out, "dim")
    if wanted.open and not webbrowser.open(target.resolve().as_uri()):
        print_line(console, "No browser could be started here. Copy the file to where there is one.")


@dataclass(frozen=True)
class PageSamples:
    numbers: list[dict[str, Any]]  # of all of them, a file each
    pieces: dict[str, bytes]  # texts and tokens of as many as there is room for
    left_out: str  # what has no room, in words
    unread: list[str]  # what is damaged, in words


def collect_samples(run: ReportedRun, most: int) -> PageSamples:
    """Texts and tokens take at most `most` bytes."""
    found, why = {}, {}
    for file in sample_files(run.path):
        try:
            found[file] = sample_numbers(file)
        except READ_ERRORS as error:
            why[file.stem] = str(error)
    words_of = load_token_texts(run.path, str(run.options.get("model.path", "")))
    chosen, worse = choose_pieces(list(found), most, words_of, lambda file: len(found[file]["groups"]))
    whole = [one for one in found.values() if one["name"] not in worse]
    pieces: dict[str, bytes] = {}
    for one in whole:
        has = chosen.get(one["name"])
        one["kept"] = has.groups if has else 0
        if has:
            pieces |= {f"texts-{one['name']}": has.texts, f"tokens-{one['name']}": has.tokens}
    return PageSamples(whole, pieces, describe_left_out(whole), describe_unreadable(why | worse))


def describe_left_out(found: list[dict[str, Any]]) -> str:
    """A sentence, or nothing where nothing was."""
    groups, there = sum(len(one["groups"]) for one in found), sum(one["kept"] for one in found)
    if there == groups:
        return ""
    some = sum(bool(one["kept"]) for one in found)
    return (
        f"Texts and tokens of {there:,} of {groups:,} groups are in this file, from {some:,} of {len(found):,} steps and evaluations, evenly "
        "chosen; rewards, lengths and failures of all samples are. `rlsys report --megabytes` takes more, `rlsys watch` all."
    )


def _target(out: str | None, runs: list[ReportedRun]) -> Path:
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
        if describe_disk_error(error):
            raise
        raise ConfigError(f"{target} cannot be written: {error.strerror}. Name another file with --out.") from None


def _default(runs: list[ReportedRun]) -> Path:
    return runs[0].path / "report.html" if len(runs) == 1 else Path(f"report-{'-'.join(run.name for run in runs)}.html")
