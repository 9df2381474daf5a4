"""`rlsys`: the command line. Exit codes: 0 done, or stopped by SIGTERM and saved; 1 failed; 2 configuration or usage; 130 interrupted."""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from launch.jobs.command import job, submit
from launch.printing import plain_console, print_line
from launch.supervise import EXIT_LOST
from launch.tools.convert.command import convert
from rlsys import __version__
from rlsys.config.schema import ConfigError
from rlsys.config.secrets import redact
from rlsys.runs.errors import WorkerLost, describe_disk_error

console, errors = plain_console(), plain_console(stderr=True)
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rlsys")
def commands() -> None:
    """Trains language models by group-relative policy optimisation on Ray, vLLM and DeepSpeed."""


@commands.command()
@click.argument("config", type=click.Path())
@OVERRIDES
def train(config: str, overrides: tuple[str, ...]) -> int:
    """Runs CONFIG, or continues its run from the newest checkpoint."""
    from launch.supervise import run_with_restarts
    from rlsys.checks import load_checked

    loaded = load_checked(config, overrides)
    command = shlex.join(["rlsys", "train", config, *overrides])

    def drive(cause: str) -> int:
        def work() -> None:
            from launch.train import train as run

            run(loaded, console, command=command, cause=cause)

        return _guarded(work, "Interrupted. Run the same command again to go on from the last checkpoint.")

    def tidy() -> None:
        from launch.local_ray import remove_leftovers

        remove_leftovers()

    def tell(text: str) -> None:
        print_line(errors, text)

    return run_with_restarts(drive, loaded.run.max_restarts, tell, tidy)


@commands.command()
@click.argument("config", type=click.Path(), required=False)
@OVERRIDES
@click.option("--options", is_flag=True, help="List every option with its default instead.")
def validate(config: str | None, overrides: tuple[str, ...], options: bool) -> None:
    """Checks CONFIG without starting anything and prints the batch arithmetic."""
    from launch import tables

    if options:
        return tables.print_options(console)
    if config is None:
        raise click.UsageError("Missing argument 'CONFIG'.")
    from rlsys.checks import check
    from rlsys.config.loading import load_config
    from rlsys.models.lookup import known_model_shape
    from rlsys.tracking.builtin import missing_libraries

    loaded = load_config(config, overrides)
    if problems := check(loaded, known_model_shape(loaded.model.path)):
        raise ConfigError(problems)
    if unknown := missing_libraries(loaded.tracking):
        raise ConfigError(unknown)
    tables.print_overview(loaded, config, console)


@commands.command()
@click.argument("config", type=click.Path(), required=False)
@OVERRIDES
@click.option("--json", type=click.Path(), help="Without CONFIG: write the findings to this file.")
def doctor(config: str | None, overrides: tuple[str, ...], json: str | None) -> int:
    """Checks this machine. With CONFIG, compares what its engines and policy say of the same samples, and explains a gap."""
    if config is None:
        from launch.tools.doctor import checks, facts

        found = checks.run_checks(facts.collect_facts())
        if json:
            from rlsys.runs.directory import write_user_file

            write_user_file(Path(json), checks.as_json(found))
        return checks.print_results(found, console)
    if json:
        raise click.UsageError("--json goes without CONFIG.")
    from rlsys.checks import load_checked

    loaded = load_checked(config, overrides)
    from launch.tools.doctor import checks, facts
    from launch.tools.doctor.agreement import check_agreement as run

    checks.print_results(checks.run_checks(facts.collect_facts(loaded)), console, brief=True)
    return run(loaded, console)


@commands.command()
@click.argument("config", type=click.Path())
@OVERRIDES
def check(config: str, overrides: tuple[str, ...]) -> int:
    """Computes one update of CONFIG by several ranks, ZeRO stages and pack budgets, and compares the gradients."""
    from rlsys.checks import load_checked

    loaded = load_checked(config, overrides)
    from launch.tools.check import check as run

    return run(loaded, console)


@commands.command()
@click.argument("config", type=click.Path())
@OVERRIDES
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Steps that are measured.")
@click.option("--warmup", type=click.IntRange(0), default=1, show_default=True, help="Steps before them.")
@click.option("--prompt-tokens", type=click.IntRange(1), help="Of each prompt; 256, or what the model's window allows.")
@click.option("--completion-tokens", type=click.IntRange(1), help="Of each completion; 64, or what the window allows.")
@click.option("--ragged", metavar="MEAN,MAX", help="Completions of different lengths instead, with a long tail.")
@click.option("--rewards", is_flag=True, help="Have the configuration's own functions judge, on rows of its own data.")
@click.option("--json", type=click.Path(), help="Write the figures to this file.")
@click.option("--trace", type=click.Path(), help="Write a trace for Perfetto or chrome://tracing to this file.")
def bench(config: str, overrides: tuple[str, ...], ragged: str | None, **options: Any) -> None:
    """Runs the loop of CONFIG on synthetic prompts, and tells where its time goes."""
    mean_and_most = _mean_and_most(ragged)
    from rlsys.checks import load_checked

    loaded = load_checked(config, overrides)
    from launch.tools.bench.command import bench as run
    from launch.tools.bench.options import BenchOptions

    run(loaded, BenchOptions(ragged=mean_and_most, **options), console)


NOT_SIMULATED = {  # options of `plan` that --simulate has no use for, and what to do
    "cluster": "--cluster goes without --simulate; with it, --gpus N tries placements on so many.",
    "address": "--address goes without --simulate, which looks at no cluster; with it, --gpus N tries placements on so many.",
    "measured": "--measured goes without --simulate; both name what work has cost, and one of them is enough.",
    "model_config": "--model-config goes without --simulate: COSTS are of the model already.",
}
SIMULATED = {
    "gpus": "--gpus goes with --simulate; --cluster names GPUs to plan for.",
    "steps": "--steps goes with --simulate; how many steps a run has is trainer.steps.",
}


@commands.command()
@click.argument("config", type=click.Path())
@OVERRIDES
@click.option("--cluster", metavar="KIND", help="8xH100, 2x8xA100-80: GPUs that need not be here.")
@click.option("--address", metavar="URL", help="A running Ray cluster: what of it is free, and what is missing.")
@click.option("--model-config", type=click.Path(), metavar="FILE", help="The config.json of a model that is not here.")
@click.option(
    "--measured", metavar="COSTS", help="A run, or what bench --json wrote: seconds from what work cost there."
)
@click.option("--json", type=click.Path(), help="Write all figures to this file.")
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    help="Of each prompt; rollout.max_prompt_tokens, or 256 where that is 0 and the model's window allows it.",
)
@click.option("--ragged", metavar="MEAN,MAX", help="Tokens of completions, where not all have rollout.max_new_tokens.")
@click.option(
    "--simulate",
    metavar="COSTS",
    help="Compare lags and placements instead, with what work cost in a run or bench --json.",
)
@click.option("--gpus", type=click.IntRange(2), help="With --simulate: try placements on so many GPUs.")
@click.option(
    "--steps", type=click.IntRange(1), help="With --simulate: steps that are counted, 8 if nothing else is said."
)
def plan(
    config: str,
    overrides: tuple[str, ...],
    ragged: str | None,
    simulate: str | None,
    prompt_tokens: int | None,
    json: str | None,
    **options: Any,
) -> int:
    """What CONFIG would start where, its memory, disk and time, and what to change if it does not fit. No GPU is needed."""
    mean_and_most = _mean_and_most(ragged)
    given = {name: value for name, value in options.items() if value is not None}
    misplaced = NOT_SIMULATED if simulate else SIMULATED
    if wrong := [said for name, said in misplaced.items() if name in given]:
        raise click.UsageError(" ".join(wrong))
    if {"cluster", "address"} <= given.keys():
        raise click.UsageError("--cluster names GPUs that need not be there, --address a cluster that runs; give one.")
    from launch.tools.plan.lengths import LengthRequest
    from rlsys.config.loading import load_config

    loaded, lengths = load_config(config, overrides), LengthRequest(prompt_tokens, mean_and_most)
    if simulate:
        from launch.tools.plan import variants

        variants.compare_variants(
            loaded, variants.SimulateOptions(simulate, lengths=lengths, json=json, **given), console
        )
        return 0
    from launch.tools.plan.command import PlanOptions
    from launch.tools.plan.command import plan as run

    return run(loaded, config, PlanOptions(lengths=lengths, json=json, **given), console)


class HowMany(click.IntRange):
    """A number; one with a kind, as `--cluster` takes it, is told apart."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        count, by, kind = str(value).partition("x")
        if by and count.isdecimal():
            self.fail(f"{value} has a kind in it: --gpus {count} --gpu {kind}", param, ctx)
        return super().convert(value, param, ctx)


@commands.command()
@click.option("--model", metavar="NAME", help="A hub name, a directory, or builtin:tiny.")
@click.option("--data", metavar="NAME", help="A hub name, a file or folder, or builtin:zigzag.")
@click.option("--gpus", type=HowMany(0), help="How many there are; 0: this machine's CPUs.")
@click.option("--gpu", default="H100", show_default=True, metavar="KIND", help="Which, such as A100-80 or L4.")
@click.option(
    "--reward", default="", metavar="NAME", help="What judges: built-in, module:function or file.py:function."
)
@click.option("-o", "--out", type=click.Path(), default="", help="The file; by default named for model and data.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option(
    "--model-config", type=click.Path(), default="", metavar="FILE", help="The config.json of a model that is not here."
)
def init(model: str | None, data: str | None, gpus: int | None, **options: Any) -> None:
    """Writes a commented configuration for a model, a data set and a number of GPUs that fits them. Asks for what is missing."""
    if not sys.stdin.isatty():
        given = {"--model": model, "--data": data, "--gpus": gpus}
        if missing := [name for name, value in given.items() if value is None]:
            raise click.UsageError(f"Missing {', '.join(missing)}; on a terminal they are asked for.")
    model = model or click.prompt("model, a hub name or a directory", default="builtin:tiny")
    data = data or click.prompt(
        "data, a hub name or a file", default="builtin:zigzag" if model == "builtin:tiny" else "openai/gsm8k"
    )
    gpus = click.prompt("GPUs, 0 for this machine's CPUs", default=0, type=HowMany(0)) if gpus is None else gpus
    from launch.tools.init.command import InitOptions
    from launch.tools.init.command import init as run

    run(InitOptions(model, data, gpus, **options), console)


def _mean_and_most(ragged: str | None) -> tuple[float, int] | None:
    if ragged is None:
        return None
    mean, _, most = ragged.partition(",")
    try:
        return float(mean), int(most)
    except ValueError:
        raise click.UsageError(f"--ragged is {ragged}; it takes a mean and a maximum, as in --ragged 60,128.") from None


@commands.command()
@click.argument("run", type=click.Path())
@click.argument("target", type=click.Path(), metavar="FILE")
def trace(run: str, target: str) -> None:
    """Writes what the workers of RUN did, and when, as a trace for Perfetto or chrome://tracing."""
    from rlsys.analysis.trace import write_trace

    count = write_trace(Path(run), Path(target))
    print_line(console, f"{target}: {count:,} spans. Open it at https://ui.perfetto.dev or chrome://tracing.")


@commands.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(), metavar="RUN...")
@click.option("--out", type=click.Path(), help="Write to this file; by default RUN/report.html.")
@click.option("--open", is_flag=True, help="Show it in a browser.")
@click.option(
    "--megabytes",
    type=click.FloatRange(0),
    default=16.0,
    show_default=True,
    help="Texts and tokens of samples that go into it, compressed.",
)
def report(runs: tuple[str, ...], **options: Any) -> None:
    """Writes a page about RUN, or about several side by side: one HTML file with everything inside."""
    from launch.report.command import ReportOptions
    from launch.report.command import write_report as run

    run(ReportOptions(runs, **options), console)


@commands.command()
@click.argument("run", type=click.Path())
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="On 127.0.0.1; 0: any.")
@click.option("--open", is_flag=True, help="Show it in a browser.")
def watch(run: str, **options: Any) -> None:
    """Serves the page of RUN on this machine while the run goes on, or until it begins; it follows by itself. Ctrl-C ends it."""
    from launch.report.watch import watch as serve

    serve(run, console, **options)


@commands.command("eval")
@click.argument("target", type=click.Path())
@OVERRIDES
@click.option(
    "--config", type=click.Path(), help="Where rewards and sampling come from; by default the run's own config.yaml."
)
@click.option(
    "--data", multiple=True, help="Data set to evaluate on, instead of eval.datasets. May be given several times."
)
@click.option("--samples", type=click.IntRange(1), help="Completions per prompt, instead of eval.samples.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    help="Instead of eval.temperature: 0.01 or more, or 0, which is greedy, and for one sample only.",
)
@click.option("--out", type=click.Path(), help="Write every sample to this .parquet file, for compare and rescore.")
@click.option("--json", type=click.Path(), help="Write the figures to this file; - is the standard output.")
def evaluate(target: str, overrides: tuple[str, ...], **options: Any) -> None:
    """Accuracy, pass@k and maj@k of TARGET (a run, a checkpoint, a model directory, or a hub name)."""
    from launch.tools.evaluate import EvalOptions
    from launch.tools.evaluate import evaluate as run

    run(EvalOptions(target, overrides=overrides, **options), console)


@commands.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--step", type=click.IntRange(0), help="Evaluation of this step, for runs; by default the newest.")
@click.option(
    "--lines", type=click.IntRange(0), default=5, show_default=True, help="Prompts that changed most to show."
)
def compare(a: str, b: str, step: int | None, lines: int) -> None:
    """Whether B is better than A, prompt by prompt. Each is a run, or a .parquet file from `eval --out` or a run's samples/."""
    from launch.tools.compare import compare as run

    run(a, b, step, lines, console)


@commands.command()
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
    """What another reward would have said of the saved samples of RUN (or of a .parquet file of them), offline."""
    from launch.tools.rescore import rescore as run

    run(target, rewards, steps, out, overrides, console)


@commands.command()
@click.argument("run", type=click.Path())
@OVERRIDES
def track(run: str, overrides: tuple[str, ...]) -> int:
    """Sends what trackers lack of RUN: after a network was away, or to one that is named only now (tracking.to=mlflow)."""
    from launch.tools.track import track as send

    return send(Path(run), overrides, console)


@commands.command()
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@click.option("--force", is_flag=True, help="Replace TARGET if it exists.")
def export(source: str, target: str, force: bool) -> None:
    """Writes SOURCE (a run or a checkpoint) as a Hugging Face model directory."""
    from launch.tools.export import export as run

    run(Path(source), Path(target), force)
    print_line(console, f"{target}: a Hugging Face directory. Load it with transformers or `vllm serve {target}`.")


for command in (convert, submit, job):
    commands.add_command(command)


def main() -> NoReturn:
    """Runs the command line and turns what happens into an exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)  # a shell's background jobs begin with it ignored
    sys.path.append(os.getcwd())  # where a user's module:function is looked for; last, so that it hides nothing
    code = _guarded(lambda: commands.main(standalone_mode=False))
    code = 1 if code == EXIT_LOST else code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that wait for dead workers would hold a plain exit back


def _guarded(run: Callable[[], object], interrupted: str = "Interrupted.") -> int:
    try:
        result = run()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return 2
    except ConfigError as error:
        for problem in error.problems:
            _say(problem)
        return 2
    except (KeyboardInterrupt, click.Abort):
        print_line(errors, interrupted)
        return 130
    except WorkerLost as error:
        _say(str(error))
        return EXIT_LOST
    except Exception as error:
        if trouble := describe_disk_error(error):
            _say(trouble)
            return 1
        if os.environ.get("RLSYS_TRACEBACK"):
            errors.print_exception()
        _say(f"{type(error).__name__}: {error}")
        if type(error).__module__.startswith("ray."):  # Ray itself is gone
            return EXIT_LOST
        print_line(errors, "RLSYS_TRACEBACK=1 shows where in the driver it was raised.", "dim")
        return 1


def _say(problem: str) -> None:
    print_line(errors, f"✗ {redact(problem)}", "red")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
