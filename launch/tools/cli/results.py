"""Commands after a run: look at it, evaluate and compare it, and hand it on."""

from pathlib import Path
from typing import Any

import click

from launch.printing import plain_console, print_line
from launch.tools.cli.arguments import OVERRIDES, POSITIVE, json_option

console = plain_console()
RUN = click.argument("run", type=click.Path())


@click.command()
@RUN
@click.argument("target", type=click.Path(), metavar="FILE")
def trace(run: str, target: str) -> None:
    """Writes the timeline of RUN as a trace for Perfetto."""
    from launch.tools.analysis.trace import write_trace

    count = write_trace(Path(run), Path(target))
    print_line(console, f"{target}: {count:,} spans. Open it at https://ui.perfetto.dev or chrome://tracing.")


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(), metavar="RUN...")
@click.option("--out", type=click.Path(), help="Write to this file; by default RUN/report.html.")
@click.option("--open", is_flag=True, help="Open the page in a browser.")
@click.option(
    "--megabytes",
    type=click.FloatRange(0),
    default=16.0,
    show_default=True,
    help="Compressed size of the sample texts and tokens that the page includes.",
)
def report(runs: tuple[str, ...], **options: Any) -> None:
    """Writes an HTML page about one run, or several side by side."""
    from launch.tools.report.command import ReportOptions
    from launch.tools.report.command import write_report as run

    run(ReportOptions(runs, **options), console)


@click.command()
@RUN
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="On 127.0.0.1; 0: any.")
@click.option("--open", is_flag=True, help="Open the page in a browser.")
def watch(run: str, **options: Any) -> None:
    """Serves the page of RUN while the run goes on.

    Only this machine can open it. It may be started before the run. Ctrl-C ends it.
    """
    from launch.tools.report.watch import watch as serve

    serve(run, console, **options)


@click.command("eval")
@click.argument("target", type=click.Path())
@OVERRIDES
@click.option("--config", type=click.Path(), help="Sets rewards and sampling; by default the run's own config.yaml.")
@click.option("--data", multiple=True, help="Data set to use instead of eval.datasets. May be given several times.")
@click.option("--samples", type=POSITIVE, help="Completions per prompt, instead of eval.samples.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    help="Instead of eval.temperature: at least 0.01, or 0 for one greedy sample.",
)
@click.option("--out", type=click.Path(), help="Write every sample to this .parquet file, for compare and rescore.")
@click.option("--show", type=click.IntRange(0), default=0, help="Print the first sample of so many prompts in full.")
@json_option("Write the figures to this file; - is the standard output.")
def evaluate(target: str, overrides: tuple[str, ...], **options: Any) -> None:
    """Computes accuracy, pass@k and maj@k of a model.

    TARGET is a run, a checkpoint, a model directory, or a hub name.
    """
    from launch.tools.evaluate import EvalOptions
    from launch.tools.evaluate import evaluate as run

    run(EvalOptions(target, overrides=overrides, **options), console)


@click.command()
@RUN
@OVERRIDES
@click.option("--step", type=click.IntRange(0), help="Of the checkpoint; by default the newest.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="On 127.0.0.1; 0: any.")
def serve(run: str, overrides: tuple[str, ...], **options: Any) -> None:
    """Serves the model of RUN to OpenAI's and Anthropic's clients.

    Only this machine can ask it, with the key that is printed. Ctrl-C ends it.
    """
    from launch.tools.serve import ServeOptions
    from launch.tools.serve import serve as start

    start(ServeOptions(run, overrides=overrides, **options), console)


@click.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--step", type=click.IntRange(0), help="For runs: the step of the evaluation; by default the newest.")
@click.option(
    "--lines", type=click.IntRange(0), default=5, show_default=True, help="Number of changed prompts to show."
)
def compare(a: str, b: str, step: int | None, lines: int) -> None:
    """Tests whether B is better than A, prompt by prompt.

    A and B are runs, or .parquet files from `eval --out` or from a run's samples/.
    """
    from launch.tools.compare import compare as run

    run(a, b, step, lines, console)


@click.command()
@click.argument("target", type=click.Path(), metavar="RUN")
@OVERRIDES
@click.option(
    "--reward",
    "rewards",
    multiple=True,
    required=True,
    metavar="NAME[=WEIGHT]",
    help="Built-in, module:function or file.py:function; or NAME={weight: 1, option: value}. May be given several times.",
)
@click.option("--steps", metavar="A-B", help="Only these steps.")
@click.option("--out", type=click.Path(), help="Write old and new reward of every sample to this .parquet file.")
def rescore(
    target: str, overrides: tuple[str, ...], rewards: tuple[str, ...], steps: str | None, out: str | None
) -> None:
    """Judges the saved samples of RUN with another reward.

    RUN may also be a .parquet file of samples.
    """
    from launch.tools.rescore.command import rescore as run

    run(target, rewards, steps, out, overrides, console)


@click.command()
@RUN
@OVERRIDES
def track(run: str, overrides: tuple[str, ...]) -> int:
    """Sends the steps that trackers of RUN lack.

    Needed after the network was down, or for a tracker that is added only now (tracking.to=mlflow).
    """
    from launch.tools.track import track as send

    return send(Path(run), overrides, console)


@click.command()
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@click.option("--force", is_flag=True, help="Replace TARGET if it exists.")
@click.option("--adapter", is_flag=True, help="With policy.lora: the PEFT adapter alone, not merged into its base.")
def export(source: str, target: str, force: bool, adapter: bool) -> None:
    """Writes the model of a run as a Hugging Face directory.

    SOURCE is a run or a checkpoint.
    """
    from launch.tools.export import export as run

    run(Path(source), Path(target), force, adapter)
    if adapter:
        print_line(console, f"{target}: an adapter. Load it with peft or `vllm serve BASE --enable-lora`.")
        return
    print_line(console, f"{target}: a Hugging Face directory. Load it with transformers or `vllm serve {target}`.")


COMMANDS = (trace, report, watch, evaluate, serve, compare, rescore, track, export)
