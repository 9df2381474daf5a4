"""A run that is killed, or told to stop, goes on as if it had not been; and which checkpoints are kept."""

import json
import time

import pytest
from fakes import FakeRollout
from machines import REQUIRED, Machines, killed_while, learned, settled, stopped_while

from rlsys.runs.directory import read_lines
from rlsys.runs.stopping import StopSignal

MORE_LAG = [pytest.param(lag, marks=pytest.mark.long) for lag in (2, 3)]

# --- going on --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "count", "left"),
    [
        ("update", 3, 0),  # step 2, no checkpoint yet
        ("save", 1, 0),  # step 2
        ("update", 6, 2),  # step 3
        ("sync", 5, 2),  # step 4
        ("save", 2, 2),  # step 4
        ("update", 9, 4),  # step 5
    ],
)
@pytest.mark.parametrize("lag", [0, 1, *MORE_LAG])
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path, moment, count, left, lag):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    options = ["trainer.steps=5", "eval.every=1", f"pipeline.max_lag={lag}"]
    whole = Machines(tmp_path / "whole", *options, reference=True).run()

    killed_while(Machines(tmp_path / "killed", *options, reference=True), moment, count)
    again = Machines(tmp_path / "killed", *options, reference=True).run()

    assert len(again.policy.updates) == 2 * (5 - left)
    assert ("load" in again.events) == (left > 0)
    assert [line["step"] for line in again.lines] == [0, 1, 2, 3, 4, 5]
    same = learned if lag < 2 else settled
    assert same(again.lines) == same(whole.lines)
    assert again.policy.weight == whole.policy.weight != 0
    for step in range(1, 6):
        name = f"step-{step:06d}"
        assert again.column(name, "completion") == whole.column(name, "completion")


@pytest.mark.parametrize(("moment", "count"), [("update", 6), ("save", 2), ("sync", 5), ("update", 9)])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_refreshed_reference_is_what_it_was_after_a_kill(tmp_path, moment, count, lag):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    options = ["trainer.steps=5", f"pipeline.max_lag={lag}", "reference.refresh_every=2", "reference.kl_coef=0.1"]
    whole = Machines(tmp_path / "whole", *options, reference=True).run()
    assert len(whole.reference.refreshes) == 2
    assert whole.reference.weight == whole.reference.refreshes[1] != whole.policy.weight, "that of step 4, not of 5"

    killed_while(Machines(tmp_path / "killed", *options, reference=True), moment, count)
    again = Machines(tmp_path / "killed", *options, reference=True).run()
    assert learned(again.lines) == learned(whole.lines)
    assert again.reference.weight == whole.reference.weight
    events = [
        e["step"] for e in read_lines(whole.run_directory.path / "events.jsonl") if e["event"] == "reference refreshed"
    ]
    assert events == [2, 4]


def test_a_run_killed_just_after_its_checkpoint_keeps_the_line_of_that_step(tmp_path):
    machines = Machines(tmp_path, "trainer.steps=4")
    event = machines.run_directory.record_event

    def kill(kind, **facts):
        if kind == "checkpoint":
            raise KeyboardInterrupt
        event(kind, **facts)

    machines.run_directory.record_event = kill
    with pytest.raises(KeyboardInterrupt):
        machines.run()
    again = Machines(tmp_path, "trainer.steps=4").run()
    assert "load" in again.events
    assert [line["step"] for line in again.lines] == [0, 1, 2, 3, 4]
    assert all(set(REQUIRED) <= set(line) for line in again.lines[1:])


def test_a_finished_run_does_nothing_more(tmp_path):
    first = Machines(tmp_path).run()
    before = first.lines
    again = Machines(tmp_path).run()
    assert again.policy.updates == []
    assert again.lines == before
    assert again.policy.weight == first.policy.weight


def test_a_finished_run_can_be_given_more_steps(tmp_path):
    (tmp_path / "long").mkdir()
    long = Machines(tmp_path / "long", "trainer.steps=5").run()
    Machines(tmp_path).run()
    again = Machines(tmp_path, "trainer.steps=5").run()
    assert again.policy.weight == long.policy.weight
    assert [line["step"] for line in again.lines] == [0, 1, 2, 3, 4, 5]


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path):
    first = Machines(tmp_path).run()
    newest = first.run_directory.path / "checkpoints" / "step-000003"
    text = (newest / "weight.json").read_text()
    (newest / "weight.json").write_text(text[:-1] + str((int(text[-1]) + 1) % 10))
    again = Machines(tmp_path).run()
    assert len(again.policy.updates) == 2, "step 3 is done again, from step 2"
    assert "step-000003/weight.json" in again.progress.notes[0]
    assert again.policy.weight == first.policy.weight


def test_starts_and_checkpoints_are_events(tmp_path):
    Machines(tmp_path).run()
    machines = Machines(tmp_path, "trainer.steps=4").run()
    events = read_lines(machines.run_directory.path / "events.jsonl")
    kinds_and_steps = [(e["event"], e["step"]) for e in events if e["event"] not in ("sync", "agreement")]
    assert kinds_and_steps == [("begin", 0), ("checkpoint", 2), ("checkpoint", 3), ("resume", 3), ("checkpoint", 4)]
    assert [e["version"] for e in events if e["event"] == "sync"] == [0, 1, 2, 3, 3, 4]
    assert next(e["path"] for e in events if e["event"] == "checkpoint") == "checkpoints/step-000002"
    resumed, agreed = machines.progress.notes
    assert resumed == f"resumed from {machines.run_directory.path}/checkpoints/step-000003"
    assert agreed == "rollout and policy agree: mean 0, largest 0 over 56 tokens"


def test_checkpoints_are_made_as_often_as_asked_and_after_the_last_step(tmp_path):
    machines = Machines(tmp_path, "trainer.steps=5", "checkpoint.keep_last=0").run()
    folders = sorted((machines.run_directory.path / "checkpoints").iterdir())
    assert [f.name for f in folders] == ["step-000002", "step-000004", "step-000005"]
    weights = [json.loads((f / "weight.json").read_text()) for f in folders]
    assert weights[-1] == machines.policy.weight
    assert len(set(weights)) == 3


def test_zero_checkpoints_and_evaluations_are_only_those_at_the_ends(tmp_path):
    machines = Machines(tmp_path, "checkpoint.every=0", "eval.every=0").run()
    assert [line["step"] for line in machines.lines if "eval/easy/accuracy" in line] == [0, 3]
    assert machines.events.count("save") == 1


# --- stopping in good order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, *MORE_LAG])
@pytest.mark.parametrize(
    ("method", "count", "grace_s", "done"),
    [
        ("update", 3, 60, 2),  # in step 2, which is finished
        ("score", 3, -1, 1),  # in step 2, which is abandoned before it changed anything
        ("update", 4, -1, 0),  # in the middle of step 2: nothing was saved yet
        ("update", 8, -1, 2),  # in the middle of step 4: step 2 was saved
        ("generate", 3, 60, 1),
    ],
)
def test_a_run_that_is_told_to_stop_goes_on_later_as_if_it_had_not_been(tmp_path, method, count, grace_s, done, lag):
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    options = ["trainer.steps=5", "eval.every=5", f"pipeline.max_lag={lag}"]
    whole = Machines(tmp_path / "whole", *options).run()
    first = Machines(tmp_path / "stopped", *options)
    if method == "score" and lag == 0:
        count += 1  # on policy a batch is scored in two chunks
    assert stopped_while(first, method, count, grace_s=grace_s) == done
    again = Machines(tmp_path / "stopped", *options).run()
    assert ("load" in again.events) == (done > 0)
    same = learned if lag < 2 else settled
    assert same(again.lines) == same(whole.lines)
    assert again.policy.weight == whole.policy.weight != 0
    for step in range(1, 6):
        assert again.column(f"step-{step:06d}", "completion") == whole.column(f"step-{step:06d}", "completion")


class StoppedWhileSampling(FakeRollout):
    """The run is told to stop when the `at`th batch begins, which takes longer than the grace; `late` in the batch."""

    stop, at, grace_s, late = StopSignal(), 0, 0.05, False

    def generate(self, requests):
        finished = list(super().generate(requests))
        if len(self.requests) != self.at:
            yield from finished
            return
        if self.late:
            yield finished.pop()
        self.stop.request(self.grace_s)
        for _ in range(500):
            time.sleep(0.01)
            self.stop.raise_if_stopped()
        yield from finished


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", range(3, 10))
@pytest.mark.parametrize(
    "options", [*(pytest.param(lag, marks=pytest.mark.long) for lag in "023"), "1", "1 pipeline.in_flight=true"]
)
def test_a_stop_in_the_middle_of_sampling_saves_every_finished_step(tmp_path, options, at, late):
    """The usual moment: sampling takes the longest, and a batch ahead may take longer than the grace."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    settings = ["trainer.steps=8", "eval.every=3", "checkpoint.every=50", *f"pipeline.max_lag={options}".split()]
    whole = Machines(tmp_path / "whole", *settings, reference=True).run()

    first = Machines(tmp_path / "stopped", *settings, reference=True, rollout=StoppedWhileSampling)
    first.rollout.stop, first.rollout.at, first.rollout.late = first.trainer.stop, at, late
    began = time.monotonic()
    saved = first.trainer.run()
    assert time.monotonic() - began < 4
    first.run_directory.close()
    assert saved == first.trainer.state.step, "what is finished is saved"
    trained = len(first.policy.updates) // 2
    assert saved == trained < 8

    given_up = [e for e in read_lines(first.run_directory.path / "events.jsonl") if e["event"] == "batches given up"]
    again = Machines(tmp_path / "stopped", *settings, reference=True).run()
    assert [line["step"] for line in again.lines] == list(range(9)), "no line is missing, and none is there twice"
    assert all(set(REQUIRED) <= set(line) for line in again.lines[1:])
    assert [line["step"] for line in again.lines if "eval/easy/accuracy" in line] == [0, 3, 6, 8]
    assert len(again.policy.updates) == 2 * (8 - saved)
    if "flight" in options:
        return
    assert bool(given_up) == any("newer" in note for note in first.progress.notes)
    assert bool(given_up) == (again.policy.weight != whole.policy.weight), "a run that is not the same says so"
    if options == "0":
        assert not given_up


def test_a_stop_whose_grace_is_over_in_the_middle_of_an_update_goes_back_to_the_last_checkpoint(tmp_path):
    first = Machines(tmp_path, "trainer.steps=9", "checkpoint.every=2", "pipeline.max_lag=1")
    assert stopped_while(first, "update", 10, grace_s=-1) == 4
    assert first.trainer.state.step == 4


class Slow(FakeRollout):
    def generate(self, requests):
        time.sleep(0.2)
        yield from super().generate(requests)


def test_a_run_that_is_told_to_stop_waits_for_batches_that_could_not_be_made_again(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    options = ["trainer.steps=5", "eval.every=5", "pipeline.max_lag=3"]
    whole = Machines(tmp_path / "whole", *options).run()
    first = Machines(tmp_path / "stopped", *options, rollout=Slow)
    assert stopped_while(first, "update", 2, grace_s=60) == 1
    assert len(first.rollout.requests) == 2 + 4, "all batches of the first weights were made"
    again = Machines(tmp_path / "stopped", *options).run()
    assert settled(again.lines) == settled(whole.lines)
    assert again.policy.weight == whole.policy.weight != 0


def test_an_evaluation_that_was_abandoned_is_made_up_for(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    options = ["trainer.steps=4", "checkpoint.every=0"]
    whole = Machines(tmp_path / "whole", *options).run()
    first = Machines(tmp_path / "stopped", *options)
    assert stopped_while(first, "generate", 5, grace_s=-1) == 2  # comparing, eval 0, steps 1 and 2, eval 2
    assert [line["step"] for line in first.lines] == [0, 1]
    again = Machines(tmp_path / "stopped", *options).run()
    assert learned(again.lines) == learned(whole.lines)


def test_a_stop_between_two_evaluations_does_not_lose_the_best_step(tmp_path):
    """A step that ends without an evaluation of its own has no figure to choose by."""
    options = ["trainer.steps=4", "eval.every=2", "checkpoint.keep_best=eval/easy/accuracy"]
    first = Machines(tmp_path, *options)
    assert stopped_while(first, "sync", 2, grace_s=-1) == 1
    again = Machines(tmp_path, *options).run()
    assert [line["step"] for line in again.lines] == [0, 1, 2, 3, 4]


# --- the best checkpoint ---------------------------------------------------------------------------------------------------


def test_a_best_step_whose_evaluation_was_abandoned_is_the_best_all_the_same(tmp_path):
    options = ["trainer.steps=6", "checkpoint.keep_best=eval/easy/accuracy", "checkpoint.keep_last=1"]
    options += ["checkpoint.every=0", "eval.every=1"]
    kept = []
    for name, stops in (("whole", 0), ("stopped", 6)):
        (tmp_path / name).mkdir()
        for _ in range(stops):  # each start compares, evaluates what is owed, and is stopped in its step's evaluation
            stopped_while(Machines(tmp_path / name, *options), "generate", 4, grace_s=-1)
        machines = Machines(tmp_path / name, *options).run()
        kept.append(sorted(p.name for p in (machines.run_directory.path / "checkpoints").iterdir()))
    assert kept[0] == kept[1]


@pytest.mark.parametrize("figure", ["reward/mean", "-reward/mean"])
def test_the_best_step_is_saved_and_kept(tmp_path, figure):
    options = ["trainer.steps=8", f"checkpoint.keep_best={figure}", "checkpoint.keep_last=1", "checkpoint.every=0"]
    machines = Machines(tmp_path, *options).run()
    sign = -1 if figure.startswith("-") else 1
    best = max(machines.lines[1:], key=lambda line: sign * line["reward/mean"])["step"]
    kept = sorted(p.name for p in (machines.run_directory.path / "checkpoints").iterdir())
    assert kept == sorted({f"step-{best:06d}", "step-000008"})
