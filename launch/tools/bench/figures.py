"""The figures of a bench, from the files of its run: metrics, timeline and samples."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.roles import worker_names
from launch.tools.analysis.trace import Span, busy_seconds, read_spans
from launch.tools.bench.options import BenchOptions, BenchSetup
from rlsys.algorithms.losses import LOSSES
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.models.flops import FlopCounter
from rlsys.runs.directory import read_lines

PHASES = ("rollout", "reward", "score", "update", "sync")
COUNTED = ("rollout", "score", "update", "sync")  # everything else is overhead
MIN_TRAINED_SHARE = 0.9  # of the samples: below, the figures are not those of whole updates
SPANS = {"rollout": "generate", "score": "score", "update": "update"}  # the span in which workers do a phase's work


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the policy's rank with the most, on its GPU."""

    allocated: int  # PyTorch's tensors at their most
    planned: float | None  # what `rlsys plan` counts for them


@dataclass(frozen=True)
class BenchMachine:
    """The capacity that the run uses."""

    shape: FlopCounter | None  # of the model; None if its work cannot be counted
    weight_bytes: int  # of a sync
    peak_flops: float | None  # FLOP/s of all devices together; None if not known
    memory: RankMemory | None = None  # None without GPUs


@dataclass(frozen=True)
class WorkDone:
    """The work of all measured steps."""

    samples: int
    generated: int  # tokens of completions
    trained: int  # tokens of all sequences in updates, prompts included
    flops: dict[str, float]  # by phase; empty for an architecture that cannot be counted
    trained_samples: int = 0


@dataclass(frozen=True)
class BenchReport:
    """The result, in seconds and shares of a step. --json writes `as_dict`."""

    steps: int
    step_seconds: list[float]  # of each step
    phases: dict[str, float]  # mean seconds of the driver
    busy_seconds: dict[str, float]  # by phase: time in which any worker did its work, over all steps
    sync_seconds: list[float]  # of each sync
    machine: BenchMachine
    work: WorkDone
    idle_shares: dict[str, float]  # by worker
    span_shares: dict[str, dict[str, float]] = field(default_factory=dict)  # by worker and span: share of the time
    unrecorded_workers: list[str] = field(default_factory=list)  # their hosts do not see the run directory

    @property
    def mean_seconds(self) -> float:
        return statistics.fmean(self.step_seconds)

    @property
    def overhead(self) -> float:
        """Seconds of a step that are not rollout, score, update or sync."""
        return self.mean_seconds - sum(self.phases[name] for name in COUNTED)

    def flop_use(self, phase: str) -> float | None:
        """Share of the machine's peak that a step used, or a phase while any worker did its work."""
        total = sum(self.work.flops.values()) if phase == "step" else self.work.flops.get(phase)
        seconds = self.mean_seconds * self.steps if phase == "step" else self.busy_seconds[phase]
        return total / seconds / self.machine.peak_flops if total and seconds and self.machine.peak_flops else None

    def as_dict(self) -> dict[str, Any]:
        w, all_s = self.work, self.mean_seconds * self.steps
        return {
            "steps": self.steps,
            "step_s": self.step_seconds,
            "phases_s": self.phases | {"other": self.mean_seconds - sum(self.phases.values())},
            "at_work_s": self.busy_seconds,
            "overhead_share": self.overhead / self.mean_seconds,
            "samples_per_s": w.samples / all_s,
            "samples": w.samples,
            "trained_samples": w.trained_samples,
            "generated_tokens_per_s": w.generated / all_s,
            "trained_tokens_per_s": w.trained / all_s,
            "flop_use": {name: self.flop_use(name) for name in ("step", *w.flops)},
            "peak_flops": self.machine.peak_flops,
            "needed_flops": w.flops,
            "sync": {
                "bytes": self.machine.weight_bytes,
                "s": statistics.fmean(self.sync_seconds or [0.0]),
                "gb_per_s": self.bandwidth,
            },
            "rank_memory": self.machine.memory and vars(self.machine.memory),
            "idle_share": self.idle_shares,
            "work_share": self.span_shares,
            "unseen": self.unrecorded_workers,
        }

    @property
    def bandwidth(self) -> float | None:
        """GB/s of weights in a sync."""
        return self.machine.weight_bytes / statistics.fmean(self.sync_seconds) / 1e9 if self.sync_seconds else None


def measure(setup: BenchSetup, options: BenchOptions, run: Path, machine: BenchMachine) -> BenchReport:
    """Reads the measured steps of a run."""
    config = setup.config
    numbers = range(options.warmup + 1, options.warmup + options.steps + 1)
    lines = {line["step"]: line for line in read_lines(run / "metrics.jsonl")}
    spans = read_spans(run)
    steps = [s for s in spans if s.name == "step" and s.facts["step"] in numbers]
    begin, end = steps[0].start, steps[-1].end
    worker_spans = [s for s in spans if s.worker != "driver" and s.end > begin and s.start < end]

    def share(chosen: list[Span]) -> float:
        return busy_seconds(chosen, begin, end) / (end - begin)

    by_worker = {
        name: [s for s in worker_spans if s.worker == name] for name in sorted({s.worker for s in spans} - {"driver"})
    }
    return BenchReport(
        steps=options.steps,
        step_seconds=[s.seconds for s in steps],
        phases={name: statistics.fmean(lines[n][f"time/{name}"] for n in numbers) for name in PHASES},
        busy_seconds={
            phase: busy_seconds([s for s in worker_spans if s.name == name], begin, end)
            for phase, name in SPANS.items()
        },
        sync_seconds=[s.seconds for s in spans if (s.worker, s.name) == ("driver", "sync") and begin <= s.start <= end],
        machine=machine,
        work=count_work(setup, run, numbers, machine.shape, worker_spans),
        idle_shares={name: 1 - share(own) for name, own in by_worker.items()},
        span_shares={
            worker: {name: share([s for s in own if s.name == name]) for name in sorted({s.name for s in own})}
            for worker, own in by_worker.items()
        },
        unrecorded_workers=[name for name in worker_names(config) if not (run / "logs" / f"{name}.log").exists()],
    )


def count_work(
    setup: BenchSetup, run: Path, numbers: range, shape: FlopCounter | None, worker_spans: list[Span]
) -> WorkDone:
    """Counts samples, tokens and FLOPs. A forward pass counts once for each role that scored or updated."""
    config, prompt = setup.config, setup.prompt_tokens
    scorers = {s.worker.split("-")[0] for s in worker_spans if s.name == "score"}
    learners = {s.worker.split("-")[0] for s in worker_spans if s.name == "update"}
    samples = generated = trained = trained_samples = 0
    needed = dict.fromkeys(("rollout", "score", "update"), 0.0)
    for group in (g for n in numbers for g in read_groups(run / "samples" / f"step-{n:06d}.parquet")):
        lengths = [tokens for tokens, _ in group]
        samples, generated = samples + len(lengths), generated + sum(lengths)
        forward = shape.group_flops(prompt, lengths) if shape else 0.0
        needed["rollout"] += forward
        needed["score"] += forward * len(scorers)
        if learning := [tokens for tokens, advantage in group if advantage or all_samples_train(config)]:
            trained_samples += len(learning)
            trained += sum(prompt + n for n in learning) * config.trainer.epochs_per_step
            forward = shape.group_flops(prompt, learning) if shape else 0.0
            needed["update"] += 3 * forward * config.trainer.epochs_per_step * len(learners)
    flops = {name: amount for name, amount in needed.items() if amount}
    return WorkDone(samples, generated, trained, flops, trained_samples)


def require_whole_updates(work: WorkDone, config: Config) -> None:
    """Refuses figures of updates that left out many samples: a step seems faster than it is."""
    share = work.trained_samples / max(work.samples, 1)
    if share >= MIN_TRAINED_SHARE * trainable_share(config):
        return
    raise ConfigError(
        f"{work.trained_samples:,} of {work.samples:,} samples were trained ({share:.0%}): the others have no advantage, so "
        "these figures are of a part of an update, and are not written. Without --rewards every group has different rewards; "
        "with reference.kl_coef > 0 (reference.kl_in=loss) all samples are trained."
    )


def trainable_share(config: Config) -> float:
    """The share of samples that a method trains: GRPO for pass@k only the best of each group, a user's own may leave out any."""
    if ":" in config.algorithm.advantage and not all_samples_train(config):
        return 0.0
    only_best = config.algorithm.advantage == "grpo_passk" and not all_samples_train(config)
    return 1 / config.trainer.samples_per_prompt if only_best else 1.0


def all_samples_train(config: Config) -> bool:
    """True if a sample without an advantage has a gradient too."""
    kl = config.reference.kl_coef > 0 and config.reference.kl_in == "loss"
    e, a = config.entropy, config.algorithm
    return kl or e.coef > 0 or e.control == "kl_cov" or a.advantage == "gae" or a.loss not in LOSSES


def read_groups(file: Path) -> Iterator[list[tuple[int, float]]]:
    """(tokens, advantage) of each sample, group by group."""
    import pyarrow.compute
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(file, columns=["uid", "tokens", "advantage"])
    lengths = pyarrow.compute.list_value_length(table["tokens"]).to_pylist()
    groups: dict[str, list[tuple[int, float]]] = {}
    for uid, n, advantage in zip(table["uid"].to_pylist(), lengths, table["advantage"].to_pylist(), strict=True):
        groups.setdefault(uid, []).append((n, advantage or 0.0))
    yield from groups.values()
