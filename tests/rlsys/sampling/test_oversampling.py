"""More prompts than needed: who comes when, what goes on where it was, and that nobody is lost or trained on twice."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeRewards, TickingRollout, make_config, make_dataset, make_prompt, make_sample
from machines import Machines, killed_while

from rlsys.runs.checkpoint import Checkpoints
from rlsys.sampling.collector import Collector
from rlsys.sampling.oversampling import Oversampling, PromptGroup

OPTIONS = ["rollout.oversample=0.5", "pipeline.max_lag=1", "trainer.updates_per_step=1"]


def begun(tmp_path, *options: str, lengths=None) -> tuple[Oversampling, TickingRollout]:
    """Four prompts of two samples each are needed, and six asked for; `lengths` are those of the data's rows in order."""
    config = make_config(tmp_path, "trainer.samples_per_prompt=2", *OPTIONS, *options)
    rollout = TickingRollout([])
    data = make_dataset(12, shuffle=False)
    if lengths:
        rollout.length = lambda uid, index: lengths[int(uid.split(":")[1].partition("#")[0]) - 1]
    collector = Collector(rollout, FakeRewards(), seed=0, reward=config.reward)
    return Oversampling(config, collector, data.take), rollout


def rows(batch) -> list[int]:
    return [int(p.uid.split(":")[1].partition("#")[0]) for p in batch.prompts]


def test_a_step_goes_on_with_the_groups_that_are_finished_first(tmp_path):
    oversampling, rollout = begun(tmp_path, lengths=[9, 1, 1, 9, 1, 2, 1, 1, 1, 1, 1, 1])
    first = oversampling.collect(1)
    assert (rows(first), rollout.ticks) == ([2, 3, 5, 6], 2)
    assert (first.position, first.deferred) == (6, (0, 3))
    assert first.requested == 8
    assert len(first.samples) == 8


def test_what_is_half_written_goes_on_where_it_was_with_the_weights_of_the_moment(tmp_path):
    oversampling, rollout = begun(tmp_path, lengths=[5, 1, 1, 9, 1, 2, 9, 9, 9, 9, 9, 9])
    oversampling.collect(1)
    rollout.version = 1
    second = oversampling.collect(2)
    front = rollout.requests[1][:4]
    assert [(r.uid, len(r.partial.tokens)) for r in front] == [(f"zigzag:{row}#0", 2) for row in (1, 1, 4, 4)]
    assert rows(second)[:2] == [1, 4], "they would be too old in step 3"
    for sample in second.samples[:2]:
        assert (sample.version, sample.changes, sample.versions.tolist()) == (0, ((2, 1),), [0, 0, 1, 1, 1])
        assert sample.logprobs.tolist() == [-0.5, -1.5, -2.5, -3.5, -4.5], "those of before are kept"
        assert len(sample.text) == 4


def test_a_sample_without_tokens_is_not_old():
    """Of an episode that failed before its first turn, whose version is 0."""
    empty = replace(make_sample(version=0), tokens=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32))
    group = PromptGroup(0, make_prompt("p"), 3, [(empty, Future(), 0), (make_sample(version=7), Future(), 1)])
    assert group.lag(9) == 1


def test_a_request_that_goes_on_has_another_seed_than_it_began_with(tmp_path):
    oversampling, rollout = begun(tmp_path, lengths=[5, 1, 1, 1, 1, 1] * 2)
    oversampling.collect(1)
    oversampling.collect(2)
    before, after = ({(r.uid, r.index): r.seed for r in requests} for requests in rollout.requests[:2])
    both = before.keys() & after.keys()
    assert both
    assert all(before[key] != after[key] for key in both)


def test_a_step_waits_for_what_would_be_too_old_in_the_next(tmp_path):
    oversampling, rollout = begun(tmp_path, lengths=[9, 1, 1, 1, 1, 1] + [1] * 6)
    oversampling.collect(1)
    ticks = rollout.ticks
    rollout.version = 1
    second = oversampling.collect(2)
    assert rows(second)[0] == 1
    assert rollout.ticks == ticks + 8
    assert len(second.deferred) == 2


def test_with_more_lag_it_need_not_be_waited_for(tmp_path):
    oversampling, rollout = begun(tmp_path, "pipeline.max_lag=3", lengths=[20, 1, 1, 1, 1, 1] + [1] * 6)
    lags = []
    for step in range(1, 6):
        batch = oversampling.collect(step)
        lags += [step - 1 - s.version for s in batch.samples]
        rollout.version = step
        if step < 4:
            assert rollout.ticks == step, "one tick a step is enough for the others"
            assert 0 in batch.deferred
    assert max(lags) == 3


def test_groups_that_were_finished_in_vain_come_in_the_next_step(tmp_path):
    oversampling, rollout = begun(tmp_path, lengths=[1] * 12)
    assert rows(oversampling.collect(1)) == [1, 2, 3, 4]
    assert rows(oversampling.collect(2)) == [5, 6, 7, 8], "5 and 6 were judged in step 1 already"
    assert len(rollout.requests[1]) == 2 * 4


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_every_prompt_is_trained_on_once_and_no_sample_is_older_than_allowed(tmp_path, lag):
    options = [*OPTIONS, f"pipeline.max_lag={lag}", "trainer.steps=12", "eval.every=5"]
    machines = Machines(tmp_path, *options, rollout=TickingRollout)
    machines.trainer.compare = lambda: None  # of these engines nobody could compute the log-probs
    machines.run()
    trained = [uid for step in range(1, 13) for uid in dict.fromkeys(machines.column(f"step-{step:06d}", "uid"))]
    assert len(trained) == len(set(trained)) == 12 * 4
    state = Checkpoints(machines.run_directory.path / "checkpoints", 0).load_newest(print).state
    stream = [p.uid for p in make_dataset(10).take(0, state.position)]
    assert {*trained, *(stream[i] for i in state.deferred)} == set(stream)
    assert max(line["lag"] for line in machines.lines[1:]) <= lag
    assert any(changes for step in range(1, 13) for changes in machines.column(f"step-{step:06d}", "changes"))


@pytest.mark.parametrize("lag", [1, 2])
def test_a_killed_run_asks_again_for_what_was_left(tmp_path, lag):
    options = [*OPTIONS, f"pipeline.max_lag={lag}", "trainer.steps=9", "checkpoint.every=4", "checkpoint.keep_last=0"]
    first = Machines(tmp_path, *options, rollout=TickingRollout, evals=0)
    first.trainer.compare = lambda: None
    killed_while(first, "update", 7)
    again = Machines(tmp_path, *options, rollout=TickingRollout, evals=0)
    again.trainer.compare = lambda: None
    again.run()
    assert "load" in again.events
    trained = [uid for step in range(1, 10) for uid in dict.fromkeys(again.column(f"step-{step:06d}", "uid"))]
    assert len(trained) == len(set(trained)) == 9 * 4
    state = Checkpoints(again.run_directory.path / "checkpoints", 0).load_newest(print).state
    stream = [p.uid for p in make_dataset(10).take(0, state.position)]
    assert {*trained, *(stream[i] for i in state.deferred)} == set(stream)


@pytest.mark.parametrize("options", [["pipeline.max_lag=2"], ["pipeline.max_lag=3", "rollout.oversample=0.5"]])
def test_in_flight_no_token_is_older_than_allowed_and_an_evaluation_has_its_own_weights(tmp_path, options):
    machines = Machines(
        tmp_path,
        *options,
        "pipeline.in_flight=true",
        "trainer.steps=12",
        "trainer.updates_per_step=1",
        "eval.every=4",
        rollout=lambda events: TickingRollout(events, tick_s=0.002),
    )
    machines.trainer.compare = lambda: None
    machines.run()
    limit = machines.config.pipeline.max_lag
    for step in range(1, 13):
        name = f"step-{step:06d}"
        for version, changes in zip(machines.column(name, "version"), machines.column(name, "changes"), strict=True):
            versions = [version, *(to for _, to in changes)]
            assert versions == sorted(set(versions))
            assert 0 <= step - 1 - version <= limit
            assert versions[-1] < step
    lines = machines.lines[1:]
    assert all(0 <= line["lag/mean"] <= line["lag"] <= limit for line in lines)
    for step in (4, 8, 12):
        assert set(machines.column(f"eval-{step:06d}", "version")) == {step}
        assert not any(machines.column(f"eval-{step:06d}", "changes"))
    assert np.isfinite([value for line in lines for value in line.values()]).all()
