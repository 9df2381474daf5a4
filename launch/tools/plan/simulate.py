"""A configuration's loop on a clock of its own: how long its steps would take, with what each piece of work costs given.

Batches, their order and their lag, who samples what and what waits for what are decided by the code of real runs (`Pipeline`,
`Timetable`, `Collector`, `Oversampling`, `RequestScheduler`, `deal`); engines, rewards and ranks only let time pass. What is left out: the
network, all that two roles on one machine take from each other, and whatever fails. Scores are made after a batch and not
while it is still being sampled, every group teaches something (`dynamic_sampling` keeps all), and a critic's work costs what the
policy's does.
"""

import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from launch.bundles import critic_ranks
from launch.tools.synthetic import CompletionLengths, FixedLengthRollout
from rlsys.config.derived import scores_old
from rlsys.config.schema import Config, ConfigError, RewardConfig
from rlsys.estimates.virtual_time import SerialExecutor, VirtualTime
from rlsys.models.lookup import pairs_per_token
from rlsys.packs.balance import SequenceSize, assign_to_ranks, pack_cost
from rlsys.pipeline import Pipeline, SyncSchedule
from rlsys.sampling.collector import Collector
from rlsys.sampling.oversampling import Oversampling
from rlsys.sampling.sampling_plan import SamplingPlan
from rlsys.types import Batch, Prompt, Request, Sample, Verdict
from workers.rollout.request_scheduler import RequestScheduler

STEPS = 8  # that are counted, where nothing says how many


@dataclass(frozen=True)
class Costs:
    """Seconds. What they are for is written beside them."""

    step_s: float  # an engine's next token of all that it decodes, before anything is decoded
    sequence_s: float  # more for each sequence that gets a token
    prompt_s: float  # more for each token of a prompt that is computed
    score_s: float  # a token scored on a rank, in the units of `rlsys.packs.balance.cost`
    update_s: float  # the same, updated
    pack_s: float = 0.0  # more for each pack that is scored or updated
    optimizer_s: float = 0.0  # an optimizer update, beside its packs
    sync_s: float = 0.0  # new weights in all engines
    reward_s: float = 0.0  # from a sample to its verdict
    other_s: float = 0.0  # of each step, in the driver


@dataclass(frozen=True)
class SimulatedStep:
    """One step, in seconds of the simulated clock."""

    seconds: float
    decoding: float  # of all engines together
    sequences: float  # that engines decoded, each as long as it was decoded
    working: float  # of the ranks: score, update and sync
    samples: int
    lag: int  # of its oldest sample


@dataclass(frozen=True)
class SimulationReport:
    """Steps that followed each other."""

    steps: list[SimulatedStep]

    @property
    def seconds(self) -> float:
        return fmean(s.seconds for s in self.steps)

    @property
    def samples_per_second(self) -> float:
        """Samples per second."""
        return sum(s.samples for s in self.steps) / sum(s.seconds for s in self.steps)

    @property
    def lag(self) -> float:
        return fmean(s.lag for s in self.steps)

    def engines_idle(self, engines: int) -> float:
        """An engine with one sequence left is as busy as one with hundreds: see `at_once`."""
        return 1 - sum(s.decoding for s in self.steps) / (engines * sum(s.seconds for s in self.steps))

    def sequences_per_engine(self, engines: int) -> float:
        """Sequences of an engine at a time, on average."""
        return sum(s.sequences for s in self.steps) / (engines * sum(s.seconds for s in self.steps))

    @property
    def ranks_idle(self) -> float:
        return max(1 - sum(s.working for s in self.steps) / sum(s.seconds for s in self.steps), 0.0)


class SimulatedEngines:
    """All engines as one, in virtual time. Implements `rlsys.interfaces.Rollout`; a completion is as long as it may be."""

    def __init__(self, config: Config, costs: Costs, time: VirtualTime):
        self.config, self.costs, self.time = config, costs, time
        self.version, self.paused = 0, 0.0  # paused: seconds so far in which weights were taken
        self.before = (0.0, 0.0)  # `decoding`, in what was generated before
        self.engines: dict[str, SimulatedEngine] = {}
        self.stop_requested = False

    @property
    def decoding(self) -> tuple[float, float]:
        """Seconds so far of all engines together, and of all their sequences."""
        engines = self.engines.values()
        return self.before[0] + sum(e.busy for e in engines), self.before[1] + sum(e.decoded for e in engines)

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        at_once = self.config.rollout.max_sequences
        scheduler = RequestScheduler(requests, at_once)
        self.engines = engines = {
            f"rollout-{i}": SimulatedEngine(self.costs, at_once, lambda: self.version)
            for i in range(self.config.rollout.engines)
        }
        self.stop_requested = False
        began, paused = self.time.now, self.paused
        events: list[
            tuple[float, int, str]
        ] = []  # when an engine finishes something, on a clock that stands still in pauses

        left = len(requests)

        def give(now: float, *names: str) -> None:
            """To those that have more room than before."""
            nonlocal left
            for name, share in scheduler.assign({n: engines[n].queued for n in names}).items() if left else ():
                left -= len(share)
                engines[name].add(share, now)
                plan(name)

        def plan(name: str) -> None:
            engine = engines[name]
            engine.plans += 1
            if engine.running:
                heapq.heappush(events, (engine.due, engine.plans, name))

        give(0.0, *engines)
        while events:
            due, plan_number, name = heapq.heappop(events)
            engine = engines[name]
            if plan_number != engine.plans:
                continue  # it has been given more since
            while (late := began + due + self.paused - paused - self.time.now) > 0:
                self.time.sleep(late)
            finished = engine.finish(due)
            plan(name)
            give(due, name)
            yield [self.sample(r, version, r.max_new_tokens, "stop") for r, version in finished]
            if self.stop_requested:
                for other in engines.values():
                    other.advance(due)
                    if cut := [self.sample(r, version, n, "cut") for r, version, n in other.unfinished()]:
                        yield cut
                break
        self.before, self.engines = self.decoding, {}

    def sample(self, request: Request, version: int, length: int, finish: str) -> Sample:
        tokens = np.broadcast_to(np.int32(0), length)
        logprobs = np.broadcast_to(np.float32(0), length)
        return Sample(request.uid, request.index, "", tokens, logprobs, finish, version)

    def stop_early(self) -> None:
        self.stop_requested = True

    def load_weights(self, version: int) -> None:
        """New weights. What is being decoded waits meanwhile."""
        self.time.sleep(self.costs.sync_s)
        self.paused += self.costs.sync_s
        self.version = version

    def wake(self) -> None: ...

    def sleep(self) -> None: ...


class SimulatedEngine:
    """One engine: all sequences that it decodes get a token in a step. Times are of the caller's clock."""

    def __init__(self, costs: Costs, at_once: int, version: Callable[[], int]):
        self.costs, self.at_once, self.version = costs, at_once, version
        self.waiting: deque[Request] = deque()
        self.running: list[
            tuple[int, int, Request, int]
        ] = []  # by the step in which each is finished; with its version
        self.known: set[str] = set()  # prompts that are computed
        self.step, self.at, self.order = 0, 0.0, 0  # steps so far, when the last one ended
        self.plans = 0
        self.busy = self.decoded = 0.0  # seconds, and those of each sequence
        self.extra_seconds = 0.0  # seconds beside what a step takes before the next one ends, for prompts

    @property
    def queued(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def step_seconds(self) -> float:
        return self.costs.step_s + self.costs.sequence_s * len(self.running)

    @property
    def due(self) -> float:
        """When the next sequence is finished, if nothing is added."""
        return self.at + self.extra_seconds + (self.running[0][0] - self.step) * self.step_seconds

    def add(self, requests: list[Request], now: float) -> None:
        self.advance(now)
        self.waiting.extend(requests)
        self.admit()

    def advance(self, now: float) -> None:
        """To the last step that has ended by now."""
        if not self.running:
            self.at = now
            return
        decoding = now - self.at - self.extra_seconds
        steps = min(max(int(decoding / self.step_seconds + 1e-9), 0), self.running[0][0] - self.step)
        self.extra_seconds = steps * self.step_seconds - decoding  # less than nothing: a part of a step that is done
        self.step += steps
        self.decode(now)

    def decode(self, now: float) -> None:
        self.busy += now - self.at
        self.decoded += (now - self.at) * len(self.running)
        self.at = now

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.at_once:
            r = self.waiting.popleft()
            begun = len(r.partial.tokens) if r.partial else 0
            if r.uid not in self.known or begun:
                self.extra_seconds += (len(r.tokens) + begun) * self.costs.prompt_s
                self.known.add(r.uid)
            self.order += 1
            version = r.partial.version if r.partial else self.version()
            heapq.heappush(self.running, (self.step + max(r.max_new_tokens - begun, 1), self.order, r, version))

    def finish(self, now: float) -> list[tuple[Request, int]]:
        """What is finished now, with its version; others take its place."""
        self.decode(now)
        self.extra_seconds, self.step = 0.0, self.running[0][0]
        done: list[tuple[Request, int]] = []
        while self.running and self.running[0][0] == self.step:
            done.append(heapq.heappop(self.running)[2:])
        self.admit()
        return done

    def unfinished(self) -> list[tuple[Request, int, int]]:
        """With their versions, and their tokens so far."""
        lengths = ((r, version, r.max_new_tokens - (end - self.step)) for end, _, r, version in self.running)
        return [one for one in lengths if one[2] > 0]


class SimulatedRewards:
    """Implements `rlsys.interfaces.Rewards`: verdicts come after a while."""

    def __init__(self, costs: Costs, time: VirtualTime):
        self.costs, self.time = costs, time

    def judge(self, samples: list[Sample], prompts: dict[str, Prompt]) -> "Future[list[Verdict]]":
        return DelayedVerdicts(self.time, self.time.now + self.costs.reward_s, [Verdict(s.index % 2) for s in samples])


class DelayedVerdicts(Future[list[Verdict]]):
    """Verdicts that are there from a moment on."""

    def __init__(self, time: VirtualTime, at: float, verdicts: list[Verdict]):
        super().__init__()
        self.time, self.at = time, at
        self.set_result(verdicts)

    def result(self, timeout: float | None = None) -> list[Verdict]:
        if self.at > self.time.now:
            self.time.sleep(self.at - self.time.now)
        return super().result()


class SimulatedLoop:
    """What `rlsys.trainer.Trainer` does in a step, as far as it takes time."""

    def __init__(self, config: Config, costs: Costs, lengths: CompletionLengths, prompt_tokens: int):
        self.config, self.costs, self.prompt_tokens = config, costs, prompt_tokens
        self.time, self.steps = VirtualTime(), list[SimulatedStep]()
        self.working, self.before = 0.0, (0.0,) * 4  # before: clock, decoding and working when a step ended
        self.engines = SimulatedEngines(config, costs, self.time)
        self.critic_ranks = critic_ranks(config)
        self.pairs_per_token = pairs_per_token(config.model.path)
        rollout = FixedLengthRollout(self.engines, lengths)
        self.collector = Collector(
            rollout, SimulatedRewards(costs, self.time), seed=config.run.seed, reward=RewardConfig()
        )
        self.oversampling = Oversampling(config, self.collector, self.prompts) if config.rollout.oversample else None
        self.asked = 0

    def run(self, steps: int) -> SimulationReport:
        """So many steps in the middle of a run, from sync to sync: those in which the pipeline fills and empties are left out."""
        ahead, steps = self.config.pipeline.max_lag, SyncSchedule.from_config(self.config).round_up_to_sync(steps)
        self.time.run(lambda: self.train(steps + 2 * ahead + 1))
        report = SimulationReport(self.steps[ahead + 1 :][:steps])
        if not report.seconds:
            raise ConfigError(
                "a step would take no time at all: of what it does, nothing costs any. Give costs of more than 0 s."
            )
        return report

    def train(self, steps: int) -> None:
        schedule = SyncSchedule.from_config(self.config)
        pipeline = Pipeline(self.sample, first=1, last=steps, schedule=schedule, thread=SerialExecutor(self.time))
        for step in range(1, steps + 1):
            batch = pipeline.next()
            with self.at_work():
                self.score(batch)
                self.update(batch)
            self.time.sleep(self.costs.other_s)
            if schedule.syncs_after(step) and not self.config.pipeline.in_flight:
                pipeline.wait_until_idle(after=step)
            if schedule.syncs_after(step):
                with self.at_work():
                    self.engines.load_weights(step)
            self.tell(step, batch)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        began = self.time.now
        yield
        self.working += self.time.now - began

    def tell(self, step: int, batch: Batch) -> None:
        now = (self.time.now, *self.engines.decoding, self.working)
        seconds, decoding, sequences, working = (a - b for a, b in zip(now, self.before, strict=True))
        lag = step - 1 - min(s.version for s in batch.samples)
        self.steps.append(SimulatedStep(seconds, decoding, sequences, working, len(batch.samples), lag))
        self.before = now

    def score(self, batch: Batch) -> None:
        c = self.config
        if self.critic_ranks:
            self.time.sleep(self.work(batch, range(len(batch.samples)), self.critic_ranks, self.costs.score_s))
        if c.reference.kl_coef:
            self.time.sleep(self.work(batch, range(len(batch.samples)), 1, self.costs.score_s))
        if scores_old(c):
            self.time.sleep(self.work(batch, range(len(batch.samples)), c.policy.ranks, self.costs.score_s))

    def update(self, batch: Batch) -> None:
        t = self.config.trainer
        groups = np.array_split(np.arange(len(batch.prompts)), t.updates_per_step)
        for chosen in groups * t.epochs_per_step:
            members = np.flatnonzero(np.isin(batch.groups, chosen)).tolist()
            for ranks in filter(None, (self.critic_ranks, self.config.policy.ranks)):
                self.time.sleep(self.work(batch, members, ranks, self.costs.update_s) + self.costs.optimizer_s)

    def work(self, batch: Batch, members: Sequence[int], ranks: int, each: float) -> float:
        """Seconds of the rank that has most to do."""
        sized = {
            m: SequenceSize(m, int(batch.groups[m]), self.prompt_tokens, len(batch.samples[m].tokens) - 1)
            for m in members
        }
        dealt = assign_to_ranks(sized.values(), ranks, self.config.policy.tokens_per_pack, self.pairs_per_token)

        def seconds(own: list[int]) -> float:
            return pack_cost([sized[m] for m in own], self.pairs_per_token) * each + self.costs.pack_s

        return max(sum(map(seconds, rank)) for rank in dealt)

    def prompts(self, position: int, count: int) -> list[Prompt]:
        tokens = [0] * self.prompt_tokens
        return [Prompt(f"p:{i}", "simulated", "", tokens, {}) for i in range(position, position + count)]

    def sample(self, step: int) -> Batch:
        if self.oversampling:
            return self.oversampling.collect(step)
        prompts = self.prompts(self.asked, self.config.trainer.prompts_per_step)
        self.asked += len(prompts)
        return self.collector.collect(step, prompts, SamplingPlan.from_config(self.config))
