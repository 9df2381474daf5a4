"""Commands before a run: what to write, what it would take, and whether this machine can run it."""

import sys
from pathlib import Path
from typing import Any

import click

from launch.printing import plain_console
from launch.tools.cli.arguments import (
    CONFIG,
    OPTIONAL_CONFIG,
    OVERRIDES,
    POSITIVE,
    GpuCount,
    MeanAndMaximum,
    Names,
    json_option,
)

console = plain_console()


@click.command()
@click.option("--model", metavar="NAME", help="A hub name, a directory, or builtin:tiny.")
@click.option("--data", metavar="NAME", help="A hub name, a file or folder, or builtin:zigzag.")
@click.option("--gpus", type=GpuCount(0), help="Number of GPUs; 0: train on this machine's CPUs.")
@click.option("--gpu", default="H100", show_default=True, metavar="KIND", help="Kind of GPU, such as A100-80 or L4.")
@click.option("--reward", default="", metavar="NAME", help="Built-in, module:function or file.py:function.")
@click.option("--lora", type=click.IntRange(0), default=0, metavar="RANK", help="Train adapters of this rank only.")
@click.option("-o", "--out", type=click.Path(), default="", help="The file; by default named for model and data.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option(
    "--model-config",
    type=click.Path(),
    default="",
    metavar="FILE",
    help="The config.json of a model that is not on this machine.",
)
def init(model: str | None, data: str | None, gpus: int | None, **options: Any) -> None:
    """Writes a commented configuration that fits model, data and GPUs. Asks for what is missing."""
    if not sys.stdin.isatty():
        given = {"--model": model, "--data": data, "--gpus": gpus}
        if missing := [name for name, value in given.items() if value is None]:
            raise click.UsageError(f"Missing {', '.join(missing)}; only on a terminal can they be asked for.")
    model = model or click.prompt("model (a hub name or a directory)", default="builtin:tiny")
    default_data = "builtin:zigzag" if model == "builtin:tiny" else "openai/gsm8k"
    data = data or click.prompt("data (a hub name or a file)", default=default_data)
    gpus = click.prompt("GPUs (0: this machine's CPUs)", default=0, type=GpuCount(0)) if gpus is None else gpus
    from launch.tools.init.command import init as run
    from launch.tools.init.options import InitOptions

    run(InitOptions(model, data, gpus, **options), console)


@click.command()
@OPTIONAL_CONFIG
@OVERRIDES
@click.option(
    "--show",
    type=click.IntRange(0),
    is_flag=False,
    flag_value=1,
    default=0,
    metavar="[N]",
    help="Also print the first N prompts (1) of each data set, as the model gets them, and what supervised training learns.",
)
@click.option("--options", "list_options", is_flag=True, help="List every option with its default instead.")
def validate(config: str | None, overrides: tuple[str, ...], show: int, list_options: bool) -> None:
    """Checks CONFIG and prints the batch arithmetic. Starts nothing."""
    from launch.tools import validate as tool

    if list_options:
        return tool.print_options(console)
    if config is None:
        raise click.UsageError("Missing argument 'CONFIG'.")
    tool.validate(config, overrides, console, show=show)


@click.command()
@OPTIONAL_CONFIG
@OVERRIDES
@click.option("--json", type=click.Path(), help="Without CONFIG: write the results to this file.")
def doctor(config: str | None, overrides: tuple[str, ...], json: str | None) -> int:
    """Checks whether this machine can train.

    With CONFIG, also checks that its engines and policy compute the same log-probs.
    """
    if config and json:
        raise click.UsageError("--json works without CONFIG only.")
    if config is None:
        from launch.tools.doctor.command import check_machine

        return check_machine(json, console)
    from rlsys.checks import load_checked

    loaded = load_checked(config, overrides)
    from launch.tools.doctor.command import check_configuration

    return check_configuration(loaded, console)


@click.command()
@CONFIG
@OVERRIDES
def check(config: str, overrides: tuple[str, ...]) -> int:
    """Computes one update in several ways and compares the gradients.

    It uses several rank counts, ZeRO stages and pack budgets.
    """
    from rlsys.checks import load_checked

    loaded = load_checked(config, overrides)
    from launch.tools.check import check as run

    return run(loaded, console)


NOT_WITH_SIMULATE = {  # why an option of `plan` has no use with --simulate
    "cluster": "--cluster does not work with --simulate. Use --gpus N to try placements on N GPUs.",
    "address": "--address does not work with --simulate, which reads no cluster. Use --gpus N to try placements.",
    "measured": "--measured does not work with --simulate: each names measured costs, and one of them is enough.",
    "model_config": "--model-config does not work with --simulate: COSTS were measured with the model.",
}
ONLY_WITH_SIMULATE = {
    "gpus": "--gpus needs --simulate; --cluster names GPUs to plan for.",
    "steps": "--steps needs --simulate; trainer.steps sets the steps of a run.",
}


@click.command()
@CONFIG
@OVERRIDES
@click.option("--cluster", metavar="KIND", help="GPUs to plan for, such as 8xH100 or 2x8xA100-80. They need not exist.")
@click.option("--address", metavar="URL", help="A running Ray cluster: plan for what is free on it.")
@click.option("--model-config", type=click.Path(), metavar="FILE", help="config.json of a model that is not here.")
@click.option("--measured", metavar="COSTS", help="A run, or a file of bench --json: seconds from its measured costs.")
@json_option("Write all figures to this file.")
@click.option(
    "--prompt-tokens",
    type=POSITIVE,
    help="Length of each prompt; by default as in the data, if it is here, else rollout.max_prompt_tokens or 256.",
)
@click.option("--ragged", type=MeanAndMaximum(), metavar="MEAN,MAX", help="Lengths of completions, in tokens.")
@click.option(
    "--simulate", metavar="COSTS", help="Compare lags and placements, with costs from a run or from bench --json."
)
@click.option("--models", type=Names(), metavar="A,B,…", help="Compare these models, each part of memory in a row.")
@click.option("--gpus", type=click.IntRange(2), help="With --simulate: try placements on this many GPUs.")
@click.option("--steps", type=POSITIVE, help="With --simulate: number of simulated steps; by default 8.")
def plan(
    config: str,
    overrides: tuple[str, ...],
    ragged: tuple[float, int] | None,
    simulate: str | None,
    models: list[str] | None,
    prompt_tokens: int | None,
    json: str | None,
    **options: Any,
) -> int:
    """Shows what CONFIG runs where, and its memory, disk and time.

    Suggests changes if it does not fit. Needs no GPU.
    """
    given = {name: value for name, value in options.items() if value is not None}
    misplaced = NOT_WITH_SIMULATE if simulate else ONLY_WITH_SIMULATE
    if wrong := [message for name, message in misplaced.items() if name in given]:
        raise click.UsageError(" ".join(wrong))
    if models and (simulate or {"measured", "model_config"} & given.keys()):
        raise click.UsageError(
            "--models estimates several models: --simulate, --measured and --model-config are of one."
        )
    if {"cluster", "address"} <= given.keys():
        raise click.UsageError("--cluster names GPUs that need not exist, --address a running cluster. Give one.")
    from launch.tools.plan.lengths import LengthRequest
    from rlsys.config.loading import load_config

    if "gpus" in given:  # what CONFIG leaves open is then as on GPUs
        overrides += ("cluster.device=gpu", "rollout.exact=false")
    loaded, lengths = load_config(config, overrides), LengthRequest(prompt_tokens, ragged)
    if simulate:
        from launch.tools.plan.variants import SimulateOptions, compare_variants

        compare_variants(loaded, SimulateOptions(simulate, lengths=lengths, json=json, **given), console)
        return 0
    from launch.tools.plan.command import PlanOptions
    from launch.tools.plan.command import plan as run
    from launch.tools.plan.models import compare_models

    plan_options = PlanOptions(lengths=lengths, json=json, **given)
    if models:
        return compare_models(loaded, models, plan_options, console)
    return run(loaded, config, plan_options, console)


@click.command("import")
@click.argument("source", metavar="SOURCE")
@click.argument("out", type=click.Path(), metavar="OUT")
@click.option(
    "--license", "licenses", multiple=True, type=click.Path(), help="File to put beside the model. May be given again."
)
def import_model(source: str, out: str, licenses: tuple[str, ...]) -> None:
    """Makes a checked model directory of a GGUF file or a hub model.

    SOURCE is gguf:PATH or hf:NAME[@REVISION], or dir:PATH of a model that takes images or
    sound too, of which the text model is kept. OUT is a new or empty
    directory, for model.path.
    """
    from launch.tools.imports.command import import_model as run

    run(source, Path(out), tuple(map(Path, licenses)), console)


COMMANDS = (init, validate, doctor, check, plan, import_model)
