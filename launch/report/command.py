"""`rlsys report`: the page of a run, or of several side by side, as one file."""

import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from launch.printing import say
from launch.report.gather import Run, page_data
from launch.report.page import page
from launch.report.sampled import files, kept, numbers, packed
from launch.report.words import words
from rlsys.config import ConfigError
from rlsys.run_directory import write


@dataclass(frozen=True)
class Wanted:
    runs: tuple[str, ...]
    out: str | None = None
    megabytes: float = 16.0  # of texts and tokens
    open: bool = False


def report(wanted: Wanted, console: Console) -> None:
    runs = [Run.read(Path(name)) for name in wanted.runs]
    target = Path(wanted.out) if wanted.out else _default(runs)
    if not target.parent.is_dir():
        raise ConfigError(f"--out: the directory of {target} does not exist.")
    data = page_data(runs)
    pieces: dict[str, Any] = {"main": data}
    compressed: dict[str, bytes] = {}
    if len(runs) == 1:
        found, compressed, left_out = samples(runs[0], round(wanted.megabytes * (1 << 20)))
        pieces["numbers"] = found
        data["left_out"] = left_out
        data["runs"][0]["missing"] += [] if found else ["No samples are saved in samples/."]
    else:
        data["left_out"] = f"A comparison has no samples: `rlsys report {runs[0].name}` shows those of one run."
    text = page(
        " and ".join(run["name"] for run in data["runs"]), {n: packed(p) for n, p in pieces.items()} | compressed
    )
    write(target, text)
    say(console, f"{target}: {len(text) / (1 << 20):.1f} MiB, everything inside. Open it in a browser.")
    if data["left_out"]:
        say(console, str(data["left_out"]), "dim")
    if wanted.open and not webbrowser.open(target.resolve().as_uri()):
        say(console, "No browser could be started here. Copy the file to where there is one.")


def samples(run: Run, most: int) -> tuple[list[dict[str, Any]], dict[str, bytes], str]:
    """The numbers of all samples, texts and tokens of as many as `most` bytes hold, and what was left out in words."""
    found = {file: numbers(file) for file in files(run.path)}
    pieces = words(run.path, str(run.options.get("model.path", "")))
    chosen = kept(list(found), most, pieces, lambda file: len(found[file]["groups"]))
    compressed: dict[str, bytes] = {}
    for one in found.values():
        has = chosen.get(one["name"])
        one["kept"] = has.groups if has else 0
        if has:
            compressed |= {f"texts-{one['name']}": has.texts, f"tokens-{one['name']}": has.tokens}
    return list(found.values()), compressed, left_out(list(found.values()))


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


def _default(runs: list[Run]) -> Path:
    return runs[0].path / "report.html" if len(runs) == 1 else Path(f"report-{'-'.join(run.name for run in runs)}.html")
