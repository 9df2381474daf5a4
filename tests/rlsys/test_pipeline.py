import threading
from collections import Counter
from functools import partial

import numpy as np
import pytest
from fakes import FakeRewards, FakeRollout, make_batch, make_dataset, make_prompt

from rlsys.config.schema import RewardConfig
from rlsys.errors import NothingToLearn, StepAbandoned, TooManyRewardFailures, WorkerLost
from rlsys.pipeline import Pipeline, SyncSchedule
from rlsys.runs.samples import read_saved_samples, write_samples
from rlsys.sampling.collector import Collector
from rlsys.sampling.sampling_plan import SamplingPlan
from rlsys.types import Verdict

# --- collecting one batch --------------------------------------------------------------------------------------------------


def collect(rewards=None, *, prompts=None, samples: int = 4, share: float = 0.5, step=1, seed: int = 0):
    rollout = FakeRollout([])
    collector = Collector(rollout, rewards or FakeRewards(), seed=seed, reward=RewardConfig(max_failure_share=share))
    batch = collector.collect(step, prompts or make_dataset(3).take(0, 3), SamplingPlan(samples, 1.0, max_new_tokens=7))
    return batch, rollout


def test_a_batch_stands_in_data_order_whatever_the_order_of_finishing():
    batch, _ = collect()
    assert batch.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert [s.index for s in batch.samples] == [0, 1, 2, 3] * 3
    assert [batch.prompts[g].uid for g in batch.groups] == [s.uid for s in batch.samples]
    assert [p.uid for p in batch.prompts] == [p.uid for p in make_dataset(3).take(0, 3)]


def test_every_sample_is_judged_with_its_own_prompt():
    batch, _ = collect()
    for sample, group, reward in zip(batch.samples, batch.groups, batch.rewards, strict=True):
        facts = {"prompt": batch.prompts[group].text, "completion": sample.text, "finish": sample.finish}
        assert FakeRewards().judge_one(facts) == Verdict(float(reward), {"zigzag": float(reward)})
    assert len({s.text for s in batch.samples}) > 6


def test_a_sample_depends_on_seed_step_prompt_and_index_only():
    texts = [[s.text for s in collect(**options)[0].samples] for options in ({}, {}, {"step": 2}, {"seed": 1})]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2] != texts[3] != texts[0]
    single, _ = collect(prompts=make_dataset(3).take(1, 1))
    assert [s.text for s in single.samples] == texts[0][4:8]


def test_every_request_has_its_own_seed():
    _, rollout = collect(samples=8)
    [requests] = rollout.requests
    assert len({r.seed for r in requests}) == 24
    assert {(r.temperature, r.max_new_tokens) for r in requests} == {(1.0, 7)}


def test_a_failed_sample_leaves_its_group_and_does_not_count_as_zero():
    whole, _ = collect()
    rewards = FakeRewards()
    uid = whole.prompts[1].uid
    rewards.broken = {(uid, 0), (uid, 2)}
    batch, _ = collect(rewards)
    assert batch.groups.tolist() == [0] * 4 + [1] * 2 + [2] * 4
    assert [s.index for s in batch.samples if s.uid == uid] == [1, 3]
    keep = [i for i, s in enumerate(whole.samples) if (s.uid, s.index) not in rewards.broken]
    np.testing.assert_array_equal(batch.rewards, whole.rewards[keep])
    assert batch.failures == {"timeout": 2}
    assert len(batch.components) == len(batch.samples) == len(batch.rewards) == 10


def test_a_group_that_lost_all_its_samples_leaves_a_gap():
    rewards = FakeRewards()
    uid = make_dataset(3).take(0, 3)[1].uid
    rewards.broken = {(uid, i) for i in range(4)}
    batch, _ = collect(rewards)
    assert batch.groups.tolist() == [0] * 4 + [2] * 4
    assert len(batch.prompts) == 3


@pytest.mark.parametrize(
    ("broken", "share", "stops"), [(6, 0.5, False), (7, 0.5, True), (1, 0.0, True), (0, 0.0, False), (12, 1.0, True)]
)
def test_more_failures_than_allowed_stop_the_run(broken, share, stops):
    rewards = FakeRewards()
    uids = [p.uid for p in make_dataset(3).take(0, 3)]
    rewards.broken = set([(uid, i) for uid in uids for i in range(4)][:broken])
    batch, _ = collect(rewards)
    assert len(batch.samples) == 12 - broken
    collector = Collector(FakeRollout([]), rewards, seed=0, reward=RewardConfig(max_failure_share=share))
    if stops:
        with pytest.raises(TooManyRewardFailures, match=rf"step 1: {broken} of 12 .*timeout: no verdict after 10 s"):
            collector.raise_if_too_many_failures(1, batch)
    else:
        collector.raise_if_too_many_failures(1, batch)


def broken_once() -> FakeRewards:
    rewards = FakeRewards()
    rewards.broken = {(make_dataset(3).take(0, 3)[1].uid, 2)}
    return rewards


def test_one_failure_stops_a_run_that_is_told_to_abort():
    rewards = broken_once()
    batch, _ = collect(rewards)
    collector = Collector(FakeRollout([]), rewards, seed=0, reward=RewardConfig(on_failure="abort"))
    with pytest.raises(
        TooManyRewardFailures, match=r"1 of 12 .*\(timeout 1\); reward.on_failure is abort. The first: timeout"
    ):
        collector.raise_if_too_many_failures(1, batch)
    batch, _ = collect()
    collector.raise_if_too_many_failures(1, batch)
    assert batch.failures == {}


def test_a_failed_verdict_may_be_given_a_score_and_is_counted_all_the_same(tmp_path):
    collector = Collector(FakeRollout([]), broken_once(), seed=0, reward=RewardConfig(on_failure="score: -0.5"))
    batch = collector.collect(1, make_dataset(3).take(0, 3), SamplingPlan(4, 1.0, max_new_tokens=7))
    assert (len(batch.samples), batch.rewards[6], batch.failures) == (12, -0.5, {"timeout": 1})
    write_samples(tmp_path / "step.parquet", batch)
    kept = [saved.verdict for saved in read_saved_samples(tmp_path / "step.parquet")]
    assert len(kept) == 12
    assert [(i, v.score, v.detail) for i, v in enumerate(kept) if v.failure] == [(6, -0.5, "no verdict after 10 s")]
    strict = RewardConfig(on_failure="score: -0.5", max_failure_share=0.05)
    with pytest.raises(TooManyRewardFailures, match="1 of 12"):
        Collector(FakeRollout([]), FakeRewards(), seed=0, reward=strict).raise_if_too_many_failures(1, batch)


def test_a_sample_goes_to_be_judged_before_the_next_is_finished():
    judged_counts = []

    class Watching(FakeRollout):
        def generate(self, requests):
            for finished in super().generate(requests):
                judged_counts.append(len(rewards.seen))
                yield finished

    rewards = FakeRewards()
    Collector(Watching([]), rewards, seed=0, reward=RewardConfig(max_failure_share=0)).collect(
        1, make_dataset(3).take(0, 3), SamplingPlan(2, 1.0, max_new_tokens=7)
    )
    assert judged_counts == [0, 2, 4]


def test_an_engine_that_loses_a_sample_is_noticed():
    class Losing(FakeRollout):
        def generate(self, requests):
            for finished in super().generate(requests):
                yield finished[1:]

    with pytest.raises(RuntimeError, match="4 samples were requested, 3 came back"):
        Collector(Losing([]), FakeRewards(), seed=0, reward=RewardConfig(max_failure_share=0)).collect(
            1, [make_prompt()], SamplingPlan(4, 1.0, max_new_tokens=7)
        )


def test_components_and_waiting_times_are_kept():
    batch, _ = collect(FakeRewards({"zigzag": 0.5}))
    assert Counter(c["zigzag"] * 0.5 for c in batch.components) == Counter(batch.rewards.tolist())
    assert batch.reward_s >= 0


# --- batches in order ------------------------------------------------------------------------------------------------------


class Loop:
    """A training loop of three steps around a pipeline; sampling takes the version of the moment."""

    def __init__(self, max_lag: int, last: int = 3, in_flight: bool = False):
        self.events: list[str] = []
        self.version, self.sampled = 1, {}
        self.timetable, self.in_flight = SyncSchedule(max_lag, 1 if in_flight else max(1, max_lag)), in_flight
        self.pipeline = Pipeline(self.start, first=1, last=last, schedule=self.timetable)

    def start(self, step: int):
        self.events.append(f"start {step}")
        self.sampled[step] = self.version
        batch = make_batch([float(step)], [0])
        self.events.append(f"end {step}")
        return batch

    def run(self) -> list[int]:
        order = []
        for step in range(1, self.pipeline.last + 1):
            order.append(int(self.pipeline.next().rewards[0]))
            self.events.append(f"train {order[-1]}")
            if self.timetable.syncs_after(step):
                if not self.in_flight:
                    self.pipeline.wait_until_idle(after=step)
                self.version = step + 1
                self.events.append(f"sync {self.version}")
        self.pipeline.close()
        return order


def test_without_lag_a_batch_is_sampled_from_the_weights_it_trains():
    loop = Loop(max_lag=0)
    assert loop.run() == [1, 2, 3]
    assert loop.sampled == {1: 1, 2: 2, 3: 3}
    assert loop.events == [
        event for k in (1, 2, 3) for event in (f"start {k}", f"end {k}", f"train {k}", f"sync {k + 1}")
    ]


def test_with_a_lag_of_one_each_batch_is_one_version_old():
    loop = Loop(max_lag=1)
    assert loop.run() == [1, 2, 3]
    assert loop.sampled == {1: 1, 2: 1, 3: 2}
    at = {event: i for i, event in enumerate(loop.events)}
    assert at["end 2"] < at["sync 2"] < at["start 3"] < at["end 3"] < at["sync 3"]
    assert at["end 1"] < at["start 2"], "batches are generated one after the other"


@pytest.mark.parametrize("max_lag", [2, 3])
def test_with_a_longer_lag_engines_take_weights_less_often_and_no_batch_is_older_than_allowed(max_lag):
    loop = Loop(max_lag, last=10)
    assert loop.run() == list(range(1, 11))
    lags = [step - loop.sampled[step] for step in range(1, 11)]
    assert lags == [0] + [1 + i % max_lag for i in range(9)]
    assert [e for e in loop.events if e.startswith("sync")] == [f"sync {v + 1}" for v in range(max_lag, 11, max_lag)]


def test_between_two_syncs_batches_are_generated_as_fast_as_they_can_be():
    first, generated = threading.Event(), threading.Event()

    def start(step: int):
        if step == 1:
            first.set()
        if step == 4:
            generated.set()
        return make_batch([float(step)], [0])

    pipeline = Pipeline(start, first=1, last=9, schedule=SyncSchedule(3, 3))
    pipeline.next()
    assert generated.wait(10), "batches 2 to 4 do not wait for step 1"
    pipeline.close()


def test_in_flight_nothing_waits_for_the_engines_to_be_idle():
    loop = Loop(max_lag=2, last=6, in_flight=True)
    assert loop.run() == [1, 2, 3, 4, 5, 6]
    assert all(0 <= step - loop.sampled[step] <= 2 for step in loop.sampled)
    assert [e for e in loop.events if e.startswith("sync")] == [f"sync {v}" for v in range(2, 8)]


def test_with_over_sampling_a_batch_is_begun_one_update_nearer_to_its_training(read):
    lag, more, flying = ["pipeline.max_lag=2"], ["rollout.oversample=0.5"], ["pipeline.in_flight=true"]
    assert SyncSchedule.from_config(read("", *lag)) == SyncSchedule(ahead=2, every=2)
    assert SyncSchedule.from_config(read("", *lag, *more)) == SyncSchedule(ahead=1, every=1)
    assert SyncSchedule.from_config(read("", *lag, *flying)) == SyncSchedule(ahead=2, every=1)
    assert SyncSchedule.from_config(read()) == SyncSchedule(ahead=0, every=1)


def test_with_a_lag_training_does_not_wait_for_the_next_batch_but_draining_does():
    release, started = threading.Event(), threading.Event()

    def start(step: int):
        if step == 2:
            started.set()
            assert release.wait(10)
        return make_batch([float(step)], [0])

    pipeline = Pipeline(start, first=1, last=2, schedule=SyncSchedule(1, 1))
    assert pipeline.next().rewards[0] == 1, "batch 1 is handed out while batch 2 is being generated"
    assert started.wait(10)
    drained = threading.Thread(target=partial(pipeline.wait_until_idle, after=1))
    drained.start()
    drained.join(0.05)
    assert drained.is_alive()
    release.set()
    drained.join(10)
    assert not drained.is_alive()
    assert pipeline.next().rewards[0] == 2
    pipeline.close()


def failing_at_2(error: Exception) -> Pipeline:
    def start(step: int):
        if step == 2:
            raise error
        return make_batch([float(step)], [0])

    pipeline = Pipeline(start, first=1, last=2, schedule=SyncSchedule(1, 1))
    pipeline.next()
    return pipeline


@pytest.mark.parametrize("error", [TooManyRewardFailures("no more"), NothingToLearn("no more")])
def test_a_batch_that_teaches_nothing_is_told_when_its_turn_comes(error):
    pipeline = failing_at_2(error)
    pipeline.wait_until_idle(after=1)
    assert pipeline.finished_ahead(after=1) == []
    with pytest.raises(type(error), match="no more"):
        pipeline.next()
    pipeline.close()


@pytest.mark.parametrize("error", [StepAbandoned(), WorkerLost("died")])
def test_a_batch_that_was_lost_must_be_made_again_from_the_weights_that_are_still_there(error):
    pipeline = failing_at_2(error)
    with pytest.raises(type(error)):
        pipeline.wait_until_idle(after=1)
    pipeline.close()


def test_nothing_is_started_past_the_last_step():
    loop = Loop(max_lag=1, last=3)
    loop.run()
    assert [e for e in loop.events if e.startswith("start")] == ["start 1", "start 2", "start 3"]


def test_a_pipeline_can_begin_in_the_middle():
    started = []
    pipeline = Pipeline(
        lambda k: started.append(k) or make_batch([float(k)], [0]), first=5, last=5, schedule=SyncSchedule(1, 1)
    )
    assert pipeline.next().rewards[0] == 5
    assert started == [5]
    pipeline.close()


@pytest.mark.parametrize("max_lag", [0, 1])
def test_what_goes_wrong_in_sampling_is_raised_in_the_loop(max_lag):
    def start(step: int):
        raise TooManyRewardFailures(f"step {step}")

    pipeline = Pipeline(start, first=1, last=3, schedule=SyncSchedule(max_lag, 1))
    with pytest.raises(TooManyRewardFailures, match="step 1"):
        pipeline.next()
    pipeline.close()
