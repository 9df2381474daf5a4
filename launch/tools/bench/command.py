"""Runs the loop for the steps that the options ask for, and reports the result."""

import contextlib
import math
import os
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from launch import datasets
from launch.printing import print_line, write_figures
from launch.tools import synthetic
from launch.tools.analysis.trace import read_spans, write_trace
from launch.tools.bench.figures import BenchMachine, RankMemory, measure, require_whole_updates
from launch.tools.bench.options import BenchOptions, BenchSetup, load_model_settings, make_prompts, make_setup
from launch.tools.bench.peak_flops import gpu_name, gpu_peak, measure_cpu_peak
from launch.tools.bench.report import print_report
from launch.tools.estimates.memory import SequenceLengths
from launch.tools.estimates.processes import memory_by_role
from launch.tools.plan import costs
from rlsys.config.schema import Config
from rlsys.data import Dataset
from rlsys.models.config_json import context_from_config
from rlsys.models.lookup import known_flop_counter, known_model_shape
from rlsys.pipeline import SyncSchedule
from rlsys.runs.directory import RunDirectory, read_lines, require_writable
from rlsys.runs.progress import Progress
from rlsys.runs.run_log import RunLog
from rlsys.types import Metrics


def bench(config: Config, options: BenchOptions, console: Console) -> None:
    if options.rewards:
        datasets.peek(config)
    for file in (options.json, options.trace):
        if file:
            require_writable(Path(file))
    options = replace(options, steps=SyncSchedule.from_config(config).round_up_to_sync(options.steps))
    with tempfile.TemporaryDirectory(prefix="rlsys-bench-", dir=shared_folder(config)) as folder:
        # transformers sets torch's compile cache as soon as it reads a model's settings. Ray's session sets its own.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
        model_settings = load_model_settings(config)
        window = context_from_config(model_settings.to_dict())
        setup = make_setup(config, options, str(Path(folder) / "run"), window)
        run = RunDirectory(setup.config)
        try:
            with Progress(console, options.warmup + options.steps) as progress:
                machine = run_loop(setup, options, model_settings, run, progress)
        finally:
            run.close()
        report = measure(setup, options, run.path, machine)
        print_report(report, setup.config, console)
        require_whole_updates(report.work, setup.config)
        if options.trace:
            spans = write_trace(run.path, Path(options.trace))
            viewers = "https://ui.perfetto.dev or chrome://tracing"
            print_line(console, f"trace: {options.trace}, {spans:,} spans. Open it at {viewers}.")
        if options.json:
            lines = [line for line in read_lines(run.path / "metrics.jsonl") if line["step"] > options.warmup]
            work = costs.fit_costs(read_spans(run.path), lines, setup.config, setup.prompt_tokens)
            lengths = {"longest": setup.lengths.longest, "mean": setup.lengths.mean}
            figures = (
                {"options": asdict(options) | {"prompt_tokens": setup.prompt_tokens} | lengths}
                | report.as_dict()
                | {"costs": asdict(work)}
            )
            write_figures(options.json, figures, console)


def shared_folder(config: Config) -> Path | None:
    """The folder for the run: on a cluster, next to the run directory, which all hosts see; else the temporary one."""
    if not (config.cluster.address or os.environ.get("RAY_ADDRESS")):
        return None
    folder = Path(config.run.dir).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_loop(
    setup: BenchSetup, options: BenchOptions, model_settings: Any, run: RunDirectory, progress: Progress
) -> BenchMachine:
    """Trains for warmup and measured steps."""
    from launch.cluster import running_cluster
    from launch.tools.advice import choose_checkpointing, explain_disagreement
    from rlsys.runs.stopping import StopSignal
    from rlsys.trainer import Trainer
    from workers.fleet.watchdog import Watchdog

    config = setup.config
    watchdog = Watchdog.from_config(config, run.logs, StopSignal(), progress.note, run.record_event)
    with running_cluster(config, watchdog, choose_checkpointing) as cluster:
        run.warm_up_writer()
        vocabulary = min(len(cluster.tokenizer), int(model_settings.get_text_config().vocab_size))
        prompts = make_prompts(setup, options, vocabulary, cluster, progress)
        cluster.wait_until_ready(setup.prompt_tokens + config.rollout.max_new_tokens)
        assert cluster.policy is not None
        rollout = synthetic.FixedLengthRollout if options.rewards else synthetic.NamedSamples
        trainer = Trainer(
            config,
            train=Dataset(prompts, seed=config.run.seed),
            evals=[],
            rollout=rollout(cluster.rollout, setup.lengths),
            rewards=cluster.rewards,
            policy=cluster.policy,
            reference=cluster.reference,
            critic=cluster.critic,
            log=RunLog(run, StopAfterStep(progress, options.warmup + options.steps)),
            explain=partial(explain_disagreement, policy=cluster.policy, config=config),
        )
        with contextlib.suppress(BenchDone):
            trainer.run()
        progress.note("stopping")
        sync_bytes = weight_bytes(config, cluster.policy.weight_sync.info["manifest"])
        allocated = cluster.policy.most_gpu_memory()
        gpu = gpu_name() if config.cluster.device == "gpu" else ""
    peak = gpu_peak(config, gpu) if config.cluster.device == "gpu" else measure_cpu_peak(config)
    memory = RankMemory(allocated, planned_bytes(setup)) if allocated else None
    return BenchMachine(known_flop_counter(model_settings.to_dict()), sync_bytes, peak, memory)


class BenchDone(Exception):
    """Ends the run after its last measured step. A run that ends by itself would save its weights."""


class StopAfterStep:
    """Passes progress on, and raises `BenchDone` after the last step."""

    def __init__(self, progress: Progress, last: int):
        self.progress, self.last = progress, last

    def step(self, step: int, metrics: Metrics) -> None:
        self.progress.step(step, metrics)
        if step == self.last:
            raise BenchDone

    def note(self, text: str) -> None:
        self.progress.note(text)

    def show_phase(self, phase: str) -> None:
        self.progress.show_phase(phase)


def planned_bytes(setup: BenchSetup) -> float | None:
    """What `rlsys plan` counts for tensors of rank 0 on its GPU; None for an unknown architecture."""
    model = known_model_shape(setup.config.model.path)
    if model is None:
        return None
    lengths = SequenceLengths(setup.prompt_tokens, setup.lengths.longest)
    _, parts = memory_by_role(setup.config, model, lengths)["policy-0"].peak(on_device=True)
    return sum(size for name, size in parts.items() if name != "fixed")  # contexts and buffers of NCCL are no tensors


def weight_bytes(config: Config, manifest: list[tuple[str, str, list[int]]]) -> int:
    """Bytes that one sync sends."""
    return sum(math.prod(shape) for _, _, shape in manifest) * (4 if config.rollout.dtype == "float32" else 2)
