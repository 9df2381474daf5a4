"""Evaluation on held-out sets, with real batches of fake engines."""

import itertools
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeRewards, FakeRollout, make_batch, make_dataset, make_prompt

from rlsys.config.schema import RewardConfig
from rlsys.errors import ConfigError
from rlsys.evaluation.held_out import HeldOutSet, evaluate
from rlsys.rewards.judge import reward_inputs
from rlsys.runs.samples import read_saved_samples, write_samples
from rlsys.sampling.collector import Collector
from rlsys.types import Episode, Observation, Sample, Verdict


class Told(FakeRewards):
    """Judges as told: `scores[uid]` has a score per sample, None where the verdict fails; `answers[uid]` likewise."""

    def __init__(self, scores: dict[str, list[float | None]], answers: dict[str, str] | None = None):
        super().__init__()
        self.scores, self.answers = scores, answers or {}

    def verdict(self, sample, prompt):
        score = self.scores[sample.uid][sample.index]
        if score is None:
            return Verdict(None, failure="timeout", detail="no verdict after 10 s\nsecond line")
        answer = self.answers[sample.uid][sample.index] if self.answers else None
        return Verdict(score, {"own": score}, answer=answer)


def prompts(*uids: str, source: str = "a"):
    return [make_prompt(uid, source=source, row_number=i) for i, uid in enumerate(uids)]


def run(held_out, rewards=None, share: float = 0.5, version: int = 4, pass_score: float = 1.0):
    rollout = FakeRollout([])
    rollout.version = version
    collector = Collector(rollout, rewards or FakeRewards(), seed=0, reward=RewardConfig(max_failure_share=share))
    evaluation = evaluate(collector, held_out, step=4, pass_score=pass_score, seed=0)
    return evaluation, rollout


def zigzags(count: int = 12, source: str = "a", name: str = "", **how) -> HeldOutSet:
    return HeldOutSet(name or source, make_dataset(count, source=source).prompts, **how)


# --- what is asked for -----------------------------------------------------------------------------------------------------


def test_by_default_every_prompt_is_answered_once_and_greedily():
    evaluation, rollout = run([zigzags(5)])
    [requests] = rollout.requests
    assert len(requests) == 5
    assert {r.temperature for r in requests} == {0.0}
    assert {r.index for r in requests} == {0}
    assert evaluation.scores["a"].prompts == evaluation.scores["a"].samples == 5


def test_all_sets_are_sampled_in_one_go_each_in_its_own_way():
    b = zigzags(2, "b", samples=4, temperature=0.6, max_new_tokens=90, top_p=0.9, top_k=20)
    _, rollout = run([zigzags(3, "a", max_new_tokens=7), b])
    [requests] = rollout.requests
    assert {(r.uid[0], r.max_new_tokens, r.top_p, r.top_k) for r in requests} == {("a", 7, 1.0, -1), ("b", 90, 0.9, 20)}
    assert [(r.uid[0], r.index, r.temperature) for r in requests] == [("a", 0, 0)] * 3 + [
        ("b", i, 0.6) for _ in range(2) for i in range(4)
    ]
    assert len({r.seed for r in requests}) == len(requests)


def test_samples_from_other_weights_than_those_of_the_step_are_refused():
    with pytest.raises(RuntimeError, match="evaluation of step 4: the engines sampled from the weights of step 3"):
        run([zigzags(3)], version=3)


def test_an_episode_that_failed_before_its_first_turn_is_of_no_weights(monkeypatch):
    def empty(self, request, version):
        return Sample(request.uid, request.index, "", np.zeros(0, np.int32), np.zeros(0, np.float32), "stop", 0)

    answer = FakeRollout.one
    monkeypatch.setattr(FakeRollout, "one", lambda *a: (empty if a[1].uid == "p1" else answer)(*a))
    told = Told({"p0": [1.0], "p1": [None], "p2": [0.0]})
    evaluation, _ = run([HeldOutSet("a", prompts("p0", "p1", "p2"))], rewards=told)
    assert evaluation.scores["a"].metrics()["accuracy"] == pytest.approx(0.5)


def test_a_source_called_as_the_sum_of_all_is_refused():
    with pytest.raises(ConfigError, match="a source is called `all`"):
        run([zigzags(3, "all"), zigzags(3, "b")])


# --- figures ---------------------------------------------------------------------------------------------------------------


def test_accuracy_is_the_mean_score_of_each_source_and_of_all_prompts():
    evaluation, _ = run([zigzags(12, "a"), zigzags(7, "b")])
    by_source = {"a": [], "b": []}
    for reward, g in zip(evaluation.batch.rewards, evaluation.batch.groups, strict=True):
        by_source[evaluation.batch.prompts[g].source].append(reward)
    metrics = evaluation.metrics()
    for source, scores in by_source.items():
        assert metrics[f"eval/{source}/accuracy"] == pytest.approx(np.mean(scores))
    assert metrics["eval/all/accuracy"] == pytest.approx(np.mean([*by_source["a"], *by_source["b"]]))
    assert 0 <= metrics["eval/a/accuracy/low"] < metrics["eval/a/accuracy"] < metrics["eval/a/accuracy/high"] < 1
    assert metrics["eval/all/prompts"] == 19


def test_one_greedy_set_has_accuracy_lengths_and_counts_and_no_more():
    evaluation, _ = run([zigzags(12, "a")])
    assert {name.removeprefix("eval/a/") for name in evaluation.metrics()} == {
        "accuracy",
        "accuracy/low",
        "accuracy/high",
        "prompts",
        "samples",
        "failed",
        "length/mean",
        "length/truncated",
    }


def test_a_prompt_counts_once_however_many_samples_are_left_of_it():
    rewards = Told({"p": [1, 1, 1, 1], "q": [None, None, None, 0]})
    evaluation, _ = run([HeldOutSet("a", prompts("p", "q"), samples=4, temperature=1.0)], rewards)
    assert evaluation.scores["a"].means["accuracy"].value == 0.5


def test_the_average_of_n_samples_is_over_the_prompts_that_have_n():
    scores = {"p": [1, 1, 1, 0], "q": [None, None, None, 0], "r": [0, 1, 0, 0]}
    held_out = [HeldOutSet("a", prompts(*scores), samples=4, temperature=1.0)]
    metrics = run(held_out, Told(scores))[0].metrics()
    assert (metrics["eval/a/avg@4"], metrics["eval/a/avg@4/prompts"]) == (0.5, 2), "3/4 and 1/4"
    assert metrics["eval/a/accuracy"] == pytest.approx(1 / 3), "3/4, 0/1 and 1/4"
    scores = {uid: [None, 1, *own[2:]] for uid, own in scores.items()}
    assert not any("avg@" in name for name in run(held_out, Told(scores))[0].metrics())


def test_pass_and_maj_at_k_are_those_of_all_subsets():
    scores = {"p": [1, 0, 0.5, 1, 0, 1], "q": [0, 0, 0, 1, 1, 0], "r": [0, 0, 0, 0, 0, 0]}
    answers = {"p": "782776", "q": "111223", "r": "123456"}
    evaluation, _ = run([HeldOutSet("a", prompts(*scores), samples=6, temperature=1.0)], Told(scores, answers))
    metrics = evaluation.metrics()
    assert [k for k in range(9) if f"eval/a/pass@{k}" in metrics] == [1, 2, 4, 6]
    for k in (1, 2, 4, 6):
        passed, voted = [], []
        for uid, own in scores.items():
            subsets = list(itertools.combinations(range(6), k))
            passed.append(np.mean([any(own[i] >= 1 for i in subset) for subset in subsets]))
            voted.append(np.mean([vote([answers[uid][i] for i in s], [own[i] for i in s]) for s in subsets]))
        assert metrics[f"eval/a/pass@{k}"] == pytest.approx(np.mean(passed))
        assert metrics[f"eval/a/maj@{k}"] == pytest.approx(np.mean(voted))
        assert metrics[f"eval/a/pass@{k}/low"] <= metrics[f"eval/a/pass@{k}"] <= metrics[f"eval/a/pass@{k}/high"]


def vote(answers: list[str], scores: list[float]) -> float:
    counts = Counter(answers)
    best = [a for a in counts if counts[a] == max(counts.values())]
    return float(np.mean([np.mean([s for a, s in zip(answers, scores, strict=True) if a == b]) for b in best]))


def test_solved_is_what_scores_at_least_the_pass_score():
    rewards = Told({"p": [0.5, 0.5], "q": [0.5, 0]})
    held_out = [HeldOutSet("a", prompts("p", "q"), samples=2, temperature=1.0)]
    assert run(held_out, rewards)[0].metrics()["eval/a/pass@2"] == 0
    assert run(held_out, rewards, pass_score=0.5)[0].metrics()["eval/a/pass@2"] == 1
    assert run(held_out, rewards, pass_score=0.5)[0].metrics()["eval/a/pass@1"] == 0.75


@pytest.mark.parametrize("score", [0.1, 0.7, 0.9, 1 / 3, 0.7 + 0.2 + 0.1])
def test_a_score_equal_to_the_pass_score_is_solved_whatever_its_last_bit(score):
    held_out = [HeldOutSet("a", prompts("p"), samples=2, temperature=1.0)]
    evaluation, _ = run(held_out, Told({"p": [score, score]}), pass_score=round(score, 12) if score > 0.99 else score)
    assert evaluation.metrics()["eval/a/pass@1"] == 1


def test_without_an_answer_the_stripped_completion_votes():
    held_out = [HeldOutSet("a", prompts("p"), samples=3, temperature=1.0)]
    rollout = FakeRollout([])
    rollout.version, one = 4, rollout.one
    rollout.one = lambda r, v: replace(one(r, v), text=["48 ", " 48", "84"][r.index])
    collector = Collector(rollout, Told({"p": [1, 1, 0]}), seed=0, reward=RewardConfig(max_failure_share=0))
    evaluation = evaluate(collector, held_out, step=4, pass_score=1, seed=0)
    assert evaluation.metrics()["eval/a/maj@3"] == 1


def test_lengths_and_truncation_are_of_all_samples():
    rollout = FakeRollout([])
    rollout.version, one = 4, rollout.one
    rollout.one = lambda r, v: (
        replace(one(r, v), finish="length", tokens=np.ones(3, np.int32)) if r.index else one(r, v)
    )
    collector = Collector(
        rollout, Told({"p": [1, None], "q": [0, 1]}), seed=0, reward=RewardConfig(max_failure_share=0.5)
    )
    held_out = [HeldOutSet("a", prompts("p", "q"), samples=2, temperature=1.0)]
    metrics = evaluate(collector, held_out, step=4, pass_score=1, seed=0).metrics()
    assert (metrics["eval/a/length/mean"], metrics["eval/a/length/truncated"]) == (5, 0.5)


def test_judged_episodes_have_their_turns_and_how_they_ended():
    rollout = FakeRollout([])
    rollout.version, one = 4, rollout.one
    at = {0: (0,), 1: (0, 2, 5), 2: (0, 1)}  # where the environment spoke

    def play(request, version):
        observations = tuple(Observation(n, np.array([3, 4], np.int32)) for n in at[request.index])
        episode = Episode(None, [], [0.0] * len(observations))
        finish = ["stop", "turns", "window"][request.index]
        return replace(one(request, version), observations=observations, episode=episode, finish=finish)

    rollout.one = play
    collector = Collector(rollout, Told({"p": [1, 0, None]}), seed=0, reward=RewardConfig(max_failure_share=0.5))
    held_out = [HeldOutSet("a", prompts("p"), samples=3, temperature=1.0)]
    metrics = evaluate(collector, held_out, step=4, pass_score=1, seed=0).metrics()
    assert metrics["eval/a/episode/turns"] == 2, "one and three; the third has no verdict"
    assert metrics["eval/a/episode/observed_tokens"] == 4
    shares = {name: metrics[f"eval/a/episode/finish/{name}"] for name in ("stop", "turns", "window", "length")}
    assert shares == {"stop": 0.5, "turns": 0.5, "window": 0, "length": 0}
    assert metrics["eval/a/length/truncated"] == pytest.approx(2 / 3)


def test_over_all_sources_those_with_fewer_samples_stay_in_what_they_have():
    rewards = Told({"p": [1], "q": [0, 1]})
    sets = [HeldOutSet("a", prompts("p")), HeldOutSet("b", prompts("q", source="b"), samples=2, temperature=1.0)]
    metrics = run(sets, rewards)[0].metrics()
    assert "eval/a/pass@1" not in metrics
    assert (metrics["eval/b/pass@1"], metrics["eval/all/pass@1"]) == (0.5, 0.75)
    assert (metrics["eval/all/pass@2"], metrics["eval/all/pass@2/prompts"]) == (1, 1)
    assert metrics["eval/all/accuracy"] == 0.75
    assert "eval/all/avg@2" not in metrics


def test_the_same_evaluation_has_the_same_figures_to_the_last_bit():
    held_out = [zigzags(12, samples=4, temperature=1.0)]
    assert run(held_out)[0].metrics() == run(held_out)[0].metrics()


# --- failures --------------------------------------------------------------------------------------------------------------


def test_a_failed_verdict_is_no_zero_but_leaves_and_is_counted():
    all_judged, _ = run([zigzags(12)])
    right = [s.uid for s, r in zip(all_judged.batch.samples, all_judged.batch.rewards, strict=True) if r == 1]
    rewards = FakeRewards()
    rewards.broken = {(right[0], 0)}
    evaluation, _ = run([zigzags(12)], rewards)
    metrics = evaluation.metrics()
    assert metrics["eval/a/accuracy"] == pytest.approx((len(right) - 1) / 11)
    assert metrics["eval/a/failed"] == metrics["eval/failure/timeout"] == 1
    assert (metrics["eval/a/prompts"], metrics["eval/a/accuracy/prompts"]) == (12, 11)


def test_pass_at_k_is_of_the_prompts_that_have_k_samples_left():
    rewards = Told({"p": [0, 1, 0, 0], "q": [None, 1, 1, None], "r": [None, None, None, 0]})
    evaluation, _ = run([HeldOutSet("a", prompts("p", "q", "r"), samples=4, temperature=1.0)], rewards)
    metrics = evaluation.metrics()
    assert metrics["eval/a/pass@1"] == pytest.approx((0.25 + 1 + 0) / 3)
    assert (metrics["eval/a/pass@2"], metrics["eval/a/pass@2/prompts"]) == (0.75, 2)
    assert (metrics["eval/a/pass@4"], metrics["eval/a/pass@4/prompts"]) == (1, 1)
    assert (metrics["eval/a/maj@4"], metrics["eval/a/maj@4/prompts"]) == (pytest.approx(0.25), 1)
    assert "eval/a/pass@1/prompts" not in metrics


def test_a_source_whose_verdicts_all_failed_has_counts_and_no_figures():
    rewards = Told({"p": [None], "q": [1], "r": [0]})
    evaluation, _ = run([HeldOutSet("a", prompts("p")), HeldOutSet("b", prompts("q", "r", source="b"))], rewards)
    metrics = evaluation.metrics()
    assert "eval/a/accuracy" not in metrics
    assert (metrics["eval/a/failed"], metrics["eval/b/accuracy"], metrics["eval/all/accuracy"]) == (1, 0.5, 0.5)
    assert all(np.isfinite(v) for v in metrics.values())


# --- sets that overlap -----------------------------------------------------------------------------------------------------


def test_two_files_of_one_source_keep_their_prompts_apart():
    one, two = make_dataset(8, source="a"), make_dataset(8, source="a")
    two.prompts.reverse()
    evaluation, _ = run([HeldOutSet("one.jsonl", one.prompts), HeldOutSet("two.jsonl", two.prompts)])
    assert evaluation.scores["a"].prompts == 16
    assert len({s.uid for s in evaluation.batch.samples}) == 16
    for sample, group in zip(evaluation.batch.samples, evaluation.batch.groups, strict=True):
        assert sorted(sample.text) == sorted(evaluation.batch.prompts[group].text.rstrip(">"))


def test_one_source_taken_in_two_ways_has_the_figures_of_each():
    evaluation, _ = run([zigzags(6, "a", "greedy"), zigzags(6, "a", "sampled", samples=2, temperature=1.0)])
    assert set(evaluation.scores) == {"a@greedy", "a@sampled", "all"}
    assert {s.uid for s in evaluation.batch.samples} == {f"a:{i}" for i in range(1, 7)} | {
        f"a:{i}@sampled" for i in range(1, 7)
    }


# --- what is kept ----------------------------------------------------------------------------------------------------------


def test_every_sample_is_kept_with_what_another_reward_would_ask_for(tmp_path):
    rewards = Told({"p": [1, None], "q": [0.5, 1]}, {"p": "7-", "q": "89"})
    chat = [replace(p, messages=[{"role": "user", "content": p.uid}], rewards="aime") for p in prompts("p", "q")]
    evaluation, _ = run([HeldOutSet("a", chat, samples=2, temperature=1.0)], rewards)
    write_samples(tmp_path / "eval.parquet", evaluation.batch)
    kept = list(read_saved_samples(tmp_path / "eval.parquet"))
    assert [(k.sample.uid, k.sample.index, k.verdict.score, k.verdict.answer) for k in kept] == [
        ("p", 0, 1.0, "7"),
        ("p", 1, None, None),
        ("q", 0, 0.5, "8"),
        ("q", 1, 1.0, "9"),
    ]
    assert (kept[1].verdict.failure, kept[1].verdict.detail) == ("timeout", "no verdict after 10 s")
    assert kept[2].verdict.components == {"own": 0.5}
    assert kept[0].advantage is None
    for k in kept:
        [whole] = [p for p in chat if p.uid == k.sample.uid]
        assert k.prompt == replace(whole, tokens=[])
        assert sorted(k.sample.text) == sorted("864152")
        assert reward_inputs(k.prompt, k.sample)["tokens"] == 7, "as many tokens as there were"


def test_rows_that_json_cannot_say_are_kept_as_text(tmp_path):
    odd = [replace(p, row={"when": np.datetime64("2024-01-02"), "was": {1: "é"}}) for p in prompts("p")]
    evaluation, _ = run([HeldOutSet("a", odd)], Told({"p": [1]}))
    write_samples(tmp_path / "eval.parquet", evaluation.batch)
    [kept] = read_saved_samples(tmp_path / "eval.parquet")
    assert kept.prompt.row == {"when": "2024-01-02", "was": {"1": "é"}}


def test_texts_that_no_file_can_hold_do_not_stop_a_run(tmp_path):
    batch = make_batch([1.0], [0])
    prompt = replace(batch.prompts[0], row={"answer": "\ud800", "name": "ü"})
    verdict = Verdict(None, failure="exception", detail="\ud800 was read")
    batch = replace(batch, prompts=[prompt], answers=["7\ud800"])
    batch = replace(batch, failed=[(replace(batch.samples[0], index=1), verdict)])
    write_samples(tmp_path / "a.parquet", batch)
    judged, failed = read_saved_samples(tmp_path / "a.parquet")
    assert judged.prompt.row == {"answer": "\ud800", "name": "ü"}
    assert (judged.verdict.answer, failed.verdict.detail) == ("7?", "? was read")


def test_a_file_that_holds_no_samples_is_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(ConfigError, match="not a readable parquet file"):
        list(read_saved_samples(tmp_path / "text.parquet"))
    pyarrow.parquet.write_table(pyarrow.table({"uid": ["a"], "prompt": [json.dumps(1)]}), tmp_path / "data.parquet")
    with pytest.raises(ConfigError, match=r"no column index, source, completion, .*, messages, .*, only uid, prompt"):
        list(read_saved_samples(tmp_path / "data.parquet"))
