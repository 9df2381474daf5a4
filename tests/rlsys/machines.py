"""The real trainer and run directory with fake machines, run whole, or disturbed at a chosen moment."""

import pyarrow.parquet
import pytest
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

from launch.tools.diagnosis.explain import explain_disagreement
from rlsys.evaluation.held_out import HeldOutSet
from rlsys.runs.checkpoint import SavedCheckpoint
from rlsys.runs.directory import RunDirectory, read_lines
from rlsys.runs.run_log import RunLog
from rlsys.tracking.tracking import Tracking
from rlsys.trainer import Trainer
from rlsys.types import Request

REQUIRED = [
    "step",
    "reward/mean",
    "reward/std",
    "loss",
    "kl",
    "entropy",
    "grad_norm",
    "clip_fraction",
    "mismatch/mean_abs",
    "mismatch/max_abs",
    "tokens",
    "tokens_per_second",
    "time/step",
    "time/rollout",
    "time/reward",
    "time/score",
    "time/update",
    "time/sync",
    "sync/version",
]


class Machines:
    """One start of a run: the real trainer and run directory, all machines fake."""

    def __init__(
        self,
        tmp_path,
        *overrides: str,
        reference: bool = False,
        evals: int = 1,
        rollout=FakeRollout,
        control_tokens: dict[int, float] | None = None,
        share_prompts: bool = True,
        newest: SavedCheckpoint | None = None,
        policy=FakePolicy,
        make_rows=make_dataset,
        samples: int = 1,
    ):
        self.events: list[str] = []
        self.config = make_config(tmp_path, *overrides)
        self.run_directory = RunDirectory(self.config)
        self.rollout, self.rewards = rollout(self.events), FakeRewards()
        self.rollout.in_flight = self.config.pipeline.in_flight
        self.policy, self.progress = policy(self.events, self.rollout), FakeProgress()
        self.critic, self.reference = FakeCritic(self.events), FakeReference(self.events, self.policy)
        self.tracking = Tracking(
            self.config, self.run_directory.path, self.progress.note, self.run_directory.record_event
        )
        self.trainer = Trainer(
            self.config,
            train=make_rows(10),
            evals=[HeldOutSet(name, make_rows(6, source=name).prompts, samples) for name in ("easy", "hard")[:evals]],
            rollout=self.rollout,
            rewards=self.rewards,
            policy=self.policy,
            reference=self.reference if reference else None,
            critic=self.critic if self.config.algorithm.advantage == "gae" else None,
            log=RunLog(self.run_directory, self.progress, self.tracking.start),
            explain=lambda agreement, weights: explain_disagreement(
                agreement, weights, policy=self.policy, config=self.config
            ),
            control_tokens=control_tokens,
            share_prompts=share_prompts,
            newest=newest,
        )

    def run(self) -> "Machines":
        try:
            with self.tracking:
                self.trainer.run()
        finally:
            self.run_directory.close()
        return self

    @property
    def asked(self) -> list[list[Request]]:
        """What the engines were asked for, after the few samples at the start that only compare them with the policy."""
        return self.rollout.requests[1:]

    @property
    def lines(self) -> list[dict]:
        return read_lines(self.run_directory.path / "metrics.jsonl")

    def column(self, name: str, column: str) -> list:
        table = pyarrow.parquet.read_table(self.run_directory.path / "samples" / f"{name}.parquet")
        return table[column].to_pylist()


def learned(lines: list[dict]) -> list[dict]:
    """What must be the same in every repetition: all but seconds."""
    left_out = ("time/", "tokens_per_second")
    return [{k: v for k, v in line.items() if not k.startswith(left_out)} for line in lines]


def settled(lines: list[dict]) -> list[dict]:
    """The same without what the fake policy says of weights that are older than those it last gave to the engines."""
    return [{k: v for k, v in line.items() if not k.startswith(("mismatch", "kl"))} for line in learned(lines)]


def killed_while(machines: Machines, moment: str, count: int) -> None:
    """Runs until the `count`th call of the policy's method `moment`, and is killed there."""
    method, calls = getattr(machines.policy, moment), []

    class Killed(BaseException):
        pass

    def kill(*arguments):
        calls.append(moment)
        if len(calls) == count:
            raise Killed
        return method(*arguments)

    setattr(machines.policy, moment, kill)
    with pytest.raises(Killed):
        machines.run()


def stopped_while(machines: Machines, method: str, count: int, *, grace_s: float) -> int:
    """Runs until the `count`th call of a method of the policy, or of the rollout; there it is told to stop."""
    machine = machines.policy if hasattr(machines.policy, method) else machines.rollout
    real, calls = getattr(machine, method), []

    def call_and_stop(*arguments):
        calls.append(method)
        if len(calls) == count:
            machines.trainer.stop.request(grace_s)
            machines.trainer.stop.raise_if_stopped()
        return real(*arguments)

    setattr(machine, method, call_and_stop)
    try:
        return machines.trainer.run()
    finally:
        machines.run_directory.close()


DYNAMIC = ["dynamic_sampling.enabled=true", "dynamic_sampling.max_rounds=50"]
