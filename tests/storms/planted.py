"""Faults that storms must find: each is a line of the driver written another way.

with PLANTED["put back twice"].in_place(): …
"""

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from rlsys.runs.checkpoint import Checkpoints
from rlsys.runs.checkpointing import Checkpointing
from rlsys.runs.run_log import RunLog
from rlsys.sampling.collector import Collector
from rlsys.trainer import Trainer
from workers.episodes.runner import EpisodeRunner
from workers.fleet.pool import WorkPool
from workers.fleet.replaceable_workers import ReplaceableWorkers
from workers.fleet.watchdog import StallTimer
from workers.reward.dispatch import Dispatcher
from workers.rollout.generation import Generation
from workers.rollout.rollout_group import RolloutGroup
from workers.turns.episode_workers import EpisodeWorkers
from workers.turns.open_episode import OpenEpisode
from workers.turns.pool import EpisodePool
from workers.turns.turn_loop import TurnLoop


@dataclass(frozen=True)
class Planted:
    world: str
    owner: type
    method: str
    right: str  # the text of the method, and what takes its place
    wrong: str
    seed: int = 0  # of a schedule that finds it

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        method = getattr(self.owner, self.method)
        source = textwrap.dedent(inspect.getsource(method))
        assert self.right in source, f"{self.owner.__name__}.{self.method} has changed: {self.right!r} is not in it"
        names = dict(vars(sys.modules[self.owner.__module__]))
        exec(compile(source.replace(self.right, self.wrong), f"planted in {self.method}", "exec"), names)
        setattr(self.owner, self.method, names[self.method])
        try:
            yield
        finally:
            setattr(self.owner, self.method, method)


REQUEUE = "self.scheduler.requeue(requests)"

PLANTED = {
    "what a lost engine had is not put back": Planted("engines", Generation, "replace_engine", REQUEUE, "pass", seed=9),
    "it is put back twice": Planted("engines", Generation, "replace_engine", REQUEUE, f"{REQUEUE}; {REQUEUE}", seed=9),
    "a late reply is accepted": Planted(
        "engines", WorkPool, "poll", "self.actors.get(line.worker) is line.actor", "line.worker in self.actors", seed=34
    ),
    "a replacement gets no weights": Planted(
        "engines", RolloutGroup, "resend_weights", "update is None", "True", seed=19
    ),
    "a replacement is not connected": Planted(
        "engines",
        ReplaceableWorkers,
        "_replay",
        "list(self.replayed_calls.items())",
        "list(self.replayed_calls.items())[:1]",
        seed=9,
    ),
    "an engine that waits for another's weights is taken for stalled": Planted(
        "engines", WorkPool, "find_stalled", "if self.workers.under_way", "if False", seed=101364
    ),
    "plays are started for an engine that is lost": Planted(
        "episodes", EpisodeRunner, "send", "in self.ended_lines", "in ()", seed=51
    ),
    "the late word of a lost engine ends the episodes of its successor": Planted(
        "episodes", EpisodePool, "poll", "news is END", "False", seed=9
    ),
    "the timer of an engine starts again with any answer": Planted(
        "engines",
        WorkPool,
        "poll",
        "self.timers[line.worker].reset()",
        "[timer.reset() for timer in self.timers.values()]",
        seed=28,
    ),
    "a replacement that a stop leaves half set up fails the run": Planted(
        "engines", ReplaceableWorkers, "call", "self.watchdog.stop.raise_if_stopped()", "pass", seed=330
    ),
    "a stall is never noticed": Planted("engines", StallTimer, "expired", "waited > self.limit_s", "False", seed=19),
    "a stop does not end what engines have stopped": Planted(
        "episodes",
        TurnLoop,
        "stop_idle",
        "self.stopping - {key[:2] for key in self.sampled}",
        "()",
        seed=2,
    ),
    "the episodes of a lost worker are not played again": Planted(
        "episodes", EpisodePool, "lose", "return lost", "return []", seed=114
    ),
    "a worker is not told which episodes were dropped": Planted(
        "episodes", EpisodePool, "drop", "self.outbox[name].append(Drop(number))", "pass", seed=0
    ),
    "the plays of a lost engine stay in their workers": Planted(
        "episodes", EpisodeRunner, "end_line", "self.drop(number)", "pass", seed=51
    ),
    "each engine has a lost worker replaced": Planted(
        "episodes", EpisodeWorkers, "replace", "life.number == self.replaced[life.worker]", "True", seed=198
    ),
    "engines do not learn who was replaced": Planted(
        "episodes", RolloutGroup, "replace_episode_workers", "self.play_with(self.episode_workers)", "pass", seed=171
    ),
    "turns of an earlier play stay": Planted(
        "episodes",
        OpenEpisode,
        "sample",
        "[self.asked[ask] for ask in asks]",
        "[turn for turn, sampled in enumerate(self.sampled) if sampled.is_whole]",
        seed=2,
    ),
    "verdicts come back in another order": Planted(
        "rewards",
        Dispatcher,
        "accept",
        "zip(reversed(samples), reversed(results)",
        "zip(reversed(samples), results",
        seed=1,
    ),
    "the samples of a lost reward worker are not sent again": Planted(
        "rewards", Dispatcher, "on_news", "service.pending.appendleft(sample)", "pass", seed=3
    ),
    "a list that cannot be sent is forgotten": Planted(
        "rewards",
        Dispatcher,
        "send_list",
        "self.accept(service, samples, explain_unsent(items, error))",
        "pass",
        seed=5,
    ),
    "a reward worker that ends with every sample is replaced for ever": Planted(
        "rewards", WorkPool, "replace", "self.lost_in_a_row[worker] += 1", "pass", seed=26
    ),
    "SIGTERM does not save": Planted("trainer", Trainer, "save_last", "self.save()", "pass", seed=10),
    "batches ahead keep the last checkpoint from being written": Planted(
        "trainer", Trainer, "wait_for_batches_ahead", "suppress(StepAbandoned)", "suppress()", seed=10
    ),
    "a checkpoint gets its name before its learners have written": Planted(
        "trainer", Checkpointing, "commit", "None in written", "False", seed=0
    ),
    "a checkpoint does not wait for the samples before it": Planted(
        "trainer", Checkpointing, "begin", "self.log.run.wait_for_samples()", "pass", seed=6
    ),
    "an abandoned checkpoint has the name of the next": Planted(
        "trainer", Checkpoints, "begin", "-{uuid.uuid4().hex[:8]}", "", seed=10
    ),
    "the position is that of batches still being judged": Planted(
        "trainer",
        Trainer,
        "train_step",
        "step, batch, kl_coef=kl_coef",
        "step, replace(batch, position=self.batches.next_position), kl_coef=kl_coef",
        seed=10,
    ),
    "metrics of steps that run again stay": Planted(
        "trainer", RunLog, "begin", "self.run.rewind_metrics(kept_step)", "pass", seed=0
    ),
    "a verdict goes to another sample": Planted(
        "trainer", Collector, "build_batch", "verdicts.result()[i]", "verdicts.result()[0]", seed=0
    ),
}
