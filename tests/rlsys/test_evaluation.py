import pytest
from fakes import FakeRewards, FakeRollout, make_dataset

from rlsys.evaluation import evaluate
from rlsys.pipeline import Collector


def run(datasets, rewards=None, share: float = 0.5):
    rollout = FakeRollout([])
    collector = Collector(rollout, rewards or FakeRewards(), seed=0, max_failure_share=share)
    return evaluate(collector, datasets, step=4, max_new_tokens=7), rollout


def test_every_prompt_is_answered_once_and_greedily():
    found, rollout = run([make_dataset(5, source="a")])
    [requests] = rollout.requests
    assert len(requests) == 5
    assert {r.temperature for r in requests} == {0.0}
    assert {r.index for r in requests} == {0}
    assert found.counts == {"a": 5}


def test_accuracy_is_the_mean_score_of_each_source():
    found, _ = run([make_dataset(12, source="a"), make_dataset(7, source="b")])
    assert found.counts == {"a": 12, "b": 7}
    for source, accuracy in found.accuracy.items():
        scores = [
            r
            for r, g in zip(found.batch.rewards, found.batch.groups, strict=True)
            if found.batch.prompts[g].source == source
        ]
        assert accuracy == pytest.approx(sum(scores) / len(scores))
    assert 0 < found.accuracy["a"] < 1
    assert found.metrics() == {f"eval/{s}/accuracy": a for s, a in found.accuracy.items()}


def test_a_failed_verdict_counts_as_wrong_and_is_told():
    dataset = make_dataset(12, source="a")
    all_judged, _ = run([dataset])
    right = [s.uid for s, r in zip(all_judged.batch.samples, all_judged.batch.rewards, strict=True) if r == 1]
    rewards = FakeRewards()
    rewards.broken = {(right[0], 0)}
    found, _ = run([dataset], rewards)
    assert found.accuracy["a"] == pytest.approx(all_judged.accuracy["a"] - 1 / 12)
    assert found.metrics()["eval/failure/timeout"] == 1
    assert found.counts == {"a": 12}


def test_two_files_of_one_source_keep_their_prompts_apart():
    one, two = make_dataset(8, source="a"), make_dataset(8, source="a")
    two.prompts.reverse()
    for i, prompt in enumerate(one.prompts):
        assert prompt.uid == f"a:{i + 1}"
    found, _ = run([one, two])
    assert found.counts == {"a": 16}
    assert len({s.uid for s in found.batch.samples}) == 16
    for sample, group in zip(found.batch.samples, found.batch.groups, strict=True):
        assert sorted(sample.text) == sorted(found.batch.prompts[group].text.rstrip(">"))
