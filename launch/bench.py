"""`rlsys bench`: a configuration's own loop on synthetic prompts, and where the time of its steps goes.

The loop is the real one, with all its workers; prompts, lengths and rewards are `synthetic`. Nothing is evaluated or saved.
"""

import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from launch import datasets, synthetic
from launch.plan import costs
from launch.printing import say, table
from rlsys import flops
from rlsys.config import Checkpoint, Config, ConfigError, Data, Eval, Function, Overlong
from rlsys.config_check import check
from rlsys.data import Dataset
from rlsys.losses import LOSSES
from rlsys.metrics import Metrics
from rlsys.progress import Progress
from rlsys.run_directory import RunDirectory, read_lines, write
from rlsys.trace import Span, busy, spans, write_trace
from rlsys.types import Prompt

PHASES = ("rollout", "reward", "score", "update", "sync")
COUNTED = ("rollout", "score", "update", "sync")  # all else is overhead
PROMPT, COMPLETION = 256, 64  # tokens, where the model's window allows it


@dataclass(frozen=True)
class Wanted:
    """`rlsys bench` as it was asked for."""

    steps: int
    warmup: int
    prompt_tokens: int | None
    completion_tokens: int | None
    ragged: tuple[float, int] | None  # mean and maximum of completions
    rewards: bool  # whether the configuration's own functions judge its own rows
    json: str | None
    trace: str | None


@dataclass(frozen=True)
class Machine:
    """What is put to use."""

    shape: flops.Shape | None  # of the model; None where its work cannot be counted
    weights: int  # bytes of a sync
    peak: float | None  # FLOP/s of all that takes part; None where it is not known


@dataclass(frozen=True)
class Work:
    """What the steps that are measured had to do."""

    samples: int  # trained on
    generated: int  # tokens of their completions
    trained: int  # tokens of all sequences that an update saw, prompts included
    flops: dict[str, float]  # of the phases that have any; empty for an architecture that cannot be counted


@dataclass(frozen=True)
class Report:
    """What came out, in seconds and shares of a step. `as_dict` is what --json has."""

    steps: int
    step: list[float]  # seconds of each
    phases: dict[str, float]  # mean seconds
    syncs: list[float]  # seconds of each
    machine: Machine
    work: Work
    idle: dict[str, float]  # by worker
    doing: dict[str, dict[str, float]] = field(default_factory=dict)  # by worker and span: share of the time

    @property
    def seconds(self) -> float:
        return statistics.fmean(self.step)

    @property
    def overhead(self) -> float:
        """Seconds of a step that are not rollout, score, update or sync."""
        return self.seconds - sum(self.phases[name] for name in COUNTED)

    def use(self, phase: str) -> float | None:
        """Share of the machine's peak that a phase, or `step`, put to use."""
        total = sum(self.work.flops.values()) if phase == "step" else self.work.flops.get(phase)
        seconds = (self.seconds if phase == "step" else self.phases[phase]) * self.steps
        return total / seconds / self.machine.peak if total and seconds and self.machine.peak else None

    def as_dict(self) -> dict[str, Any]:
        w, all_s = self.work, self.seconds * self.steps
        return {
            "steps": self.steps,
            "step_s": self.step,
            "phases_s": self.phases | {"other": self.seconds - sum(self.phases.values())},
            "overhead_share": self.overhead / self.seconds,
            "samples_per_s": w.samples / all_s,
            "generated_tokens_per_s": w.generated / all_s,
            "trained_tokens_per_s": w.trained / all_s,
            "flop_use": {name: self.use(name) for name in ("step", *w.flops)},
            "peak_flops": self.machine.peak,
            "needed_flops": w.flops,
            "sync": {
                "bytes": self.machine.weights,
                "s": statistics.fmean(self.syncs or [0.0]),
                "gb_per_s": self.bandwidth,
            },
            "idle_share": self.idle,
            "work_share": self.doing,
        }

    @property
    def bandwidth(self) -> float | None:
        """GB/s at which weights become those of the engines, proof included."""
        return self.machine.weights / statistics.fmean(self.syncs) / 1e9 if self.syncs else None


def bench(config: Config, wanted: Wanted, console: Console) -> None:
    if wanted.rewards:
        datasets.peek(config)
    with tempfile.TemporaryDirectory(prefix="rlsys-bench-") as folder:
        # Where transformers keeps what torch compiles, as soon as it reads a model's settings. Ray's session sets its own.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
        settings = model_settings(config)
        config, prompt, lengths = benched(config, wanted, str(Path(folder) / "run"), window(settings))
        run = RunDirectory(config)
        try:
            with Progress(console, wanted.warmup + wanted.steps) as progress:
                machine = loop(config, wanted, prompt, lengths, settings, run, progress)
        finally:
            run.close()
        report = measured(config, wanted, run.path, prompt, machine)
        lines = [line for line in read_lines(run.path / "metrics.jsonl") if line["step"] > wanted.warmup]
        work_costs = costs.measured(spans(run.path), lines, prompt)
        spans_written = write_trace(run.path, Path(wanted.trace)) if wanted.trace else 0
    show(report, config, console)
    if wanted.json:
        asked = asdict(wanted) | {"prompt_tokens": prompt, "longest": lengths.longest, "mean": lengths.mean}
        figures = {"asked": asked} | report.as_dict() | {"costs": asdict(work_costs)}
        write(Path(wanted.json), json.dumps(figures, indent=2) + "\n")
        say(console, f"figures: {wanted.json}")
    if wanted.trace:
        say(
            console,
            f"trace: {wanted.trace}, {spans_written:,} spans. Open it at https://ui.perfetto.dev or chrome://tracing.",
        )


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
    from rlsys.stopping import Stop
    from rlsys.trainer import Trainer
    from workers.waiting import Watch

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
        weights = weight_bytes(config, cluster.policy.invitations[0]["manifest"])
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


# --- what is run ------------------------------------------------------------------------------------------------------------


def benched(config: Config, wanted: Wanted, folder: str, window: int) -> tuple[Config, int, synthetic.Lengths]:
    """The configuration that is run, tokens of a prompt, and lengths of completions."""
    prompt, longest, mean = wanted_tokens(wanted, window)
    r = replace(config.reward, max_failure_share=1.0)
    if not wanted.rewards:
        r = replace(r, functions={"coin": Function(function="launch.synthetic:coin")})
    ahead = config.pipeline.max_lag + 1  # the last steps of a run have nothing more to generate: they are not run
    changed = replace(
        config,
        run=replace(config.run, dir=folder),
        trainer=replace(config.trainer, steps=wanted.warmup + wanted.steps + ahead),
        rollout=replace(config.rollout, max_prompt_tokens=prompt, max_new_tokens=longest),
        data=config.data if wanted.rewards else Data(),
        reward=r,
        overlong=Overlong(),  # every completion is cut where it is told to be
        eval=Eval(every=0),
        checkpoint=Checkpoint(every=0),
    )
    if problems := check(changed):
        raise ConfigError(problems)
    return changed, prompt, synthetic.Lengths(mean, longest, config.run.seed)


def wanted_tokens(wanted: Wanted, window: int) -> tuple[int, int, float]:
    """Tokens of a prompt, of the longest completion, and of completions on average, within the model's window."""
    if wanted.ragged and wanted.completion_tokens:
        raise ConfigError("--ragged and --completion-tokens say the same thing; give one of them.")
    room = window or 1 << 30
    mean, longest = wanted.ragged or (wanted.completion_tokens, wanted.completion_tokens)
    longest = longest or min(COMPLETION, max(1, (room - (wanted.prompt_tokens or 0)) // 2))
    prompt = wanted.prompt_tokens or min(PROMPT, max(1, room - longest))
    if prompt + longest > room:
        raise ConfigError(
            f"prompts of {prompt} tokens and completions of {longest} do not fit into the model's window of {window}. "
            "Use a smaller --prompt-tokens, --completion-tokens or --ragged."
        )
    return prompt, longest, mean or longest


def prompts(
    config: Config, wanted: Wanted, length: int, symbols: int, cluster: Any, progress: Progress
) -> list[Prompt]:
    """As many as all steps take; with --rewards, behind each is a row of the configuration's own data."""
    found = synthetic.prompts(config.trainer.steps * config.trainer.prompts_per_step, length, symbols, config.run.seed)
    if not wanted.rewards:
        return found
    # Their own lengths do not matter: another prompt takes their place.
    unbound = replace(config, rollout=replace(config.rollout, max_prompt_tokens=0))
    rows = datasets.load(unbound, cluster.tokenizer, cluster.window, progress.note).train.take(0, len(found))
    return [replace(row, uid=made.uid, tokens=made.tokens) for row, made in zip(rows, found, strict=True)]


def model_settings(config: Config) -> Any:
    from transformers import AutoConfig

    from launch.cluster import find_model

    return AutoConfig.from_pretrained(
        find_model(config, lambda _: None), trust_remote_code=config.model.trust_remote_code
    )


def window(settings: Any) -> int:
    return int(getattr(settings, "max_position_embeddings", 0) or 0)


# --- what came out ----------------------------------------------------------------------------------------------------------


def measured(config: Config, wanted: Wanted, run: Path, prompt: int, machine: Machine) -> Report:
    """From the run's own files: its figures, its timeline and its samples."""
    numbers = range(wanted.warmup + 1, wanted.warmup + wanted.steps + 1)
    lines = {line["step"]: line for line in read_lines(run / "metrics.jsonl")}
    found = spans(run)
    steps = [s for s in found if s.name == "step" and s.facts["step"] in numbers]
    begin, end = steps[0].at, steps[-1].end
    workers = sorted({s.worker for s in found} - {"driver"})
    inside = [s for s in found if s.worker != "driver" and s.end > begin and s.at < end]
    doing = {
        name: {
            what: busy([s for s in inside if s.worker == name and s.name == what], begin, end) / (end - begin)
            for what in sorted({s.name for s in inside if s.worker == name})
        }
        for name in workers
    }
    idle = {name: 1 - busy([s for s in inside if s.worker == name], begin, end) / (end - begin) for name in workers}
    return Report(
        steps=wanted.steps,
        step=[s.seconds for s in steps],
        phases={name: statistics.fmean(lines[n][f"time/{name}"] for n in numbers) for name in PHASES},
        syncs=[s.seconds for s in found if (s.worker, s.name) == ("driver", "sync") and begin <= s.at <= end],
        machine=machine,
        work=work(config, run, numbers, prompt, machine.shape, inside),
        idle=idle,
        doing=doing,
    )


def work(config: Config, run: Path, numbers: range, prompt: int, shape: flops.Shape | None, inside: list[Span]) -> Work:
    scorers = {s.worker.split("-")[0] for s in inside if s.name == "score"}
    learners = {s.worker.split("-")[0] for s in inside if s.name == "update"}
    samples = generated = trained = 0
    needed = dict.fromkeys(("rollout", "score", "update"), 0.0)
    for group in (g for n in numbers for g in groups(run / "samples" / f"step-{n:06d}.parquet")):
        lengths = [tokens for tokens, _ in group]
        samples, generated = samples + len(lengths), generated + sum(lengths)
        forward = shape.group(prompt, lengths) if shape else 0.0
        needed["rollout"] += forward
        needed["score"] += forward * len(scorers)
        if learning := [tokens for tokens, advantage in group if advantage or all_teach(config)]:
            trained += sum(prompt + n for n in learning) * config.trainer.epochs_per_step
            forward = shape.group(prompt, learning) if shape else 0.0
            needed["update"] += 3 * forward * config.trainer.epochs_per_step * len(learners)
    kept = {name: amount for name, amount in needed.items() if amount}
    return Work(samples, generated, trained, kept)


def all_teach(config: Config) -> bool:
    """Whether a sample without an advantage has a gradient too."""
    kl = config.reference.kl_coef > 0 and config.reference.kl_in == "loss"
    e, a = config.entropy, config.algorithm
    return kl or e.coef > 0 or e.control == "kl_cov" or a.advantage == "gae" or a.loss not in LOSSES


def groups(file: Path) -> Iterator[list[tuple[int, float]]]:
    """Of each group of a step, its samples' (tokens, advantage)."""
    import pyarrow.compute
    import pyarrow.parquet

    found = pyarrow.parquet.read_table(file, columns=["uid", "tokens", "advantage"])
    lengths = pyarrow.compute.list_value_length(found["tokens"]).to_pylist()
    of_uid: dict[str, list[tuple[int, float]]] = {}
    for uid, n, advantage in zip(found["uid"].to_pylist(), lengths, found["advantage"].to_pylist(), strict=True):
        of_uid.setdefault(uid, []).append((n, advantage or 0.0))
    yield from of_uid.values()


def weight_bytes(config: Config, manifest: list[tuple[str, str, list[int]]]) -> int:
    """Of all that a sync sends."""
    return sum(math.prod(shape) for _, _, shape in manifest) * (4 if config.rollout.dtype == "float32" else 2)


def peak_of_cpu(config: Config) -> float:
    """FLOP/s of a large matrix product, on as many threads as engines and ranks have together, at most the machine's cores.

    The workers are gone by now: it has the machine to itself, as far as the loop had it.
    """
    import torch

    threads = min(config.rollout.engines + config.policy.ranks * config.policy.threads, len(os.sched_getaffinity(0)))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a = torch.randn(2048, 2048, dtype=getattr(torch, config.policy.dtype))
        found = []
        for _ in range(6):
            began = time.perf_counter()
            a @ a
            found.append(2 * 2048**3 / (time.perf_counter() - began))
    finally:
        torch.set_num_threads(before)
    return max(found)


def gpu_name() -> str:
    """What Ray calls the cluster's GPUs, such as H100; empty if it does not know, or they are of several kinds."""
    import ray

    kinds = [name.partition(":")[2] for name in ray.cluster_resources() if name.startswith("accelerator_type:")]
    return kinds[0] if len(kinds) == 1 else ""


def peak_of_gpus(config: Config, name: str) -> float | None:
    r, p, c = config.rollout, config.policy, config.critic
    one = flops.peak_of(name, p.dtype)
    critics = c.ranks if config.algorithm.advantage == "gae" else 0
    apart = config.cluster.placement == "separate"
    return one and one * (r.engines * r.tensor_parallel + (p.ranks + critics) * apart)


# --- shown ------------------------------------------------------------------------------------------------------------------


def show(report: Report, config: Config, console: Console) -> None:
    w, figures = report.work, report.as_dict()
    phases = table("phase", "seconds", "share", "FLOP use")
    for name, seconds in figures["phases_s"].items():
        phases.add_row(
            name, f"{seconds:.3f}", f"{seconds / report.seconds:.1%}", percent(figures["flop_use"].get(name))
        )
    spread = f"{min(report.step):.3f} to {max(report.step):.3f}"
    phases.add_row("step", f"{report.seconds:.3f}", spread, percent(figures["flop_use"]["step"]), style="bold")
    console.print()
    console.print(phases)
    workers = table("worker", "idle", "at")
    workers.columns[-1].justify = "left"
    for name, share in report.idle.items():
        at = ", ".join(f"{what} {part:.1%}" for what, part in report.doing[name].items())
        workers.add_row(Text(name), f"{share:.1%}", at)
    console.print()
    console.print(workers)
    console.print()
    say(console, f"{w.samples / report.steps:,.0f} samples a step, {figures['samples_per_s']:,.1f} samples/s")
    say(
        console,
        f"{figures['generated_tokens_per_s']:,.0f} tokens/s generated, {figures['trained_tokens_per_s']:,.0f} trained",
    )
    if report.bandwidth:
        seconds = figures["sync"]["s"]
        say(
            console,
            f"sync: {report.machine.weights / 1e6:,.1f} MB in {seconds:.3f} s, {report.bandwidth:.2f} GB/s, proof included",
        )
    say(console, f"not in rollout, score, update or sync: {report.overhead / report.seconds:.1%} of a step")
    if not w.flops:
        say(console, "FLOP use is not known: this architecture's work is not counted (rlsys/flops.py)", "dim")
    elif report.machine.peak is None:
        say(console, "FLOP use is not known: nothing is known of these GPUs (rlsys/flops.py)", "dim")
    else:
        against = "a large matrix product here" if config.cluster.device == "cpu" else "what the GPUs can do"
        say(console, f"FLOP use: work that is needed, over {against}: {report.machine.peak / 1e9:,.0f} GFLOP/s", "dim")


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
