"""World "trainer": Trainer, Pipeline, BatchSource, Oversampling, Collector, EarlyScoring, Checkpointing and RunDirectory.

A run lives several lives: SIGTERM, SIGKILL, a power failure or a failing disk ends each but the last, at any moment. In the
end its weights are those of a run that nothing disturbed. Samples, verdicts, updates and files take simulated time.
"""

import contextlib
import gc
import hashlib
import json
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from failing_disk import ERRORS, FailingDisk, Killed
from fakes import (
    FakeCritic,
    FakePolicy,
    FakeProgress,
    FakeReference,
    FakeRewards,
    FakeRollout,
    make_config,
    make_dataset,
)
from invariants import require
from schedules import World

from launch.tools.estimates.virtual_time import VirtualTime
from rlsys.config import loading
from rlsys.config.schema import Config
from rlsys.data import Dataset
from rlsys.errors import ConfigError, StepAbandoned
from rlsys.evaluation.held_out import HeldOutSet
from rlsys.runs.checkpoint import SUMS, Checkpoints, find_damage, list_checkpoints
from rlsys.runs.directory import RunDirectory, read_lines
from rlsys.runs.disk import write_synced
from rlsys.runs.run_log import RunLog
from rlsys.runs.stopping import StopSignal
from rlsys.trainer import Trainer
from rlsys.types import Batch, Metrics, Prompt, Request, Sample, Verdict, join_partial

STEPS = 6
ALWAYS = ("trainer.max_mismatch=1000", "reward.max_failure_share=1", f"trainer.steps={STEPS}")
EXTRAS: tuple[tuple[str, ...], ...] = (
    (),
    ("dynamic_sampling.enabled=true", "dynamic_sampling.max_rounds=50"),
    ("eval.every=2",),
    ("reference.kl_coef=0.1", "reference.refresh_every=2"),
    ("reference.kl_coef=0.1", "reference.kl_target=0.3"),
    ("algorithm.advantage=gae",),
)
BY_TIME = ("pipeline.in_flight=true", "rollout.oversample=0.5")  # what is sampled depends on time
POLL_S = 0.5


class Machine:
    """What all machines of a life share."""

    def __init__(self, life: "Life"):
        self.life, self.events = life, list[str]()

    def take(self, mean: float, most: float = 1e9) -> None:
        """Lets time pass, as a wait for a worker does: at most until the run must end."""
        life = self.life
        until = life.time.now() + min(life.rng.expovariate(1 / mean), most)
        while (left := until - life.time.now()) > 0:
            life.time.sleep(min(POLL_S, left))
            life.stop.raise_if_stopped()


class SlowRollout(Machine, FakeRollout):
    def __init__(self, life: "Life"):
        Machine.__init__(self, life)
        FakeRollout.__init__(self, [])
        self.enough = False

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        self.enough, rng = False, self.life.rng
        began = self.version
        waiting = list(requests)
        while waiting and not self.enough:
            self.take(self.life.world.sample_s)
            done = [waiting.pop(rng.randrange(len(waiting))) for _ in range(rng.randint(1, len(waiting)))]
            if not self.life.world.in_flight:
                require(4, self.version == began, f"weights {self.version} came to engines that sample with {began}")
            yield [self.whole(r) for r in done]
        if cut := [self.part(r) for r in waiting if rng.random() < 0.7]:
            yield cut

    def whole(self, request: Request) -> Sample:
        whole, begun = self.one(request, self.version), request.partial
        if begun is None:
            return whole
        rest = slice(len(begun.tokens), None)
        return join_partial(begun, replace(whole, tokens=whole.tokens[rest], logprobs=whole.logprobs[rest]))

    def part(self, request: Request) -> Sample:
        whole = self.whole(request)
        count = self.life.rng.randint(len(request.partial.tokens) if request.partial else 0, len(whole.tokens) - 1)
        changes = tuple(c for c in whole.changes if c[0] < count)
        return replace(
            whole, tokens=whole.tokens[:count], logprobs=whole.logprobs[:count], finish="cut", changes=changes
        )

    def stop_early(self) -> None:
        self.enough = True


class SlowRewards(Machine, FakeRewards):
    """Verdicts come late and in any order. Some fail, always the same."""

    def __init__(self, life: "Life"):
        Machine.__init__(self, life)
        FakeRewards.__init__(self)

    def judge(self, samples: list[Sample], prompts: dict[str, Prompt]) -> Future[list[Verdict]]:
        done: Future[list[Verdict]] = self.life.time.future()
        verdicts = [self.verdict(s, prompts[s.uid]) for s in samples]
        self.life.time.after(self.life.rng.expovariate(2), lambda: done.set_result(verdicts))
        return done

    def verdict(self, sample: Sample, prompt: Prompt) -> Verdict:
        if self.life.world.failing and hash_of(f"{sample.uid} {sample.index}") % 16 == 0:
            return Verdict(None, failure="timeout", detail="no verdict after 10 s")
        return super().verdict(sample, prompt)


class Saving(Machine):
    """Files are written by another thread while training goes on, as ranks do."""

    file_name = ""

    def written(self) -> float:
        raise NotImplementedError

    def save(self, folder: str) -> None:
        self.take(0.1)
        value, file = json.dumps(self.written()), Path(folder) / self.file_name

        def write() -> dict[str, str]:
            self.life.time.sleep(min(self.life.rng.expovariate(5), 0.4))
            write_synced(file, value.encode())
            return {file.name: hashlib.sha256(value.encode()).hexdigest()}

        self.writing = self.life.time.submit(write, f"write {self.file_name}")

    def saved_files(self, wait: bool) -> dict[str, str] | None:
        return self.writing.result() if wait or self.writing.done() else None


class SlowPolicy(Saving, FakePolicy):
    file_name = "weight.json"

    def __init__(self, life: "Life", rollout: SlowRollout):
        Saving.__init__(self, life)
        FakePolicy.__init__(self, [], rollout)

    def written(self) -> float:
        return self.weight

    def score(self, packs: Any) -> Any:
        self.take(0.2)
        return super().score(packs)

    def update(self, packs: Any, lr: float, kl_coef: float) -> Metrics:
        self.take(1.0)
        return super().update(packs, lr, kl_coef)

    def sync(self, version: int) -> None:
        self.take(0.2)
        super().sync(version)


class SlowCritic(Saving, FakeCritic):
    file_name = "value.json"

    def __init__(self, life: "Life"):
        Saving.__init__(self, life)
        FakeCritic.__init__(self, [])

    def written(self) -> float:
        return self.value


class SlowReference(Saving, FakeReference):
    file_name = "reference.json"

    def __init__(self, life: "Life", policy: SlowPolicy):
        Saving.__init__(self, life)
        FakeReference.__init__(self, [], policy)

    def written(self) -> float:
        return self.weight


class Log(RunLog):
    """Checks what is trained on."""

    life: "Life"

    def samples(self, name: str, batch: Batch, *columns: Any) -> None:
        super().samples(name, batch, *columns)
        if name.startswith("step-"):
            self.life.world.check_batch(int(name.removeprefix("step-")), batch, self.life)


class Directory(RunDirectory):
    """Settings are always the same, and to compare them takes longer than a life."""

    def _refuse_changes(self, *_: Any) -> None:
        pass


class Life:
    """One start of the run's driver."""

    def __init__(self, world: "Trainers", seed: str, folder: Path):
        self.world, self.rng, self.folder = world, random.Random(seed), folder
        self.time = VirtualTime(seed=f"{seed} order", limit_s=world.limit_s)
        self.stop = StopSignal(self.time)
        self.disk = FailingDisk(folder, self.rng, world.log, world.flushed)
        self.done: int | None = None  # what the run returned
        self.trainer: Trainer | None = None
        self.run_directory: RunDirectory | None = None

    def start(self, config: Config) -> int:
        self.run_directory = run = Directory(config, threads=self.time)
        self.world.log("starts")
        checkpoints = Checkpoints(run.path / "checkpoints", config.checkpoint.keep_last)
        newest = checkpoints.load_newest(self.world.log)
        self.restored = newest.state.step if newest else 0
        if newest and newest.state.step >= STEPS and not newest.state.pending_metrics:
            return newest.state.step
        self.rollout = SlowRollout(self)
        self.policy = SlowPolicy(self, self.rollout)
        log = Log(run, FakeProgress())
        log.life, log.note = self, self.world.log
        self.trainer = Trainer(
            config,
            train=dataset("zigzag", 10),
            evals=[HeldOutSet("easy", dataset("easy", 3).prompts)] if config.eval.every else [],
            rollout=self.rollout,
            rewards=SlowRewards(self),
            policy=self.policy,
            reference=SlowReference(self, self.policy) if config.reference.kl_coef else None,
            critic=SlowCritic(self) if config.algorithm.advantage == "gae" else None,
            log=log,
            explain=lambda agreement, weights: AssertionError(f"{agreement}"),
            stop=self.stop,
            newest=newest,
        )
        try:
            done = self.trainer.run()
        except StepAbandoned:  # before the first step
            done = self.restored
        run.close()
        return done

    def live(self, config: Config) -> str:
        """Returns how it ended: done, stopped, killed, or the disk's error."""
        with self.disk.in_place(), patch.object(loading, "to_yaml", repr):
            try:
                self.done = self.time.run(lambda: self.start(config))
                return "done" if self.done == STEPS and not self.evaluation_is_due else "stopped"
            except Killed:
                return "killed"
            except (OSError, ConfigError) as error:
                if not self.disk.failed:
                    raise
                return f"ended by the disk: {error}"
            finally:
                self.let_go()

    @property
    def evaluation_is_due(self) -> bool:
        return bool(self.trainer and self.trainer.state.pending_metrics)

    def let_go(self) -> None:
        """What the kernel does when a process ends."""
        self.time.error = None
        if self.run_directory is None:  # an error ended it half opened, with its lock
            gc.collect()
        elif not self.run_directory._lock.closed:
            self.run_directory._lock.close()

    # --- how it ends ----------------------------------------------------------------------------------------------------

    def disturb(self) -> None:
        kind = self.rng.choice(["SIGTERM", "SIGTERM", "SIGKILL", "power failure", "disk", "disk"])
        happen = {"SIGTERM": self.terminate, "disk": self.break_disk}.get(kind, lambda: self.kill(kind))
        if kind == "disk" or self.rng.random() < 0.4:
            self.disk.plans[self.rng.randint(1, 150)] = happen
        else:
            self.time.after(self.rng.uniform(0, self.rng.choice([5, 30, 100])), happen)

    def terminate(self) -> None:
        self.world.fault("SIGTERM")
        self.stop.request(self.rng.choice([3.0, 25.0]))

    def kill(self, kind: str) -> None:
        self.world.fault(kind)
        self.power_failed = kind == "power failure"
        self.disk.kill()
        self.time.error = self.time.error or Killed()
        raise self.time.error

    power_failed = False

    def break_disk(self) -> None:
        error, count = self.rng.choice(ERRORS), self.rng.choice([1, 1, 2, 20])
        self.world.fault(f"the disk fails {count} times")
        self.disk.fail(error, count)


def hash_of(value: str) -> int:
    return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=4).digest(), "big")


@cache
def dataset(source: str, count: int) -> Dataset:
    return make_dataset(count, source=source)


@cache
def read_config(options: tuple[str, ...]) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        return make_config(Path(folder), *options)


UNDISTURBED: dict[tuple[str, ...], float] = {}  # final weights by options


class Trainers(World):
    name = "trainer"
    limit_s = 20_000.0

    def __init__(self, seed: int):
        super().__init__(seed)
        rng = self.rng
        lag = rng.choice([0, 0, 1, 2, 3])
        extra = rng.choice(EXTRAS)
        self.in_flight = lag > 0 and rng.random() < 0.25
        oversamples = lag > self.in_flight and rng.random() < 0.25 and "dynamic" not in str(extra)
        by_time = [option for option, on in zip(BY_TIME, (self.in_flight, oversamples), strict=True) if on]
        self.exact = not by_time
        self.plain = self.exact and "dynamic" not in str(extra)
        self.failing = rng.random() < 0.3
        self.sample_s = rng.choice([0.3, 3.0, 20.0])
        eval_every = () if any("eval.every" in option for option in extra) else ("eval.every=0",)
        if by_time:
            by_time.append("trainer.updates_per_step=1")
        every = f"checkpoint.every={rng.choice([1, 2, 4])}"
        self.options = (*ALWAYS, *extra, *eval_every, *by_time, every, f"pipeline.max_lag={lag}")
        self.batches: dict[int, list[str]] = {}  # prompts by step
        self.lag = lag
        self.flushed: dict[int, int] = {}

    def pass_by(self) -> None:
        key = (*self.options, f"{self.failing}")
        if self.exact and key not in UNDISTURBED:
            with self.directory() as folder:
                life = Life(self, "undisturbed", folder)
                require(11, life.live(self.config(folder)) == "done", "the undisturbed run did not end")
                UNDISTURBED[key] = life.policy.weight
            self.batches.clear()
            self.timeline.clear()
        self.log(f"options {' '.join(self.options)}")
        with self.directory() as folder:
            self.live(folder, key)

    def log(self, text: str) -> None:
        """Without names that are made anew each time."""
        super().log(re.sub(r"/dev/shm/storm-\w+|(?<=-\d{6})-[0-9a-f]{8}", "", text))

    def config(self, folder: Path) -> Config:
        config = read_config(self.options)
        return replace(config, run=replace(config.run, dir=str(folder / "run")))

    @contextlib.contextmanager
    def directory(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(prefix="storm-", dir="/dev/shm"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def live(self, folder: Path, key: tuple[str, ...]) -> None:
        config, saved = self.config(folder), 0
        for number in range(self.rng.randint(2, 4) + 1):
            self.life = life = Life(self, f"{self.seed} {number}", folder)
            self.time = life.time
            life.disk.on_rename = self.check_rename
            if number < 3 and not (number and self.rng.random() < 0.3):
                life.disturb()
            end = life.live(config)
            self.log(f"life {number} {end}")
            saved = self.check_saved(config, life, saved, end)
            if end == "done":
                break
        else:
            life = Life(self, f"{self.seed} last", folder)
            self.time, end = life.time, life.live(config)
            require(10, end == "done", f"an undisturbed life {end}")
        self.check_finished(config, key)

    # --- invariants -----------------------------------------------------------------------------------------------------

    def check_batch(self, step: int, batch: Batch, life: Life) -> None:
        self.batches[step] = [p.uid for p in batch.prompts]
        judge = FakeRewards()
        for sample, group, reward in zip(batch.samples, batch.groups, batch.rewards, strict=True):
            right = judge.verdict(sample, batch.prompts[group]).score
            require(13, reward == right, f"step {step}: {sample.uid} {sample.index} got {reward}, not {right}")
            failed = self.failing and hash_of(f"{sample.uid} {sample.index}") % 16 == 0
            require(13, not failed, f"step {step}: {sample.uid} {sample.index} has no verdict, and is trained on")
            lag = step - 1 - int(sample.versions.min())
            require(3, 0 <= lag <= self.lag, f"step {step}: {sample.uid} {sample.index} is {lag} updates old")

    def check_rename(self, target: Path) -> None:
        if target.parent.name == "checkpoints" and target.name.startswith("step-"):
            with self.life.disk.left_alone():
                self.check_checkpoint(target)

    def check_checkpoint(self, folder: Path) -> None:
        damage = find_damage(folder)
        require(9, not damage, f"{folder.name}: {damage}")
        require(9, "weight.json" in (folder / SUMS).read_text(), f"{folder.name} has no weights")

    def check_saved(self, config: Config, life: Life, saved_before: int, end: str) -> int:
        """Checks what a life leaves. Returns the newest step that is saved."""
        if life.power_failed:
            life.disk.lose_power()
        folder = Path(config.run.dir) / "checkpoints"
        checkpoints = list_checkpoints(folder)
        for _, path in checkpoints:
            self.check_checkpoint(path)
        newest = checkpoints[-1][0] if checkpoints else 0
        require(10, newest >= saved_before, f"step {saved_before} was saved, and now only {newest} is")
        if life.done is not None and life.trainer:
            trainer, step = life.trainer, life.trainer.state.step
            require(10, newest == life.done, f"step {life.done} is said to be saved, and {newest} is")
            updating = trainer.updates.started_step > step
            late = life.stop.deadline and self.time.now() > life.stop.deadline + life.stop.grace_s  # for saving, too
            excused = updating or life.disk.failed or late
            require(10, excused or newest == step, f"{step} steps are finished, {newest} saved")
        for line in read_lines(folder.parent / "metrics.jsonl"):
            step = int(line["step"])
            if 0 < step <= newest:
                file = folder.parent / "samples" / f"step-{step:06d}.parquet"
                require(8, file.is_file() and file.read_bytes().endswith(b"PAR1"), f"step {step} has no whole samples")
        return newest

    def check_finished(self, config: Config, key: tuple[str, ...]) -> None:
        run = Path(config.run.dir)
        steps = [line["step"] for line in read_lines(run / "metrics.jsonl")]
        require(8, steps == list(range(STEPS + 1)), f"metrics.jsonl has the steps {steps}")
        counts = Counter(uid for step in self.batches for uid in self.batches[step])
        twice = [uid for uid, count in counts.items() if count > 1]
        require(2, not twice, f"trained on twice: {twice}")
        require(2, sorted(self.batches) == list(range(1, STEPS + 1)), f"trained were steps {sorted(self.batches)}")
        given_up = any("the resumed run is not the same" in line for line in self.timeline)
        if self.plain:
            own, wanted = [u for s in sorted(self.batches) for u in self.batches[s]], 4 * STEPS
            first = [p.uid for p in dataset("zigzag", 10).take(0, wanted)]
            require(2, own == first, f"prompts are not those of the data in order: {own}")
        if self.exact and not given_up:
            weight = json.loads((run / "checkpoints" / f"step-{STEPS:06d}" / "weight.json").read_text())
            require(11, weight == UNDISTURBED[key], f"the weight is {weight}, and undisturbed {UNDISTURBED[key]}")
        hidden = [p.name for p in run.rglob(".*") if p.name != ".lock"]
        require(14, not hidden, f"left over: {hidden}")
