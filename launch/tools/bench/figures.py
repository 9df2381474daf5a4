"""What a bench came to, from its run's own files: its figures, its timeline and its samples."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.tools.bench.options import BenchOptions
from launch.tools.plan.layout import worker_names as names
from rlsys.algorithms.losses import LOSSES
from rlsys.analysis.trace import Span, busy_seconds, read_spans
from rlsys.config.schema import Config
from rlsys.models.flops import FlopCounter
from rlsys.runs.directory import read_lines

PHASES = ("rollout", "reward", "score", "update", "sync")
COUNTED = ("rollout", "score", "update", "sync")  # all else is overhead
SPANS = {"rollout": "generate", "score": "score", "update": "update"}  # what workers are at when they do a phase's work


@dataclass(frozen=True)
class BenchMachine:
    """What is put to use."""

    shape: FlopCounter | None  # of the model; None where its work cannot be counted
    weight_bytes: int  # bytes of a sync
    peak_flops: float | None  # FLOP/s of all that takes part; None where it is not known


@dataclass(frozen=True)
class WorkDone:
    """What the steps that are measured had to do."""

    samples: int  # trained on
    generated: int  # tokens of their completions
    trained: int  # tokens of all sequences that an update saw, prompts included
    flops: dict[str, float]  # of the phases that have any; empty for an architecture that cannot be counted


@dataclass(frozen=True)
class BenchReport:
    """What came out, in seconds and shares of a step. `as_dict` is what --json has."""

    steps: int
    step_seconds: list[float]  # seconds of each
    phases: dict[str, float]  # mean seconds of the driver
    busy_seconds: dict[str, float]  # by phase: seconds of all steps together in which any worker was at it
    sync_seconds: list[float]  # seconds of each
    machine: BenchMachine
    work: WorkDone
    idle_shares: dict[str, float]  # by worker
    span_shares: dict[str, dict[str, float]] = field(default_factory=dict)  # by worker and span: share of the time
    unrecorded_workers: list[str] = field(
        default_factory=list
    )  # workers that recorded nothing, as they do not see the run directory

    @property
    def mean_seconds(self) -> float:
        return statistics.fmean(self.step_seconds)

    @property
    def overhead(self) -> float:
        """Seconds of a step that are not rollout, score, update or sync."""
        return self.mean_seconds - sum(self.phases[name] for name in COUNTED)

    def flop_use(self, phase: str) -> float | None:
        """Share of the machine's peak that `step` put to use, or a phase while any worker was at it."""
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
            "idle_share": self.idle_shares,
            "work_share": self.span_shares,
            "unseen": self.unrecorded_workers,
        }

    @property
    def bandwidth(self) -> float | None:
        """GB/s at which weights become those of the engines."""
        return self.machine.weight_bytes / statistics.fmean(self.sync_seconds) / 1e9 if self.sync_seconds else None


def measure(config: Config, wanted: BenchOptions, run: Path, prompt: int, machine: BenchMachine) -> BenchReport:
    numbers = range(wanted.warmup + 1, wanted.warmup + wanted.steps + 1)
    lines = {line["step"]: line for line in read_lines(run / "metrics.jsonl")}
    found = read_spans(run)
    steps = [s for s in found if s.name == "step" and s.facts["step"] in numbers]
    begin, end = steps[0].start, steps[-1].end
    workers = sorted({s.worker for s in found} - {"driver"})
    inside = [s for s in found if s.worker != "driver" and s.end > begin and s.start < end]
    doing = {
        name: {
            what: busy_seconds([s for s in inside if s.worker == name and s.name == what], begin, end) / (end - begin)
            for what in sorted({s.name for s in inside if s.worker == name})
        }
        for name in workers
    }
    idle = {
        name: 1 - busy_seconds([s for s in inside if s.worker == name], begin, end) / (end - begin) for name in workers
    }
    return BenchReport(
        steps=wanted.steps,
        step_seconds=[s.seconds for s in steps],
        phases={name: statistics.fmean(lines[n][f"time/{name}"] for n in numbers) for name in PHASES},
        busy_seconds={
            phase: busy_seconds([s for s in inside if s.name == name], begin, end) for phase, name in SPANS.items()
        },
        sync_seconds=[s.seconds for s in found if (s.worker, s.name) == ("driver", "sync") and begin <= s.start <= end],
        machine=machine,
        work=count_work(config, run, numbers, prompt, machine.shape, inside),
        idle_shares=idle,
        span_shares=doing,
        unrecorded_workers=[name for name in names(config) if not (run / "logs" / f"{name}.log").exists()],
    )


def count_work(
    config: Config, run: Path, numbers: range, prompt: int, shape: FlopCounter | None, inside: list[Span]
) -> WorkDone:
    scorers = {s.worker.split("-")[0] for s in inside if s.name == "score"}
    learners = {s.worker.split("-")[0] for s in inside if s.name == "update"}
    samples = generated = trained = 0
    needed = dict.fromkeys(("rollout", "score", "update"), 0.0)
    for group in (g for n in numbers for g in read_groups(run / "samples" / f"step-{n:06d}.parquet")):
        lengths = [tokens for tokens, _ in group]
        samples, generated = samples + len(lengths), generated + sum(lengths)
        forward = shape.group_flops(prompt, lengths) if shape else 0.0
        needed["rollout"] += forward
        needed["score"] += forward * len(scorers)
        if learning := [tokens for tokens, advantage in group if advantage or all_samples_train(config)]:
            trained += sum(prompt + n for n in learning) * config.trainer.epochs_per_step
            forward = shape.group_flops(prompt, learning) if shape else 0.0
            needed["update"] += 3 * forward * config.trainer.epochs_per_step * len(learners)
    kept = {name: amount for name, amount in needed.items() if amount}
    return WorkDone(samples, generated, trained, kept)


def all_samples_train(config: Config) -> bool:
    """Whether a sample without an advantage has a gradient too."""
    kl = config.reference.kl_coef > 0 and config.reference.kl_in == "loss"
    e, a = config.entropy, config.algorithm
    return kl or e.coef > 0 or e.control == "kl_cov" or a.advantage == "gae" or a.loss not in LOSSES


def read_groups(file: Path) -> Iterator[list[tuple[int, float]]]:
    """Of each group of a step, its samples' (tokens, advantage)."""
    import pyarrow.compute
    import pyarrow.parquet

    found = pyarrow.parquet.read_table(file, columns=["uid", "tokens", "advantage"])
    lengths = pyarrow.compute.list_value_length(found["tokens"]).to_pylist()
    of_uid: dict[str, list[tuple[int, float]]] = {}
    for uid, n, advantage in zip(found["uid"].to_pylist(), lengths, found["advantage"].to_pylist(), strict=True):
        of_uid.setdefault(uid, []).append((n, advantage or 0.0))
    yield from of_uid.values()
