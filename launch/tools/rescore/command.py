"""Judges saved samples with reward processes, file by file."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from launch.printing import print_line
from launch.tools.analysis.rescoring import Disagreements, compare_rewards
from launch.tools.rescore.inputs import find_sample_files, load_settings, parse_rewards
from launch.tools.rescore.output import Comparisons, open_output, print_rescored
from rlsys.config.schema import Config
from rlsys.rewards.judge import reward_inputs
from rlsys.rewards.settings import reward_services
from rlsys.runs.directory import require_writable
from rlsys.runs.samples import SavedSample, first_line, open_parquet, read_saved_samples
from rlsys.types import Verdict

Advance = Callable[[int], None]  # takes the number of samples that were judged since the last call


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
    comparisons: Comparisons = []
    disagreements = Disagreements()
    first_failures: dict[str, str] = {}
    with start_judge(config) as judge, show_progress(files, console) as advance, open_output(out) as write:
        for file in files:
            saved = list(read_saved_samples(file))
            verdicts = judge(saved, advance)
            comparisons.append((file, compare_rewards(saved, verdicts)))
            for sample, verdict in zip(saved, verdicts, strict=True):
                disagreements.add(file, sample, verdict)
                if verdict.failure:
                    first_failures.setdefault(verdict.failure, first_line(verdict.detail))
            write(file, saved, verdicts)
    print_rescored(comparisons, disagreements, first_failures, console)
    if out:
        console.print()
        print_line(console, f"old and new rewards: {out}")


@contextlib.contextmanager
def start_judge(config: Config) -> Iterator[Callable[[list[SavedSample], Advance], list[Verdict]]]:
    """Starts reward processes. Yields a function that returns a verdict for each sample."""
    from workers.reward.local import local_rewards
    from workers.reward.sample_queue import RewardItem

    services = reward_services(config)
    with local_rewards(services) as rewards:

        def judge(saved: list[SavedSample], advance: Advance) -> list[Verdict]:
            items = [RewardItem("", reward_inputs(s.prompt, s.sample)) for s in saved]
            judging, shown = rewards.judge(items), 0
            while not judging.future.done():
                time.sleep(0.02)
                judged = len(saved) - -(-judging.missing // len(services))
                advance(judged - shown)
                shown = judged
            advance(len(saved) - shown)
            return judging.future.result()

        yield judge


@contextlib.contextmanager
def show_progress(files: list[Path], console: Console) -> Iterator[Advance]:
    """Shows a bar on a terminal. Elsewhere prints a line every ten seconds."""
    total = sum(open_parquet(file).metadata.num_rows for file in files)
    if console.is_terminal:
        columns = TextColumn("judging"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda count: bar.advance(task, count)
        return
    done, last = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        if time.monotonic() > last + 10:
            last = time.monotonic()
            print_line(console, f"judged {done:,} of {total:,} samples")

    yield advance
