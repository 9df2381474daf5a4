"""`rlsys eval`: metrics of an existing model. It starts engines and rewards, and no trainer."""

import json
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from launch import datasets
from launch.printing import make_table, plain_console, print_line, write_figures
from launch.tools.show_samples import print_samples
from launch.tools.targets import find_run, merged_model, model_directory
from rlsys import checks
from rlsys.config import loading
from rlsys.config.schema import Config, HeldOutSource
from rlsys.config.shorthand import parse_entries
from rlsys.errors import ConfigError
from rlsys.evaluation.held_out import Evaluation, SourceScore
from rlsys.evaluation.held_out import evaluate as evaluate_sets
from rlsys.models.known_shapes import BUILTIN_MODELS
from rlsys.runs.directory import require_writable
from rlsys.runs.progress import Progress, format_scores
from rlsys.runs.samples import write_samples
from rlsys.sampling.collector import Collector
from rlsys.text import escape_control_chars

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class EvalOptions:
    """The options of `rlsys eval`. None leaves the choice to the configuration."""

    target: str  # a run, a checkpoint, a model directory, a hub name, or a built-in model
    config: str | None = None
    data: tuple[str, ...] = ()
    samples: int | None = None
    temperature: float | None = None
    out: str | None = None  # parquet file for every sample
    json: str | None = None  # file for the figures; "-" is the standard output
    show: int = 0  # samples to print
    overrides: tuple[str, ...] = ()


def evaluate(options: EvalOptions, console: Console) -> None:
    model, config = find_target_model(options), load_settings(options)
    for file in (options.out, options.json):
        if file and file != "-":
            require_writable(Path(file))
    # Figures on the standard output must be all of the standard output.
    notes = plain_console(stderr=True) if options.json == "-" else console
    with merged_model(model, notes) as whole:
        evaluation = run_engines(config, whole, notes)
    if options.out:
        write_samples(Path(options.out), evaluation.batch)
    print_samples(evaluation.batch, options.show, notes)
    if options.json == "-":
        print(json.dumps(to_json(options, evaluation), indent=2))
        return
    print_evaluation(evaluation, console)
    if options.json:
        write_figures(options.json, to_json(options, evaluation), console)
    if options.out:
        print_line(console, f"samples: {options.out}")


def run_engines(config: Config, model: str, console: Console) -> Evaluation:
    """Starts engines and reward processes, and evaluates on every set of eval.datasets."""
    datasets.peek(replace(config, data=replace(config.data, train={})))
    from launch.cluster import running_cluster
    from workers.fleet.watchdog import Watchdog

    with (
        tempfile.TemporaryDirectory(prefix="rlsys-eval-") as logs,
        Progress(console, 0) as progress,
        running_cluster(config, Watchdog(Path(logs), note=progress.note), None, model=model) as cluster,
    ):
        held_out = [
            datasets.load_held_out(config, name, cluster.tokenizer, cluster.limits, progress.note)
            for name in config.eval.datasets
        ]
        episode = datasets.longest_episode(config, cluster.limits.window)
        cluster.wait_until_ready(max(*(h.longest_sequence for h in held_out), episode))
        completions, prompts = (
            sum(h.samples * len(h.prompts) for h in held_out),
            sum(len(h.prompts) for h in held_out),
        )
        progress.note(f"sampling {completions:,} completions of {prompts:,} prompts")
        return evaluate_sets(
            Collector(cluster.rollout, cluster.judge, seed=config.run.seed, reward=config.reward),
            held_out,
            step=0,
            pass_score=config.eval.pass_score,
            seed=config.run.seed,
        )


def find_target_model(options: EvalOptions) -> str:
    """The directory or hub name of the target; empty for a built-in model, which is made at the start."""
    target = options.target
    if target.startswith("builtin:"):
        if target not in BUILTIN_MODELS:
            raise ConfigError(f"{target} is no model; the built-in ones are {', '.join(BUILTIN_MODELS)}.")
        return ""
    path = Path(target).expanduser()
    # `runs/dmeo` next to a directory `runs` is a typing error, and not a hub name.
    may_be_hub_name = HUB_NAME.fullmatch(target) and not Path(path.parts[0]).exists()
    if options.config and may_be_hub_name:
        return target
    try:
        return str(model_directory(path).resolve())
    except ConfigError as error:
        if may_be_hub_name and not path.exists():
            raise ConfigError(f"{error} A model of the hub, such as owner/name, needs --config CONFIG.yaml.") from None
        raise


def load_settings(options: EvalOptions) -> Config:
    """The given configuration, or that of the target's run, changed by the options."""
    config = loading.load_config(options.config or config_of_run(options.target), options.overrides)
    if options.target in BUILTIN_MODELS:
        config = replace(config, model=replace(config.model, path=options.target))
    config = with_options(config, options)
    # The training data need not exist any more.
    if problems := [p for p in checks.check(config) if not p.startswith("data.train: ")]:
        raise ConfigError(problems)
    return config


def config_of_run(target: str) -> str:
    if run := find_run(target):
        return str(run / "config.yaml")
    raise ConfigError(f"{target} belongs to no run, so rewards and sampling are unknown. Give --config CONFIG.yaml.")


def with_options(config: Config, options: EvalOptions) -> Config:
    """Applies --data, --samples and --temperature. The latter two replace the settings of each set, too."""
    sets: dict[str, HeldOutSource] = config.eval.datasets
    if options.data:
        names = list(dict.fromkeys(options.data))
        sets = parse_entries("eval.datasets", names) | {n: s for n, s in sets.items() if n in names}
    if not sets:
        raise ConfigError("nothing to evaluate on: eval.datasets is empty. Give --data FILE.")
    settings = replace(config.eval, datasets=sets)
    if options.samples is not None:
        sets = {name: replace(source, samples=None) for name, source in sets.items()}
        settings = replace(settings, samples=options.samples, datasets=sets)
    if options.temperature is not None:
        sets = {name: replace(source, temperature=None) for name, source in sets.items()}
        settings = replace(settings, temperature=options.temperature, datasets=sets)
    return replace(config, eval=settings)


def to_json(options: EvalOptions, evaluation: Evaluation) -> dict[str, Any]:
    scores = {name: score.metrics() for name, score in evaluation.scores.items()}
    return {"target": options.target, "scores": scores, "failures": evaluation.batch.failures}


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Prints the accuracy of each source in a sentence, then counts, pass@k and maj@k, and failures."""
    scores = evaluation.scores
    console.print()
    for name, score in scores.items():
        print_line(console, f"{name}: {describe_score(score)}")
    counts = make_table("source", "prompts", "samples", "length", "truncated", "failed")
    for name, s in scores.items():
        cells = f"{s.prompts:,}", f"{s.samples:,}", f"{s.mean_length:.1f}", f"{s.truncated_share:.1%}", f"{s.failed:,}"
        counts.add_row(escape_control_chars(name), *cells)
    console.print()
    console.print(counts)
    print_ends(scores, console)
    print_at_k(scores, console)
    for reason, count in evaluation.batch.failures.items():
        print_line(console, f"{count} verdicts failed ({reason}) and are left out", "yellow")
    if evaluation.batch.first_failure:
        print_line(console, f"The first: {evaluation.batch.first_failure}", "yellow")


def print_ends(scores: dict[str, SourceScore], console: Console) -> None:
    """Prints the turns of each source's episodes, and how they ended."""
    prefix = "episode/finish/"
    for name, score in scores.items():
        if score.episodes:
            ends = {n.removeprefix(prefix): share for n, share in score.episodes.items() if n.startswith(prefix)}
            shares = ", ".join(f"{reason} {share:.1%}" for reason, share in ends.items() if share)
            print_line(console, f"{name}: {score.episodes['episode/turns']:.1f} turns per episode; ended by {shares}")


def print_at_k(scores: dict[str, SourceScore], console: Console) -> None:
    """Prints pass@k and maj@k of every source with several samples per prompt."""
    names = {name for score in scores.values() for name in score.means}
    ks = sorted(int(name.partition("@")[2]) for name in names if name.startswith("pass@"))
    if not ks:
        return
    table = make_table("source", "k", *map(str, ks))
    for name, s in scores.items():
        for kind in ("pass", "maj"):
            values = {k: s.means[f"{kind}@{k}"].value for k in ks if f"{kind}@{k}" in s.means}
            if values:
                cells = dict(zip(values, format_scores(list(values.values())), strict=True))
                source = escape_control_chars(name) if kind == "pass" else ""
                table.add_row(source, f"{kind}@k", *(cells.get(k, "") for k in ks))
    console.print()
    console.print(table)
    for name, s in scores.items():
        prompts = {k: s.means[f"pass@{k}"].prompts for k in ks if f"pass@{k}" in s.means}
        if fewer := ", ".join(f"@{k} of {n}" for k, n in prompts.items() if n < s.prompts):
            print_line(console, f"{name}: {fewer} prompts; the others have fewer samples left", "yellow")


def describe_score(score: SourceScore) -> str:
    accuracy = score.means.get("accuracy")
    if accuracy is None:
        return f"no verdict on any of {score.prompts} prompts"
    value, low, high = format_scores([accuracy.value, accuracy.low, accuracy.high])
    return f"accuracy {value} of {accuracy.prompts} prompts, 95 % interval {low} to {high}"
