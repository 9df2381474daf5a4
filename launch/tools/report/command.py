"""`rlsys report`: the page of a run, or of several side by side, as one file."""

import contextlib
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from launch.printing import print_line
from launch.tools.report.gather import ReportedRun, page_data
from launch.tools.report.page import build_page
from launch.tools.report.sample_pieces import (
    READ_ERRORS,
    choose_pieces,
    compress_piece,
    describe_unreadable,
    sample_files,
    sample_numbers,
)
from launch.tools.report.token_texts import load_token_texts
from rlsys.errors import ConfigError, describe_disk_error
from rlsys.runs.disk import write_atomically


@dataclass(frozen=True)
class ReportOptions:
    """The command line of `rlsys report`."""

    runs: tuple[str, ...]
    out: str | None = None
    megabytes: float = 16.0  # room for texts and tokens
    open: bool = False  # in a browser


def write_report(options: ReportOptions, console: Console) -> None:
    runs = [ReportedRun.read(Path(name)) for name in options.runs]
    target = _target_file(options.out, runs)
    data = page_data(runs)
    if len(runs) == 1:
        samples = collect_samples(runs[0], round(options.megabytes * (1 << 20)))
        pieces: dict[str, Any] = {"main": data, "numbers": samples.numbers}
        none_saved = [] if samples.numbers else ["No samples are saved in samples/."]
        data["runs"][0]["missing"] += samples.unreadable or none_saved
    else:
        why = f"A comparison has no samples: `rlsys report {runs[0].name}` shows those of one run."
        samples, pieces = PageSamples([], {}, left_out=why, unreadable=[]), {"main": data}
    data["left_out"] = samples.left_out
    title = " and ".join(run["name"] for run in data["runs"])
    text = build_page(title, {name: compress_piece(piece) for name, piece in pieces.items()} | samples.pieces)
    with _explain_write_errors(target):
        write_atomically(target, text)
    print_line(console, f"{target}: {len(text) / (1 << 20):.1f} MiB, everything inside. Open it in a browser.")
    for sentence in samples.unreadable:
        print_line(console, sentence, "yellow")
    if samples.left_out:
        print_line(console, samples.left_out, "dim")
    if options.open and not webbrowser.open(target.resolve().as_uri()):
        print_line(console, "No browser could be started here. Copy the file to a machine that has one.")


@dataclass(frozen=True)
class PageSamples:
    """The samples of a page."""

    numbers: list[dict[str, Any]]  # of all samples, a piece per file
    pieces: dict[str, bytes]  # texts and tokens of as many as there is room for
    left_out: str  # what has no room, in words
    unreadable: list[str]  # files that cannot be read, in sentences


def collect_samples(run: ReportedRun, max_bytes: int) -> PageSamples:
    """Collects the numbers of all samples, and texts and tokens in at most `max_bytes`."""
    numbers, errors = {}, {}
    for file in sample_files(run.path):
        try:
            numbers[file] = sample_numbers(file)
        except READ_ERRORS as error:
            errors[file.stem] = str(error)
    token_texts = load_token_texts(run.path, str(run.options.get("model.path", "")))
    group_counts = {file: len(piece["groups"]) for file, piece in numbers.items()}
    chosen, more_errors = choose_pieces(list(numbers), max_bytes, token_texts, group_counts.__getitem__)
    readable = [piece for piece in numbers.values() if piece["name"] not in more_errors]
    pieces: dict[str, bytes] = {}
    for piece in readable:
        name = piece["name"]
        piece["kept"] = chosen[name].groups if name in chosen else 0
        if name in chosen:
            pieces |= {f"texts-{name}": chosen[name].texts, f"tokens-{name}": chosen[name].tokens}
    return PageSamples(readable, pieces, describe_left_out(readable), describe_unreadable(errors | more_errors))


def describe_left_out(numbers: list[dict[str, Any]]) -> str:
    """Returns a sentence on the groups without texts, or nothing if there are none."""
    groups, kept = sum(len(piece["groups"]) for piece in numbers), sum(piece["kept"] for piece in numbers)
    if kept == groups:
        return ""
    files = sum(bool(piece["kept"]) for piece in numbers)
    return (
        f"Texts and tokens of {kept:,} of {groups:,} groups are in this file, from {files:,} of {len(numbers):,} steps "
        "and evaluations, evenly spread; rewards, lengths and failures are those of all samples. `rlsys report "
        "--megabytes` takes more, `rlsys watch` all."
    )


def _target_file(out: str | None, runs: list[ReportedRun]) -> Path:
    """Returns the file of the page, and makes its folder."""
    target = Path(out).expanduser() if out else _default_file(runs)
    with _explain_write_errors(target):
        if target.is_dir() or (out and out.endswith("/")):
            raise ConfigError(f"--out: {target} is a directory. Name a file in it: --out {target / 'report.html'}")
        if target.exists() and not target.is_file():  # a device would be replaced by the page
            raise ConfigError(f"--out: {target} is no plain file. Name another one.")
        target.parent.mkdir(parents=True, exist_ok=True)
    return target


@contextlib.contextmanager
def _explain_write_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if describe_disk_error(error):
            raise
        raise ConfigError(f"{target} cannot be written: {error.strerror}. Name another file with --out.") from None


def _default_file(runs: list[ReportedRun]) -> Path:
    if len(runs) == 1:
        return runs[0].path / "report.html"
    return Path(f"report-{'-'.join(run.name for run in runs)}.html")
