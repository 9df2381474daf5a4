"""Figures of a model that is already there: engines and rewards, no trainer."""

import json
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from launch import datasets
from launch.printing import make_table, plain_console, print_line
from launch.tools.export import model_directory
from rlsys import checks
from rlsys.config import loading
from rlsys.config.schema import Config, ConfigError, HeldOutSource
from rlsys.config.shorthand import parse_entries
from rlsys.evaluation.held_out import Evaluation, SourceScore
from rlsys.evaluation.held_out import evaluate as run_evaluation
from rlsys.runs.directory import require_writable, write_user_file
from rlsys.runs.progress import Progress, format_scores
from rlsys.runs.samples import write_samples
from rlsys.sampling.collector import Collector
from rlsys.text import escape_control_chars

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class EvalOptions:
    """What the command line asks for; None is what the configuration says."""

    target: str  # a run, a checkpoint, a model directory, a hub name, or builtin:tiny
    config: str | None = None
    data: tuple[str, ...] = ()
    samples: int | None = None
    temperature: float | None = None
    out: str | None = None  # parquet file for every sample
    json: str | None = None  # file for the figures; "-" is the standard output
    overrides: tuple[str, ...] = ()


def evaluate(wanted: EvalOptions, console: Console) -> None:
    model = find_target_model(wanted)
    config = load_settings(wanted)
    for file in (wanted.out, wanted.json):
        if file and file != "-":
            require_writable(Path(file))
    datasets.peek(replace(config, data=replace(config.data, train={})))
    from launch.cluster import running_cluster
    from workers.supervision.watchdog import Watchdog

    # With the figures on the standard output, nothing else is.
    chatter = plain_console(stderr=True) if wanted.json == "-" else console
    with (
        tempfile.TemporaryDirectory(prefix="rlsys-eval-") as logs,
        Progress(chatter, 0) as progress,
        running_cluster(config, Watchdog(Path(logs), note=progress.note), model=model, training=False) as cluster,
    ):
        held_out = [
            datasets.load_held_out(config, name, cluster.tokenizer, cluster.window, progress.note)
            for name in config.eval.datasets
        ]
        cluster.wait_until_ready(max(h.longest_prompt for h in held_out))
        asked = sum(h.samples * len(h.prompts) for h in held_out)
        progress.note(f"sampling {asked:,} completions of {sum(len(h.prompts) for h in held_out):,} prompts")
        found = run_evaluation(
            Collector(cluster.rollout, cluster.rewards, seed=config.run.seed, reward=config.reward),
            held_out,
            step=0,
            max_new_tokens=config.rollout.max_new_tokens,
            pass_score=config.eval.pass_score,
            seed=config.run.seed,
        )
    if wanted.out:
        write_samples(Path(wanted.out), found.batch)
    if wanted.json == "-":
        print(as_json(wanted, found))
        return
    print_evaluation(found, console)
    if wanted.json:
        write_user_file(Path(wanted.json), as_json(wanted, found) + "\n")
        print_line(console, f"figures: {wanted.json}")
    if wanted.out:
        print_line(console, f"samples: {wanted.out}")


def find_target_model(wanted: EvalOptions) -> str:
    """The directory or hub name of the target; empty for the built-in model, which is made where it is needed."""
    if wanted.target.startswith("builtin:"):
        if wanted.target != "builtin:tiny":
            raise ConfigError(f"{wanted.target} is no model; the only built-in one is builtin:tiny.")
        return ""
    place = Path(wanted.target).expanduser()
    # `runs/dmeo` beside a directory `runs` is a slip of the pen, and no hub name.
    on_hub = HUB_NAME.fullmatch(wanted.target) and not Path(place.parts[0]).exists()
    if wanted.config and on_hub:
        return wanted.target
    try:
        return str(model_directory(place).resolve())
    except ConfigError as error:
        if on_hub and not place.exists():
            raise ConfigError(f"{error} A model of the hub, such as owner/name, needs --config CONFIG.yaml.") from None
        raise


def load_settings(wanted: EvalOptions) -> Config:
    """The configuration to judge by: the one given, or the one of the run that the target belongs to. Its model is the built-in one if
    that is the target.
    """
    path = wanted.config
    if path is None:
        place = Path(wanted.target).resolve()
        owner = next(
            (p for p in (place, *place.parents) if (p / "config.yaml").is_file() and (p / "metrics.jsonl").is_file()),
            None,
        )
        if owner is None:
            raise ConfigError(
                f"{wanted.target} belongs to no run, so rewards and sampling are unknown. Give --config CONFIG.yaml."
            )
        path = str(owner / "config.yaml")
    config = loading.load_config(path, wanted.overrides)
    if wanted.target == "builtin:tiny":
        config = replace(config, model=replace(config.model, path=wanted.target))
    sets: dict[str, HeldOutSource] = config.eval.datasets
    if wanted.data:
        wished = list(dict.fromkeys(wanted.data))
        sets = parse_entries("eval.datasets", wished) | {n: s for n, s in sets.items() if n in wished}
    if not sets:
        raise ConfigError("nothing to evaluate on: eval.datasets is empty. Give --data FILE.")
    e, many, warm = config.eval, wanted.samples, wanted.temperature
    if many is not None:
        e, sets = replace(e, samples=many), {name: replace(source, samples=None) for name, source in sets.items()}
    if warm is not None:
        e, sets = (
            replace(e, temperature=warm),
            {name: replace(source, temperature=None) for name, source in sets.items()},
        )
    config = replace(config, eval=replace(e, datasets=sets))
    # What was trained on need not be there any more.
    if problems := [p for p in checks.check(config) if not p.startswith("data.train: ")]:
        raise ConfigError(problems)
    return config


def as_json(wanted: EvalOptions, found: Evaluation) -> str:
    scores = {name: score.metrics() for name, score in found.scores.items()}
    return json.dumps({"target": wanted.target, "scores": scores, "failures": found.batch.failures}, indent=2)


def print_evaluation(found: Evaluation, console: Console) -> None:
    """The answer of each source in a sentence, then what it rests on, then what several samples are worth."""
    console.print()
    for name, score in found.scores.items():
        print_line(console, f"{name}: {describe_score(score)}")
    counts = make_table("source", "prompts", "samples", "length", "truncated", "failed")
    for name, s in found.scores.items():
        cells = f"{s.prompts:,}", f"{s.samples:,}", f"{s.mean_length:.1f}", f"{s.truncated_share:.1%}", f"{s.failed:,}"
        counts.add_row(escape_control_chars(name), *cells)
    console.print()
    console.print(counts)
    ks = sorted({int(n.partition("@")[2]) for s in found.scores.values() for n in s.figures if n.startswith("pass@")})
    if ks:
        several = make_table("source", "k", *map(str, ks))
        for name, s in found.scores.items():
            for kind in ("pass", "maj"):
                figures = {k: s.figures[f"{kind}@{k}"].value for k in ks if f"{kind}@{k}" in s.figures}
                if figures:
                    told = dict(zip(figures, format_scores(list(figures.values())), strict=True))
                    several.add_row(
                        escape_control_chars(name) if kind == "pass" else "",
                        f"{kind}@k",
                        *(told.get(k, "") for k in ks),
                    )
        console.print()
        console.print(several)
        for name, s in found.scores.items():
            fewer = {k: s.figures[f"pass@{k}"].prompts for k in ks if f"pass@{k}" in s.figures}
            said = ", ".join(f"@{k} of {n}" for k, n in fewer.items() if n < s.prompts)
            if said:
                print_line(console, f"{name}: {said} prompts; the others have fewer samples left", "yellow")
    for reason, count in found.batch.failures.items():
        print_line(console, f"{count} verdicts failed ({reason}) and are left out", "yellow")
    if found.batch.first_failure:
        print_line(console, f"The first: {found.batch.first_failure}", "yellow")


def describe_score(score: SourceScore) -> str:
    accuracy = score.figures.get("accuracy")
    if accuracy is None:
        return f"no verdict on any of {score.prompts} prompts"
    value, low, high = format_scores([accuracy.value, accuracy.low, accuracy.high])
    return f"accuracy {value} of {accuracy.prompts} prompts, 95 % interval {low} to {high}"
