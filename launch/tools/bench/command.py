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
from launch.printing import print_line
from launch.tools import synthetic
from launch.tools.bench.figures import BenchMachine, measure
from launch.tools.bench.options import BenchOptions, load_model_settings, make_bench_config, make_prompts
from launch.tools.bench.peak_flops import gpu_name, gpu_peak, measure_cpu_peak
from launch.tools.bench.report import print_report
from launch.tools.plan import costs
from rlsys.analysis.trace import read_spans, write_trace
from rlsys.config.schema import Config
from rlsys.data import Dataset
from rlsys.models.lookup import known_flop_counter
from rlsys.models.shapes import context_from_config
from rlsys.pipeline import SyncSchedule
from rlsys.runs.directory import RunDirectory, read_lines, require_writable, write_user_file
from rlsys.runs.progress import Progress
from rlsys.types import Metrics


def bench(config: Config, wanted: BenchOptions, console: Console) -> None:
    if wanted.rewards:
        datasets.peek(config)
    for file in (wanted.json, wanted.trace):
        if file:
            require_writable(Path(file))
    wanted = replace(wanted, steps=SyncSchedule.from_config(config).round_up_to_sync(wanted.steps))
    with tempfile.TemporaryDirectory(prefix="rlsys-bench-", dir=shared_folder(config)) as folder:
        # Where transformers keeps what torch compiles, as soon as it reads a model's settings. Ray's session sets its own.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
        settings = load_model_settings(config)
        config, prompt, lengths = make_bench_config(
            config, wanted, str(Path(folder) / "run"), context_from_config(settings.to_dict())
        )
        run = RunDirectory(config)
        try:
            with Progress(console, wanted.warmup + wanted.steps) as progress:
                machine = run_loop(config, wanted, prompt, lengths, settings, run, progress)
        finally:
            run.close()
        report = measure(config, wanted, run.path, prompt, machine)
        print_report(report, config, console)
        if wanted.trace:
            written = write_trace(run.path, Path(wanted.trace))
            viewers = "https://ui.perfetto.dev or chrome://tracing"
            print_line(console, f"trace: {wanted.trace}, {written:,} spans. Open it at {viewers}.")
        if wanted.json:
            lines = [line for line in read_lines(run.path / "metrics.jsonl") if line["step"] > wanted.warmup]
            work = costs.fit_costs(read_spans(run.path), lines, config, prompt)
            asked = asdict(wanted) | {"prompt_tokens": prompt, "longest": lengths.longest, "mean": lengths.mean}
            figures = {"asked": asked} | report.as_dict() | {"costs": asdict(work)}
            write_user_file(Path(wanted.json), json.dumps(figures, indent=2) + "\n")
            print_line(console, f"figures: {wanted.json}")


def shared_folder(config: Config) -> Path | None:
    """A folder for the run: on a cluster where its hosts see the run directory, else wherever temporary files go."""
    if not (config.cluster.address or os.environ.get("RAY_ADDRESS")):
        return None
    folder = Path(config.run.dir).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_loop(
    config: Config,
    wanted: BenchOptions,
    prompt: int,
    lengths: synthetic.CompletionLengths,
    settings: Any,
    run: RunDirectory,
    progress: Progress,
) -> BenchMachine:
    """Trains as many steps as were asked for."""
    from launch.cluster import running_cluster
    from rlsys.runs.stopping import StopSignal
    from rlsys.trainer import Trainer
    from workers.supervision.watchdog import Watchdog

    with running_cluster(
        config, Watchdog.from_config(config, run.logs, StopSignal(), progress.note, run.record_event)
    ) as cluster:
        run.warm_up_writer()
        symbols = min(len(cluster.tokenizer), int(settings.get_text_config().vocab_size))
        rows = make_prompts(config, wanted, prompt, symbols, cluster, progress)
        cluster.wait_until_ready(prompt)
        assert cluster.policy is not None
        trainer = Trainer(
            config,
            train=Dataset(rows, seed=config.run.seed),
            evals=[],
            rollout=synthetic.FixedLengthRollout(cluster.rollout, lengths),
            rewards=cluster.rewards,
            policy=cluster.policy,
            reference=cluster.reference,
            critic=cluster.critic,
            run=run,
            progress=StopAfterStep(progress, wanted.warmup + wanted.steps),
        )
        with contextlib.suppress(BenchDone):
            trainer.run()
        progress.note("stopping")
        weights = weight_bytes(config, cluster.policy.weight_sync.info["manifest"])
        gpu = gpu_name() if config.cluster.device == "gpu" else ""
    peak = gpu_peak(config, gpu) if config.cluster.device == "gpu" else measure_cpu_peak(config)
    return BenchMachine(known_flop_counter(settings.to_dict()), weights, peak)


class BenchDone(Exception):
    """All steps that were asked for are measured. A run that ends by itself would save its weights."""


class StopAfterStep:
    """Progress that ends the run after a step."""

    def __init__(self, progress: Progress, last: int):
        self.progress, self.last = progress, last

    def step(self, step: int, found: Metrics) -> None:
        self.progress.step(step, found)
        if step == self.last:
            raise BenchDone

    def note(self, text: str) -> None:
        self.progress.note(text)

    def show_phase(self, phase: str) -> None:
        self.progress.show_phase(phase)


def weight_bytes(config: Config, manifest: list[tuple[str, str, list[int]]]) -> int:
    """Of all that a sync sends."""
    return sum(math.prod(shape) for _, _, shape in manifest) * (4 if config.rollout.dtype == "float32" else 2)
