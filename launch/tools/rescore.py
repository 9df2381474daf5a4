"""What another reward would have said of samples that are there already: reward processes alone, no Ray and no model.

samples/*.parquet ──▶ local_rewards ──▶ reward processes ──▶ old and new side by side, and in --out
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from launch.printing import last_characters, make_table, print_line
from rlsys import checks
from rlsys.analysis.rescoring import Disagreements, RewardComparison, compare_rewards
from rlsys.config import loading, shorthand
from rlsys.config.schema import Config, ConfigError, RewardFunction
from rlsys.config.secrets import find_secrets
from rlsys.rewards.check import find_problems
from rlsys.rewards.judge import combine_verdicts, reward_inputs
from rlsys.rewards.settings import reward_services
from rlsys.runs.directory import require_writable
from rlsys.runs.samples import SavedSample, first_line, has_rows, open_parquet, read_saved_samples, to_json
from rlsys.types import Verdict

ROWS = 20  # lines that training steps take in the table, at most
NAME = re.compile(r"(step|eval)-(\d+)")


def rescore(
    target: str,
    rewards: tuple[str, ...],
    steps: str | None,
    out: str | None,
    overrides: tuple[str, ...],
    console: Console,
) -> None:
    files = find_sample_files(target, steps)
    config = load_settings(target, parse_rewards(rewards), overrides)
    if out:
        require_writable(Path(out))
    found: list[tuple[Path, RewardComparison]] = []
    disagreements = Disagreements()
    first_failures: dict[str, str] = {}
    with start_judge(config) as judge, show_progress(files, console) as tell, open_output(out) as keep:
        for file in files:
            saved = list(read_saved_samples(file))
            verdicts = judge(saved, tell)
            found.append((file, compare_rewards(saved, verdicts)))
            for one, verdict in zip(saved, verdicts, strict=True):
                disagreements.add(file, one, verdict)
                if verdict.failure:
                    first_failures.setdefault(verdict.failure, first_line(verdict.detail))
            keep(file, saved, verdicts)
    print_rescored(found, disagreements, first_failures, console)
    if older := [file for file in files if not has_rows(file)]:
        print_line(
            console,
            f"{len(older):,} of {len(files):,} files are of an older version, which did not keep the rows: functions that "
            "ask for `answer` or other fields of a row cannot judge them.",
            "yellow",
        )
    if out:
        console.print()
        print_line(console, f"old and new rewards: {out}")


def parse_rewards(rewards: tuple[str, ...]) -> dict[str, RewardFunction]:
    """Reward functions as the command line has them.  ("exact", "mine.py:f=0.5") -> what {exact: 1.0, mine.py:f: 0.5} is in YAML"""
    given: dict[str, Any] = {}
    for text in rewards:
        name, equals, value = text.partition("=")
        try:
            given[name] = loading.parse_value(value) if equals else None
        except ValueError:
            raise ConfigError(f"--reward {name}: what follows {name}= is neither a weight nor a mapping.") from None
    if secret := find_secrets("reward.functions", given):
        raise ConfigError(secret)
    try:
        found = shorthand.parse_functions("--reward", given)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if wrong := find_problems("--reward", found):
        raise ConfigError(wrong)
    return found


def load_settings(target: str, chosen: dict[str, RewardFunction], overrides: tuple[str, ...]) -> Config:
    """The run's configuration, with these functions for every data set. Its data and model need not be there any more."""
    from omegaconf import DictConfig, OmegaConf

    place = Path(target).expanduser().resolve()
    file = next((p / "config.yaml" for p in (place, *place.parents) if (p / "metrics.jsonl").is_file()), None)
    tree = OmegaConf.load(file) if file else OmegaConf.create({})
    assert isinstance(tree, DictConfig)
    config = loading.build_config(tree, list(overrides), str(file or "defaults"))
    config = replace(
        config,
        reward=replace(config.reward, functions=chosen),
        data=replace(config.data, train={}),
        eval=replace(config.eval, datasets={}),
    )
    if wrong := [p for p in checks.check(config) if p.startswith(("reward.", "cluster.start_timeout_s "))]:
        raise ConfigError(wrong)
    return config


def find_sample_files(target: str, steps: str | None) -> list[Path]:
    """The sample files of a run, training steps first, or the one file."""
    place = Path(target).expanduser()
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise ConfigError(f"{target} does not exist. Give a run, or a .parquet file of samples.")
    low, high = parse_steps(steps)
    numbered = [(NAME.fullmatch(p.stem), p) for p in (place / "samples").glob("*.parquet")]
    there = sorted((m[1] == "eval", int(m[2]), p) for m, p in numbered if m)
    if not there:
        raise ConfigError(f"{target} holds no samples: no samples/*.parquet.")
    if not (files := [p for _, step, p in there if low <= step <= high]):
        last = max(step for _, step, _ in there)
        raise ConfigError(f"--steps {steps}: {target} has no samples of these steps; its last step is {last}.")
    return files


def parse_steps(steps: str | None) -> tuple[float, float]:
    """ "10-20" -> 10, 20    "10" -> 10, 10    "10-" -> 10, inf    None -> 0, inf"""
    if steps is None:
        return 0, float("inf")
    if not (found := re.fullmatch(r"(\d*)(-?)(\d*)", steps)) or not steps.strip("-"):
        raise ConfigError(f"--steps is {steps}; it must be a step such as 40, or steps such as 10-40, 10- or -40.")
    low, dash, high = found.groups()
    return int(low or 0), (int(high) if high else float("inf")) if dash else int(low)


@contextlib.contextmanager
def start_judge(config: Config) -> Iterator[Callable[[list[SavedSample], Callable[[int], None]], list[Verdict]]]:
    """Reward processes; one verdict per sample, and a second function hears how many more are there."""
    from workers.reward.local import local_rewards
    from workers.reward.supervisor import RewardItem

    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(local_rewards(service)) for service in reward_services(config)]

        def judge(saved: list[SavedSample], tell: Callable[[int], None]) -> list[Verdict]:
            items = [RewardItem("", reward_inputs(s.prompt, s.sample)) for s in saved]
            parts = [service.judge(items) for service in pools]
            told = 0
            while not all(part.done() for part in parts):
                time.sleep(0.02)
                there = len(saved) - max(part.missing for part in parts)
                tell(there - told)
                told = there
            tell(len(saved) - told)
            return [combine_verdicts(verdicts) for verdicts in zip(*(part.result() for part in parts), strict=True)]

        yield judge


def print_rescored(
    found: list[tuple[Path, RewardComparison]],
    disagreements: Disagreements,
    first_failures: dict[str, str],
    console: Console,
) -> None:
    told = make_table("samples of", "count", "old", "new", "changed", "failed", "teaching", "flipped")
    for name, t in summarize_files(found):
        told.add_row(
            name,
            f"{t.samples:,}",
            f"{t.old_sum / t.judged:.3f}" if t.judged else "",
            f"{t.new_sum / t.judged:.3f}" if t.judged else "",
            format_share(t.changed, t.judged),
            f"{t.failures.total():,}",
            f"{t.taught_before} > {t.teach_now} of {t.groups}" if t.groups else "",
            format_share(t.flipped, t.judged) if t.groups else "",
        )
    console.print(told)
    console.print()
    whole = sum((t for _, t in found), RewardComparison())
    print_line(console, f"{whole.judged:,} of {whole.samples:,} samples have both rewards.")
    if whole.judged:
        relation = whole.correlation
        said = "undefined, one of both is always the same" if relation is None else f"{relation:.3f}"
        print_line(console, f"rewards: {format_share(whole.changed, whole.judged)} changed, correlation {said}.")
    if whole.groups:
        print_line(
            console,
            f"groups: of {whole.groups:,}, {whole.start_teaching:,} would begin to teach and {whole.stop_teaching:,} would cease to.",
        )
        print_line(
            console,
            f"advantages: {format_share(whole.flipped, whole.judged)} of the samples would lie on the other side of their group's mean.",
        )
    if whole.recovered:
        print_line(console, f"{whole.recovered:,} samples that had no score have one now.")
    for reason, count in whole.failures.most_common():
        print_line(console, f"{count:,} new verdicts failed ({reason}), the first: {first_failures[reason]}", "yellow")
    for file, saved, verdict in disagreements.largest_first():
        took = "" if verdict.answer is None else f", answer {last_characters(verdict.answer, 40)}"
        console.print()
        print_line(
            console,
            f"{file.stem} {saved.sample.uid}/{saved.sample.index}: {saved.verdict.score:g} > {verdict.score:g}{took}",
        )
        print_line(console, f"  {last_characters(saved.prompt.text, console.width - 4)}", "dim")
        print_line(console, f"  {last_characters(saved.sample.text, console.width - 4)}")


def summarize_files(found: list[tuple[Path, RewardComparison]]) -> Iterator[tuple[str, RewardComparison]]:
    """Training steps in at most `ROWS` lines, then each evaluation."""
    numbered = [(NAME.fullmatch(file.stem), file, t) for file, t in found]
    steps = [(int(m[2]), t) for m, _, t in numbered if m and m[1] == "step"]
    size = -(-len(steps) // ROWS) or 1
    for i in range(0, len(steps), size):
        some = steps[i : i + size]
        name = f"step {some[0][0]}" + (f" to {some[-1][0]}" if len(some) > 1 else "")
        yield name, sum((t for _, t in some), RewardComparison())
    for match, file, t in numbered:
        if not match or match[1] == "eval":
            yield f"evaluation {int(match[2])}" if match else file.name, t


def format_share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


@contextlib.contextmanager
def show_progress(files: list[Path], console: Console) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line now and then elsewhere."""
    total = sum(open_parquet(file).metadata.num_rows for file in files)
    if console.is_terminal:
        columns = TextColumn("judging"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda more: bar.advance(task, more)
        return
    done, last = 0, time.monotonic()

    def tell(more: int) -> None:
        nonlocal done, last
        done += more
        if time.monotonic() > last + 10:
            last = time.monotonic()
            print_line(console, f"judged {done:,} of {total:,} samples")

    yield tell


@contextlib.contextmanager
def open_output(out: str | None) -> Iterator[Callable[[Path, list[SavedSample], list[Verdict]], None]]:
    """Takes old and new rewards file by file; the result is there whole or not at all."""
    if out is None:
        yield lambda file, saved, verdicts: None
        return
    import pyarrow as pa
    import pyarrow.parquet as parquet

    target = Path(out)
    aside = target.with_name(f".{target.name}.tmp")
    texts = ("file", "uid", "source", "components", "answer", "failure", "detail")
    kinds = {"index": pa.int64(), "reward": pa.float32(), "rescored": pa.float32()}
    names = ("file", "uid", "index", "source", "reward", "rescored", "components", "answer", "failure", "detail")
    schema = pa.schema([(name, pa.string() if name in texts else kinds[name]) for name in names])
    with parquet.ParquetWriter(aside, schema, compression="zstd") as writer:

        def keep(file: Path, saved: list[SavedSample], verdicts: list[Verdict]) -> None:
            rows = [
                {
                    "file": file.stem,
                    "uid": s.sample.uid,
                    "index": s.sample.index,
                    "source": s.prompt.source,
                    "reward": s.verdict.score,
                    "rescored": v.score,
                    "components": to_json(v.components),
                    "answer": v.answer,
                    "failure": v.failure or None,
                    "detail": first_line(v.detail) or None,
                }
                for s, v in zip(saved, verdicts, strict=True)
            ]
            writer.write_table(pa.Table.from_pylist(rows, schema))

        yield keep
    aside.rename(target)
