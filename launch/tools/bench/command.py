"""Runs the loop for as many steps as were asked for, and says what came out."""

import contextlib
import json
import math
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from launch import datasets
from launch.printing import say
from launch.tools import synthetic
from launch.tools.bench.figures import Machine, measured
from launch.tools.bench.peak import gpu_name, peak_of_cpu, peak_of_gpus
from launch.tools.bench.shown import show
from launch.tools.bench.wanted import Wanted, benched, model_settings, prompts
from launch.tools.plan import costs
from rlsys.analysis.trace import spans, write_trace
from rlsys.config.schema import Config
from rlsys.data import Dataset
from rlsys.models import flops
from rlsys.models.shapes import window_in
from rlsys.pipeline import Timetable
from rlsys.runs.directory import RunDirectory, can_be_written, read_lines, write_named
from rlsys.runs.progress import Progress
from rlsys.types import Metrics


def bench(config: Config, wanted: Wanted, console: Console) -> None:
    if wanted.rewards:
        datasets.peek(config)
    for file in (wanted.json, wanted.trace):
        if file:
            can_be_written(Path(file))
    wanted = replace(wanted, steps=Timetable.of(config).whole(wanted.steps))
    with tempfile.TemporaryDirectory(prefix="rlsys-bench-", dir=seen_by_all(config)) as folder:
        # Where transformers keeps what torch compiles, as soon as it reads a model's settings. Ray's session sets its own.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
        settings = model_settings(config)
        config, prompt, lengths = benched(config, wanted, str(Path(folder) / "run"), window_in(settings.to_dict()))
        run = RunDirectory(config)
        try:
            with Progress(console, wanted.warmup + wanted.steps) as progress:
                machine = loop(config, wanted, prompt, lengths, settings, run, progress)
        finally:
            run.close()
        report = measured(config, wanted, run.path, prompt, machine)
        show(report, config, console)
        if wanted.trace:
            written = write_trace(run.path, Path(wanted.trace))
            viewers = "https://ui.perfetto.dev or chrome://tracing"
            say(console, f"trace: {wanted.trace}, {written:,} spans. Open it at {viewers}.")
        if wanted.json:
            lines = [line for line in read_lines(run.path / "metrics.jsonl") if line["step"] > wanted.warmup]
            work = costs.measured(spans(run.path), lines, config, prompt)
            asked = asdict(wanted) | {"prompt_tokens": prompt, "longest": lengths.longest, "mean": lengths.mean}
            figures = {"asked": asked} | report.as_dict() | {"costs": asdict(work)}
            write_named(Path(wanted.json), json.dumps(figures, indent=2) + "\n")
            say(console, f"figures: {wanted.json}")


def seen_by_all(config: Config) -> Path | None:
    """A folder for the run: on a cluster where its hosts see the run directory, else wherever temporary files go."""
    if not (config.cluster.address or os.environ.get("RAY_ADDRESS")):
        return None
    folder = Path(config.run.dir).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def loop(
    config: Config,
    wanted: Wanted,
    prompt: int,
    lengths: synthetic.Lengths,
    settings: Any,
    run: RunDirectory,
    progress: Progress,
) -> Machine:
    """Trains as many steps as were asked for."""
    from launch.cluster import started
    from rlsys.runs.stopping import Stop
    from rlsys.trainer import Trainer
    from workers.supervision.waiting import Watch

    with started(config, Watch.of(config, run.logs, Stop(), progress.note, run.event)) as cluster:
        run.prepare()
        symbols = min(len(cluster.tokenizer), int(settings.get_text_config().vocab_size))
        rows = prompts(config, wanted, prompt, symbols, cluster, progress)
        cluster.ready(prompt)
        assert cluster.policy is not None
        trainer = Trainer(
            config,
            train=Dataset(rows, seed=config.run.seed),
            evals=[],
            rollout=synthetic.SetLengths(cluster.rollout, lengths),
            rewards=cluster.rewards,
            policy=cluster.policy,
            reference=cluster.reference,
            critic=cluster.critic,
            run=run,
            progress=Until(progress, wanted.warmup + wanted.steps),
        )
        with contextlib.suppress(Enough):
            trainer.run()
        progress.note("stopping")
        weights = weight_bytes(config, cluster.policy.invitation["manifest"])
        gpu = gpu_name() if config.cluster.device == "gpu" else ""
    peak = peak_of_gpus(config, gpu) if config.cluster.device == "gpu" else peak_of_cpu(config)
    return Machine(flops.shape_of(settings), weights, peak)


class Enough(Exception):
    """All steps that were asked for are measured. A run that ends by itself would save its weights."""


class Until:
    """Progress that ends the run after a step."""

    def __init__(self, progress: Progress, last: int):
        self.progress, self.last = progress, last

    def step(self, step: int, found: Metrics) -> None:
        self.progress.step(step, found)
        if step == self.last:
            raise Enough

    def note(self, text: str) -> None:
        self.progress.note(text)

    def at(self, doing: str) -> None:
        self.progress.at(doing)


def weight_bytes(config: Config, manifest: list[tuple[str, str, list[int]]]) -> int:
    """Of all that a sync sends."""
    return sum(math.prod(shape) for _, _, shape in manifest) * (4 if config.rollout.dtype == "float32" else 2)
