"""Accuracy of a model that is already there: engines and rewards, no trainer."""

import dataclasses
import tempfile
from pathlib import Path

from rich.console import Console

from launch.datasets import load_one
from launch.export import model_directory
from rlsys import config_check, config_load
from rlsys.config import Config, ConfigError
from rlsys.evaluation import evaluate as run_evaluation
from rlsys.pipeline import Collector
from rlsys.progress import Progress
from rlsys.run_directory import write_samples


def evaluate(
    target: str,
    config_path: str | None,
    datasets: tuple[str, ...],
    out: str | None,
    overrides: tuple[str, ...],
    console: Console,
) -> None:
    model = "" if target.startswith("builtin:") else str(model_directory(Path(target)).resolve())
    config = settings(target, config_path, datasets, overrides)
    from launch.cluster import started

    with (
        tempfile.TemporaryDirectory(prefix="rlsys-eval-") as logs,
        Progress(console, 0) as progress,
        started(config, Path(logs), progress.note, model=model, training=False) as cluster,
    ):
        loaded = [
            load_one(config, path, cluster.tokenizer, cluster.window, progress.note) for path in config.eval.datasets
        ]
        cluster.ready(max(d.longest for d in loaded))
        collector = Collector(
            cluster.rollout,
            cluster.rewards,
            seed=config.run.seed,
            max_failure_share=config.reward.max_failure_share,
        )
        result = run_evaluation(collector, loaded, step=0, max_new_tokens=config.rollout.max_new_tokens)
    for source, value in result.accuracy.items():
        console.print(f"{source}: accuracy {value:.1%} of {result.counts[source]} prompts", highlight=False)
    for reason, count in result.failures.items():
        console.print(f"{count} verdicts failed ({reason}) and count as 0", style="yellow", highlight=False)
    if out:
        write_samples(Path(out), result.batch)
        console.print(f"samples: {out}", highlight=False, soft_wrap=True)


def settings(target: str, config_path: str | None, datasets: tuple[str, ...], overrides: tuple[str, ...]) -> Config:
    """The configuration to judge by: the one given, or the one of the run that the target belongs to."""
    if config_path is None:
        place = Path(target).resolve()
        owner = next(
            (p for p in (place, *place.parents) if (p / "config.yaml").is_file() and (p / "metrics.jsonl").is_file()),
            None,
        )
        if owner is None:
            raise ConfigError(
                f"{target} belongs to no run, so rewards and sampling are unknown. Give --config CONFIG.yaml."
            )
        config_path = str(owner / "config.yaml")
    config = config_load.load(config_path, overrides)
    if datasets:
        config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, datasets=list(datasets)))
        if problems := config_check.check(config):
            raise ConfigError(problems)
    if not config.eval.datasets:
        raise ConfigError("nothing to evaluate on: eval.datasets is empty. Give --data FILE.")
    return config
