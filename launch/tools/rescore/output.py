"""Old and new rewards side by side: tables on the console, and every sample in a .parquet file."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from launch.printing import last_characters, make_table, print_line
from launch.tools.analysis.rescoring import Disagreements, RewardComparison
from launch.tools.rescore.inputs import FILE_NAME
from rlsys.runs.samples import SavedSample, first_line, to_json
from rlsys.types import Verdict

ROWS = 20  # of the table for training steps, at most
Comparisons = list[tuple[Path, RewardComparison]]  # one per file of samples


def print_rescored(
    comparisons: Comparisons, disagreements: Disagreements, first_failures: dict[str, str], console: Console
) -> None:
    """Prints a table by step, what has changed overall, and the samples with the largest disagreements."""
    table = make_table("samples of", "count", "old", "new", "changed", "failed", "teaching", "flipped")
    for name, c in summarize_files(comparisons):
        table.add_row(
            name,
            f"{c.samples:,}",
            f"{c.old_sum / c.judged:.3f}" if c.judged else "",
            f"{c.new_sum / c.judged:.3f}" if c.judged else "",
            format_share(c.changed, c.judged),
            f"{c.failures.total():,}",
            f"{c.taught_before} > {c.teach_now} of {c.groups}" if c.groups else "",
            format_share(c.flipped, c.judged) if c.groups else "",
        )
    console.print(table)
    console.print()
    print_totals(sum((c for _, c in comparisons), RewardComparison()), first_failures, console)
    print_disagreements(disagreements, console)


def print_totals(total: RewardComparison, first_failures: dict[str, str], console: Console) -> None:
    print_line(console, f"{total.judged:,} of {total.samples:,} samples have both rewards.")
    if total.judged:
        correlation = total.correlation
        value = "undefined, one of both is always the same" if correlation is None else f"{correlation:.3f}"
        print_line(console, f"rewards: {format_share(total.changed, total.judged)} changed, correlation {value}.")
    if total.groups:
        flipped = format_share(total.flipped, total.judged)
        begin, cease = f"{total.start_teaching:,} would begin to teach", f"{total.stop_teaching:,} would cease to"
        print_line(console, f"groups: of {total.groups:,}, {begin} and {cease}.")
        print_line(console, f"advantages: {flipped} of the samples would move across their group's mean.")
    if total.recovered:
        print_line(console, f"{total.recovered:,} samples that had no score have one now.")
    for reason, count in total.failures.most_common():
        print_line(console, f"{count:,} new verdicts failed ({reason}), the first: {first_failures[reason]}", "yellow")


def print_disagreements(disagreements: Disagreements, console: Console) -> None:
    for file, saved, verdict in disagreements.largest_first():
        answer = "" if verdict.answer is None else f", answer {last_characters(verdict.answer, 40)}"
        name = f"{file.stem} {saved.sample.uid}/{saved.sample.index}"
        console.print()
        print_line(console, f"{name}: {saved.verdict.score:g} > {verdict.score:g}{answer}")
        print_line(console, f"  {last_characters(saved.prompt.text, console.width - 4)}", "dim")
        print_line(console, f"  {last_characters(saved.sample.text, console.width - 4)}")


def summarize_files(comparisons: Comparisons) -> Iterator[tuple[str, RewardComparison]]:
    """Training steps in at most `ROWS` rows, then each evaluation."""
    matches = [(FILE_NAME.fullmatch(file.stem), file, comparison) for file, comparison in comparisons]
    steps = [(int(match[2]), comparison) for match, _, comparison in matches if match and match[1] == "step"]
    size = -(-len(steps) // ROWS) or 1
    for i in range(0, len(steps), size):
        chunk = steps[i : i + size]
        name = f"step {chunk[0][0]}" + (f" to {chunk[-1][0]}" if len(chunk) > 1 else "")
        yield name, sum((comparison for _, comparison in chunk), RewardComparison())
    for match, file, comparison in matches:
        if not match or match[1] == "eval":
            yield f"evaluation {int(match[2])}" if match else file.name, comparison


def format_share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


@contextlib.contextmanager
def open_output(out: str | None) -> Iterator[Callable[[Path, list[SavedSample], list[Verdict]], None]]:
    """Yields a function that writes the rewards of one file. The result appears under its name only when complete."""
    if out is None:
        yield lambda file, saved, verdicts: None
        return
    import pyarrow as pa
    import pyarrow.parquet as parquet

    target = Path(out)
    unfinished = target.with_name(f".{target.name}.tmp")
    names = ("file", "uid", "index", "source", "reward", "rescored", "components", "answer", "failure", "detail")
    numeric = {"index": pa.int64(), "reward": pa.float32(), "rescored": pa.float32()}
    schema = pa.schema([(name, numeric.get(name, pa.string())) for name in names])
    with parquet.ParquetWriter(unfinished, schema, compression="zstd") as writer:

        def write(file: Path, saved: list[SavedSample], verdicts: list[Verdict]) -> None:
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

        yield write
    unfinished.rename(target)
