"""Simulates a configuration's loop in virtual time: how long its steps take, given the cost of each piece of work.

Real code decides on batches, their order and lag, and on who waits for what: `Pipeline`, `SyncSchedule`, `Collector`,
`Oversampling`, `RequestScheduler` and `assign_to_ranks`. Engines, rewards and ranks only let time pass.

The simulation leaves out the network, failures, and how processes on one machine slow each other down. It scores a
batch after sampling has ended. Every group has a gradient (`dynamic_sampling` drops none), and a critic costs as much
as the policy.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from launch.roles import count_workers
from launch.tools.estimates.virtual_time import VirtualTime
from launch.tools.plan.simulated_workers import Costs, SimulatedEngines, SimulatedRewards
from launch.tools.synthetic import CompletionLengths, FixedLengthRollout
from rlsys.batching.balance import SequenceSize, assign_to_ranks, pack_cost
from rlsys.config.derived import policy_is_reference, scores_old
from rlsys.config.schema import Config, RewardConfig
from rlsys.errors import ConfigError
from rlsys.models.lookup import known_model_shape, pairs_per_token
from rlsys.pipeline import Pipeline, SyncSchedule
from rlsys.sampling.collector import Collector
from rlsys.sampling.oversampling import Oversampling
from rlsys.sampling.sampling_plan import SamplingPlan
from rlsys.types import Batch, Prompt

STEPS = 8  # to report, by default


@dataclass(frozen=True)
class SimulatedStep:
    """One step, in seconds of the simulated clock."""

    seconds: float
    decoding: float  # summed over engines
    sequences: float  # decoding time summed over sequences
    working: float  # ranks: score, update and sync
    samples: int
    lag: int  # of its oldest sample


@dataclass(frozen=True)
class SimulationReport:
    """Consecutive simulated steps, and what they show together."""

    steps: list[SimulatedStep]

    @property
    def seconds(self) -> float:
        return fmean(s.seconds for s in self.steps)

    @property
    def samples_per_second(self) -> float:
        return sum(s.samples for s in self.steps) / sum(s.seconds for s in self.steps)

    @property
    def lag(self) -> float:
        return fmean(s.lag for s in self.steps)

    def engines_idle(self, engines: int) -> float:
        """Share of time without any sequence. An engine with one sequence counts as busy."""
        return 1 - sum(s.decoding for s in self.steps) / (engines * sum(s.seconds for s in self.steps))

    def sequences_per_engine(self, engines: int) -> float:
        """Mean number of sequences that an engine decodes at once."""
        return sum(s.sequences for s in self.steps) / (engines * sum(s.seconds for s in self.steps))

    @property
    def ranks_idle(self) -> float:
        return max(1 - sum(s.working for s in self.steps) / sum(s.seconds for s in self.steps), 0.0)


class SimulatedLoop:
    """The parts of a step of `rlsys.trainer.Trainer` that take time."""

    def __init__(self, config: Config, costs: Costs, lengths: CompletionLengths, prompt_tokens: int):
        self.config, self.costs, self.prompt_tokens = config, costs, prompt_tokens
        self.time, self.steps = VirtualTime(), list[SimulatedStep]()
        self.working, self.before = 0.0, (0.0,) * 4  # before: clock, decoding and working at the end of the last step
        self.engines = SimulatedEngines(config, costs, self.time)
        self.critic_ranks = count_workers("critic", config)
        self.pairs_per_token = pairs_per_token(config.model.path)
        model = known_model_shape(config.model.path)
        self.shares_prompts = not (model and model.mixer)
        rollout = FixedLengthRollout(self.engines, lengths)
        self.collector = Collector(
            rollout, SimulatedRewards(costs, self.time), seed=config.run.seed, reward=RewardConfig()
        )
        self.oversampling = Oversampling(config, self.collector, self.prompts) if config.rollout.oversample else None
        self.next_position = 0

    def run(self, steps: int) -> SimulationReport:
        """Simulates a run, and reports its middle steps: without those in which the pipeline fills and empties."""
        ahead, steps = self.config.pipeline.max_lag, SyncSchedule.from_config(self.config).round_up_to_sync(steps)
        self.time.run(lambda: self.train(steps + 2 * ahead + 1))
        report = SimulationReport(self.steps[ahead + 1 :][:steps])
        if not report.seconds:
            raise ConfigError(
                "a step would take no time: everything that it does costs 0 s. Give costs of more than 0 s."
            )
        return report

    def train(self, steps: int) -> None:
        schedule = SyncSchedule.from_config(self.config)
        pipeline = Pipeline(self.sample, first=1, last=steps, schedule=schedule, thread=self.time.executor("collect"))
        for step in range(1, steps + 1):
            batch = pipeline.next()
            with self.measure_work():
                self.score(batch)
                self.update(batch)
            self.time.sleep(self.costs.other_s)
            if schedule.syncs_after(step) and not self.config.pipeline.in_flight:
                pipeline.wait_until_idle(after=step)
            if schedule.syncs_after(step):
                with self.measure_work():
                    self.engines.load_weights(step)
            self.record(step, batch)

    @contextlib.contextmanager
    def measure_work(self) -> Iterator[None]:
        began = self.time.now()
        yield
        self.working += self.time.now() - began

    def record(self, step: int, batch: Batch) -> None:
        now = (self.time.now(), *self.engines.decoding, self.working)
        seconds, decoding, sequences, working = (a - b for a, b in zip(now, self.before, strict=True))
        lag = step - 1 - min(s.version for s in batch.samples)
        self.steps.append(SimulatedStep(seconds, decoding, sequences, working, len(batch.samples), lag))
        self.before = now

    def score(self, batch: Batch) -> None:
        c = self.config
        if self.critic_ranks:
            self.time.sleep(self.work(batch, range(len(batch.samples)), self.critic_ranks, self.costs.score_s))
        if c.reference.kl_coef:
            ranks = c.policy.ranks if policy_is_reference(c) else c.reference.ranks
            self.time.sleep(self.work(batch, range(len(batch.samples)), ranks, self.costs.score_s))
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
        """Seconds of the rank with the most work."""
        sized = {
            m: SequenceSize(
                m,
                int(batch.groups[m]) if self.shares_prompts else m,
                self.prompt_tokens,
                len(batch.samples[m].tokens) - 1,
            )
            for m in members
        }
        p = self.config.policy
        sharing = min(p.sequence_parallel, ranks)
        dealt = assign_to_ranks(sized.values(), ranks // sharing, p.tokens_per_pack, self.pairs_per_token)

        def seconds(own: list[int]) -> float:
            return pack_cost([sized[m] for m in own], self.pairs_per_token) * each / sharing + self.costs.pack_s

        return max(sum(map(seconds, rank)) for rank in dealt)

    def prompts(self, position: int, count: int) -> list[Prompt]:
        tokens = [0] * self.prompt_tokens
        return [Prompt(f"p:{i}", "simulated", "", tokens, {}) for i in range(position, position + count)]

    def sample(self, step: int) -> Batch:
        if self.oversampling:
            return self.oversampling.collect(step)
        prompts = self.prompts(self.next_position, self.config.trainer.prompts_per_step)
        self.next_position += len(prompts)
        return self.collector.collect(step, prompts, SamplingPlan.from_config(self.config))
