"""Commands that run the training loop."""

import shlex
from pathlib import Path
from typing import Any

import click

from launch.printing import plain_console, print_line
from launch.tools.cli.arguments import CONFIG, OVERRIDES, POSITIVE, MeanAndMaximum, json_option
from launch.tools.cli.exit_codes import errors, exit_code

console = plain_console()


@click.command()
@CONFIG
@OVERRIDES
def train(config: str, overrides: tuple[str, ...]) -> int:
    """Runs CONFIG, or resumes its run from the newest checkpoint."""
    from launch.supervise import run_with_restarts
    from rlsys.checks import load_checked
    from rlsys.errors import WorkerLost
    from rlsys.runs.checkpoint import Checkpoints

    loaded = load_checked(config, overrides)
    command = shlex.join(["rlsys", "train", config, *overrides])

    def run_driver(cause: str) -> int:
        def work() -> None:
            from launch.ray_session.connect import NoCluster
            from launch.tools.advice import ADVISERS
            from launch.train import train as run

            try:
                run(loaded, console, ADVISERS, command=command, cause=cause)
            except NoCluster as error:
                if not cause:
                    raise
                raise WorkerLost(str(error)) from error  # it was there a moment ago, and may come back

        return exit_code(work, "Interrupted. Run the same command again to go on from the last checkpoint.")

    def clean_up() -> None:
        from launch.ray_session.leftovers import remove_leftovers

        remove_leftovers()

    saved = Checkpoints(Path(loaded.run.dir).expanduser() / "checkpoints", keep_last=0)
    return run_with_restarts(
        run_driver,
        loaded.run.max_restarts,
        lambda text: print_line(errors, text),
        clean_up,
        saved_step=lambda: saved.last_step,
    )


@click.command()
@CONFIG
@OVERRIDES
@click.option("--steps", type=POSITIVE, default=5, show_default=True, help="Steps to measure.")
@click.option("--warmup", type=click.IntRange(0), default=1, show_default=True, help="Steps before them.")
@click.option("--prompt-tokens", type=POSITIVE, help="Length of each prompt; 256, or what the model's window allows.")
@click.option("--completion-tokens", type=POSITIVE, help="Length of each completion; 64, or what the window allows.")
@click.option(
    "--ragged",
    type=MeanAndMaximum(),
    metavar="MEAN,MAX",
    help="Instead: completions of different lengths, with a long tail.",
)
@click.option("--rewards", is_flag=True, help="Use CONFIG's own reward functions, on rows of its own data.")
@json_option()
@click.option("--trace", type=click.Path(), help="Write a trace for Perfetto or chrome://tracing to this file.")
def bench(config: str, overrides: tuple[str, ...], **options: Any) -> None:
    """Measures where the steps of CONFIG spend their time.

    Runs its own loop, with all workers, on synthetic prompts.
    """
    from rlsys.checks import load_checked

    loaded = load_checked(config, overrides)
    from launch.tools.bench.command import bench as run
    from launch.tools.bench.options import BenchOptions

    run(loaded, BenchOptions(**options), console)


COMMANDS = (train, bench)
