from dataclasses import replace

import numpy as np
import pytest
from fakes import (
    make_dataset,
)
from machines import DYNAMIC, REQUIRED, Machines, killed_while, learned

from rlsys.batching import packing
from rlsys.batching.balance import DEFAULT_PAIRS_PER_TOKEN, assign_to_ranks
from rlsys.errors import Disagreement, NothingToLearn, TooManyRewardFailures
from rlsys.models.lookup import pairs_per_token
from rlsys.runs.directory import read_lines
from rlsys.types import Verdict

# --- the story -------------------------------------------------------------------------------------------------------------


def test_a_run_is_told_in_order(tmp_path):
    machines = Machines(tmp_path, "trainer.steps=2", reference=True).run()
    step = ["generating", "generate", "reference", "resting", "score", "update", "update", "sync"]
    evaluation = ["generating", "generate"]
    assert in_order(machines.events) == ["sync", *evaluation, "score", *evaluation, *step, *step, *evaluation, "save"]


def in_order(events: list[str]) -> list[str]:
    """What happens at the same time, while engines still sample or after that, by name."""
    ordered, together = [], ("reference", "resting", "score", "values")
    for event in events:
        ordered.append(event)
        if event in together:
            first = next(i for i in range(len(ordered) - 1, -1, -1) if ordered[i] not in together) + 1
            ordered[first:] = sorted(ordered[first:])
    return ordered


def test_each_step_has_one_line_with_the_promised_names(tmp_path):
    machines = Machines(tmp_path, reference=True, evals=2).run()
    assert [line["step"] for line in machines.lines] == [0, 1, 2, 3]
    for line in machines.lines[1:]:
        assert set(REQUIRED) <= set(line)
        assert all(np.isfinite(value) for value in line.values())
    for line in (machines.lines[0], machines.lines[2], machines.lines[3]):
        assert {"eval/easy/accuracy", "eval/hard/accuracy"} <= set(line)
    assert not any(name.startswith("eval/") for name in machines.lines[1])
    assert machines.progress.steps == [0, 1, 2, 3]


def test_the_figures_are_those_of_the_machines(tmp_path):
    machines = Machines(tmp_path, reference=True).run()
    for line in machines.lines[1:]:
        rewards = np.array(machines.column(f"step-{line['step']:06d}", "reward"))
        assert line["reward/mean"] == pytest.approx(rewards.mean())
        assert line["reward/std"] == pytest.approx(rewards.std(ddof=1))
        assert line["tokens"] == 16 * 7
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["time/step"])
        logprobs = np.concatenate(machines.column(f"step-{line['step']:06d}", "rollout_logprobs"))
        assert line["entropy"] == pytest.approx(-logprobs.mean())
        teaching = np.array(machines.column(f"step-{line['step']:06d}", "advantage")) != 0
        assert line["clip_fraction"] == pytest.approx(0.25 * teaching.mean())
        assert line["mismatch/max_abs"] == pytest.approx(line["mismatch/mean_abs"], abs=1e-5)
    assert machines.lines[1]["mismatch/max_abs"] == 0, "old log-probs are the engine's before the first update"
    assert machines.lines[1]["kl"] == pytest.approx(0.5, abs=0.3)
    assert [line["sync/version"] for line in machines.lines[1:]] == [1, 2, 3]
    assert [line["lag"] for line in machines.lines[1:]] == [0, 0, 0]


def test_control_tokens_decide_about_rewards_and_weights(tmp_path):
    """No completion begins with one: all are wrong, and their first tokens weigh like the others."""
    options = ["algorithm.advantage=raw", "algorithm.normalize=decoupled", "algorithm.control_weight=0.5"]
    machines = Machines(tmp_path, *options, control_tokens={999: 1.0}).run()
    assert set(machines.column("step-000001", "advantage")) == {-1.0}
    packs, _ = machines.policy.updates[0]
    weights = np.concatenate([p.weights for own in packs for p in own])
    assert weights.tolist() == pytest.approx([1 / len(weights)] * len(weights))


def test_without_evaluation_sets_nothing_is_evaluated(tmp_path):
    machines = Machines(tmp_path, evals=0).run()
    assert len(machines.asked) == 3
    assert machines.lines[0] == {"step": 0}


def test_every_sample_of_every_step_is_kept(tmp_path):
    machines = Machines(tmp_path).run()
    names = sorted(p.stem for p in (machines.run_directory.path / "samples").iterdir())
    assert names == ["eval-000000", "eval-000002", "eval-000003", "step-000001", "step-000002", "step-000003"]
    for step in (1, 2, 3):
        name = f"step-{step:06d}"
        assert machines.column(name, "version") == [step - 1] * 16
        rewards, advantages = (np.array(machines.column(name, c)).reshape(4, 4) for c in ("reward", "advantage"))
        np.testing.assert_allclose(advantages.sum(1), 0, atol=1e-5)
        assert ((advantages > 0) == (rewards > rewards.mean(1, keepdims=True))).all()


def test_the_prompts_of_a_step_are_the_next_ones_of_the_data(tmp_path):
    machines = Machines(tmp_path, evals=0).run()
    expected = [p.uid for p in make_dataset(10).take(0, 12)]
    requested = [uid for requests in machines.asked for uid in dict.fromkeys(r.uid for r in requests)]
    assert requested == expected


# --- updates ---------------------------------------------------------------------------------------------------------------

ALL_TEACH = "entropy.coef=0.1"  # so that no sample is left out for want of an advantage


@pytest.mark.parametrize(("updates", "epochs"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2)])
def test_each_pass_over_the_batch_is_so_many_updates_of_whole_groups(tmp_path, updates, epochs):
    many = f"trainer.updates_per_step={updates}", f"trainer.epochs_per_step={epochs}"
    machines = Machines(tmp_path, "trainer.steps=1", *many, ALL_TEACH).run()
    assert len(machines.policy.updates) == updates * epochs
    for epoch in range(epochs):
        trained = []
        for packs, _ in machines.policy.updates[epoch * updates : (epoch + 1) * updates]:
            members = sorted(s for own in packs for p in own for s in p.samples)
            assert len(members) == 16 // updates
            groups = {m // 4 for m in members}
            assert len(groups) * 4 == len(members), "groups stay whole"
            assert sum(float(p.weights.sum()) for own in packs for p in own) == pytest.approx(1.0)
            trained += members
        assert sorted(trained) == list(range(16))


def test_passes_split_the_batch_differently(tmp_path):
    machines = Machines(tmp_path, "trainer.steps=1", "trainer.epochs_per_step=4").run()
    firsts = [
        tuple(sorted(s for own in packs for p in own for s in p.samples)) for packs, _ in machines.policy.updates[::2]
    ]
    assert len(set(firsts)) > 1


def test_with_one_update_nothing_is_scored_and_the_policy_is_its_own_anchor(tmp_path):
    machines = Machines(tmp_path, "trainer.updates_per_step=1", ALL_TEACH).run()
    assert machines.events.count("score") == 1, "at the start, to compare"
    assert all(p.columns.old is None for packs, _ in machines.policy.updates for own in packs for p in own)
    assert all(line["time/score"] < 0.1 for line in machines.lines[1:])


def test_with_the_engine_as_anchor_several_updates_need_no_scoring(tmp_path):
    machines = Machines(tmp_path, "algorithm.anchor=rollout", ALL_TEACH).run()
    assert len(machines.policy.updates) == 6
    assert machines.events.count("score") == 1, "at the start, to compare"
    assert all(p.columns.old is None for packs, _ in machines.policy.updates for own in packs for p in own)


def test_old_log_probs_are_those_from_before_the_first_update_in_every_update(tmp_path):
    machines = Machines(tmp_path, "trainer.steps=1", "trainer.epochs_per_step=2").run()
    assert machines.events.count("score") == 2
    assert "score" not in machines.events[machines.events.index("update") :]
    assert machines.policy.weight != 0
    for packs, _ in machines.policy.updates:
        for p in (p for own in packs for p in own):
            np.testing.assert_array_equal(p.columns.old, p.rollout)  # the fake's weight was 0 then


def test_reference_log_probs_are_there_only_with_a_reference(tmp_path):
    with_one = Machines(tmp_path, "trainer.steps=1", reference=True).run()
    for packs, _ in with_one.policy.updates:
        for p in (p for own in packs for p in own):
            np.testing.assert_allclose(p.columns.ref, p.rollout - 0.5)
    without = Machines(tmp_path, "trainer.steps=2").run()
    assert without.policy.updates
    assert all(p.columns.ref is None for packs, _ in without.policy.updates for own in packs for p in own)


def test_the_learning_rate_follows_the_number_of_updates(tmp_path):
    machines = Machines(tmp_path, "policy.warmup_updates=4", "policy.lr=0.5").run()
    assert [lr for _, lr in machines.policy.updates] == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    assert [line["lr"] for line in machines.lines[1:]] == [0.25, 0.5, 0.5]


@pytest.mark.parametrize(("last", "updates"), [("null", 6), (6, 12)])
def test_a_falling_learning_rate_is_0_after_the_run_or_after_the_step_that_is_set(tmp_path, last, updates):
    """Three steps of two updates each."""
    options = ["policy.lr=1", "policy.lr_schedule=linear", f"policy.lr_schedule_steps={last}"]
    machines = Machines(tmp_path, *options).run()
    assert [lr for _, lr in machines.policy.updates] == pytest.approx([1 - n / updates for n in range(6)])


def test_a_constant_of_zero_means_the_longest_completion(tmp_path):
    machines = Machines(tmp_path, "trainer.steps=1", "algorithm.normalize=constant").run()
    [weight] = {float(w) for packs, _ in machines.policy.updates for own in packs for p in own for w in p.weights}
    assert weight == pytest.approx(1 / (8 * 7))  # 8 samples per update, max_new_tokens 7


def test_an_advantage_of_the_users_own_is_used(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def lengths_minus_six(rewards, groups, *, lengths): return (lengths - 6) * (groups + 1)\n")
    machines = Machines(tmp_path, "trainer.steps=1", f"algorithm.advantage={file}:lengths_minus_six").run()
    assert machines.column("step-000001", "advantage") == [1.0] * 4 + [2.0] * 4 + [3.0] * 4 + [4.0] * 4


def test_shuffled_rewards_are_the_same_rewards_on_other_samples(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    own = "def f(rewards, groups, *, lengths): return rewards\n"
    (tmp_path / "mine.py").write_text(own)
    options = ["trainer.steps=1", f"algorithm.advantage={tmp_path}/mine.py:f"]
    plain = Machines(tmp_path / "a", *options).run()
    shuffled = Machines(tmp_path / "b", *options, "reward.shuffle=true").run()
    before, after = plain.column("step-000001", "advantage"), shuffled.column("step-000001", "advantage")
    assert before == plain.column("step-000001", "reward") == shuffled.column("step-000001", "reward")
    assert before != after
    assert sorted(before) == sorted(after)


# --- methods ---------------------------------------------------------------------------------------------------------------


def test_a_critic_is_asked_before_the_step_and_learns_in_each_update(tmp_path):
    machines = Machines(tmp_path, "trainer.steps=2", "algorithm.advantage=gae", "critic.lr=0.5").run()
    step = [
        "generating",
        "generate",
        "resting",
        "score",
        "values",
        "criticise",
        "update",
        "criticise",
        "update",
        "sync",
    ]
    assert in_order([e for e in machines.events if e != "save"])[6:16] == step
    for packs, lr in machines.critic.updates:
        assert len(packs) == 1, "packed for the critic's ranks"
        assert lr == 0.5
        for p in packs[0]:
            assert p.columns.returns is not None
            assert p.columns.values is not None
            assert p.columns.advantages is None
    assert all(p.columns.returns is None for packs, _ in machines.policy.updates for own in packs for p in own)
    assert 0 < machines.critic.value < 1
    line = machines.lines[1]
    assert {"critic/loss", "critic/grad_norm", "critic/lr", "critic/explained_variance"} <= set(line)


def test_scores_values_and_updates_are_dealt_by_the_shape_of_the_model(tmp_path, monkeypatch):
    dealt: list[float] = []
    monkeypatch.setattr(packing, "assign_to_ranks", lambda *how: dealt.append(how[3]) or assign_to_ranks(*how))
    Machines(tmp_path, "algorithm.advantage=gae", reference=True).run()
    assert dealt.count(DEFAULT_PAIRS_PER_TOKEN) == 1, "a few samples before the first step, in whatever way"
    assert set(dealt[1:]) == {pairs_per_token("builtin:tiny")}


@pytest.mark.parametrize("share", [True, False])
def test_samples_share_their_prompt_in_a_pack_unless_the_model_computes_it_for_each(tmp_path, share):
    """A mixer's blocks would otherwise hold many more tokens than policy.tokens_per_pack."""
    machines = Machines(tmp_path, "policy.tokens_per_pack=40", share_prompts=share).run()
    packs = [pack for packs, _ in machines.policy.updates for own in packs for pack in own]
    assert any(parent >= 0 for pack in packs for parent in pack.parent) == share
    assert all(len(pack.tokens) <= 40 for pack in packs)


def test_a_critic_may_learn_alone_at_first(tmp_path):
    machines = Machines(tmp_path, "algorithm.advantage=gae", "critic.alone_steps=2").run()
    assert len(machines.critic.updates) == 6
    assert len(machines.policy.updates) == 2
    assert "loss" not in machines.lines[1]
    assert "loss" in machines.lines[3]


def test_the_policy_s_warm_up_begins_when_the_policy_begins(tmp_path):
    options = ["algorithm.advantage=gae", "critic.alone_steps=1", "policy.warmup_updates=4", "policy.lr=1"]
    machines = Machines(tmp_path, *options, "critic.warmup_updates=2", "critic.lr=1").run()
    assert [lr for _, lr in machines.policy.updates] == [0.25, 0.5, 0.75, 1]
    assert [lr for _, lr in machines.critic.updates] == [0.5, 1, 1, 1, 1, 1]


def test_a_critic_that_is_not_finite_stops_the_run_before_a_checkpoint_has_it(tmp_path):
    machines = Machines(tmp_path, "algorithm.advantage=gae", "checkpoint.every=1", "trainer.epochs_per_step=2")
    update = machines.critic.update
    machines.critic.update = lambda packs, lr: (
        update(packs, lr) | {"skipped": float(len(machines.critic.updates) > 4), "first_bad_sample": 3.0}
    )
    with pytest.raises(FloatingPointError, match=r"step 2, update 1: sample 3 of prompt zigzag:.* critic\.lr"):
        machines.run()
    assert [p.name for p in (machines.run_directory.path / "checkpoints").iterdir()] == ["step-000001"]


def test_a_critic_resumes_with_its_policy(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    options = ["trainer.steps=4", "algorithm.advantage=gae", "critic.lr=0.5"]
    whole = Machines(tmp_path / "whole", *options).run()
    killed_while(Machines(tmp_path / "killed", *options), "update", 6)
    again = Machines(tmp_path / "killed", *options).run()
    assert learned(again.lines) == learned(whole.lines)
    assert again.critic.value == whole.critic.value != 0


def test_remax_asks_for_one_greedy_sample_more_and_does_not_train_on_it(tmp_path):
    machines = Machines(tmp_path, "trainer.steps=1", "algorithm.advantage=remax", evals=0).run()
    [requests] = machines.asked
    assert [r.temperature for r in requests] == [1, 1, 1, 1, 0] * 4
    assert machines.lines[1]["tokens"] == 16 * 7
    rewards, advantages = machines.column("step-000001", "reward"), machines.column("step-000001", "advantage")
    greedy = {(s.uid): machines.rewards.verdict(s, p).score for s, p in greedy_samples(machines)}
    for uid, reward, advantage in zip(machines.column("step-000001", "uid"), rewards, advantages, strict=True):
        assert advantage == reward - greedy[uid]


def greedy_samples(machines: Machines):
    prompts = {p.uid: p for p in make_dataset(10).take(0, 4)}
    return [(s, prompts[s.uid]) for s in machines.rewards.seen if s.index == 4]


def test_kl_in_the_reward_needs_old_log_probs_and_leaves_the_loss(tmp_path):
    options = ["trainer.steps=1", "trainer.updates_per_step=1", "reference.kl_coef=0.25", "reference.kl_in=reward"]
    machines = Machines(tmp_path, *options, "algorithm.kl=k1", "algorithm.advantage=raw", reference=True).run()
    assert machines.events.count("score") == 2
    assert all(p.columns.ref is None for packs, _ in machines.policy.updates for own in packs for p in own)
    rewards, advantages = (np.array(machines.column("step-000001", c)) for c in ("reward", "advantage"))
    np.testing.assert_allclose(advantages, rewards - 0.25 * 7 * 0.5, rtol=1e-6)  # the fake reference is 0.5 lower
    assert machines.lines[1]["kl"] == pytest.approx(0.5)


def test_an_adapted_coefficient_moves_towards_the_target_and_survives_a_restart(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    options = ["trainer.steps=4", "reference.kl_coef=0.1", "reference.kl_target=0.01"]
    whole = Machines(tmp_path / "whole", *options, reference=True).run()
    coefs = [line["kl_coef"] for line in whole.lines[1:]]
    assert coefs == pytest.approx([0.1, 0.102, 0.10404, 0.1061208]), "KL is far above: 20 % more in 10 steps"
    assert whole.policy.kl_coefs == pytest.approx([c for c in coefs for _ in range(2)])
    killed_while(Machines(tmp_path / "killed", *options, reference=True), "update", 6)
    again = Machines(tmp_path / "killed", *options, reference=True).run()
    assert [line["kl_coef"] for line in again.lines[1:]] == coefs


def test_the_coefficient_stays_while_the_critic_learns_alone(tmp_path):
    options = ["trainer.steps=4", "reference.kl_coef=0.1", "reference.kl_target=0.01"]
    options += ["reference.kl_in=reward", "algorithm.advantage=gae", "critic.alone_steps=2"]
    machines = Machines(tmp_path, *options, reference=True).run()
    coefs = [line["kl_coef"] for line in machines.lines[1:]]
    assert coefs[:3] == [0.1, 0.1, 0.1]
    assert coefs[3] != 0.1


def test_truncated_samples_can_be_left_out_of_the_loss_but_not_of_the_statistics(tmp_path):
    options = "overlong.mask=true", "trainer.updates_per_step=1", ALL_TEACH
    machines = Machines(tmp_path, "trainer.steps=1", *options, evals=0)
    one = machines.rollout.one
    machines.rollout.one = lambda r, v: replace(one(r, v), finish="length" if r.index == 0 else "stop")
    machines.run()
    [(packs, _)] = machines.policy.updates
    mine = [p for own in packs for p in own]
    assert sorted(s for p in mine for s in p.samples) == [i for i in range(16) if i % 4]
    assert sum(float(p.weights.sum()) for p in mine) == pytest.approx(1.0), "the others weigh one together"
    rewards, advantages = (np.array(machines.column("step-000001", c)).reshape(4, 4) for c in ("reward", "advantage"))
    assert ((advantages > 0) == (rewards > rewards.mean(1, keepdims=True))).all()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_dynamic_sampling_trains_on_groups_that_differ_and_goes_on_behind_what_it_asked_for(tmp_path, lag):
    machines = Machines(tmp_path, *DYNAMIC, f"pipeline.max_lag={lag}", evals=0).run()
    requested = [uid for requests in machines.asked for uid in dict.fromkeys(r.uid for r in requests)]
    stream = [p.uid for p in make_dataset(10).take(0, len(requested))]
    assert list(dict.fromkeys(requested)) == stream[: len(set(requested))], "in order, none left out, some asked again"
    trained = []
    for step in (1, 2, 3):
        rewards = np.array(machines.column(f"step-{step:06d}", "reward")).reshape(4, 4)
        assert (np.ptp(rewards, 1) > 0).all()
        trained += machines.column(f"step-{step:06d}", "uid")[::4]
    dropped = sum(line["groups/dropped"] for line in machines.lines[1:])
    assert trained == [uid for uid in stream if uid in trained]
    assert len(set(trained)) == 12
    assert stream.index(trained[-1]) + 1 == 12 + dropped > 12, "every prompt up to the last was trained on or dropped"


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_dynamic_sampling_killed_goes_on_as_if_it_had_not_been(tmp_path, lag):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    options = ["trainer.steps=5", *DYNAMIC, f"pipeline.max_lag={lag}"]
    whole = Machines(tmp_path / "whole", *options).run()
    killed_while(Machines(tmp_path / "killed", *options), "update", 8)
    again = Machines(tmp_path / "killed", *options).run()
    assert "load" in again.events
    assert learned(again.lines) == learned(whole.lines)
    assert again.policy.weight == whole.policy.weight
    for step in range(1, 6):
        assert again.column(f"step-{step:06d}", "uid") == whole.column(f"step-{step:06d}", "uid")


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_that_finds_nothing_leaves_what_was_learned_before_in_a_checkpoint(tmp_path, lag):
    options = [*DYNAMIC, f"pipeline.max_lag={lag}", "checkpoint.every=0", "trainer.steps=4"]
    machines = Machines(tmp_path, *options, evals=0)
    judge = machines.rewards.judge_one
    machines.rewards.judge_one = lambda facts: (
        judge(facts) if machines.rollout.version == 0 else Verdict(1.0, {"zigzag": 1.0})  # solved at once
    )
    with pytest.raises(NothingToLearn, match="can go on with a larger dynamic_sampling"):
        machines.run()
    done = machines.lines[-1]["step"]
    assert done == 1 + lag, "the batches that were found are trained on"
    again = Machines(tmp_path, *options, "dynamic_sampling.enabled=false", evals=0).run()
    assert "load" in again.events
    assert [line["step"] for line in again.lines] == [0, 1, 2, 3, 4]
    assert len(again.policy.updates) == 2 * (4 - done)


def test_rewards_that_fail_in_an_evaluation_leave_the_step_before_it_in_a_checkpoint(tmp_path):
    options = ["eval.every=2", "checkpoint.every=0", "trainer.steps=3"]
    machines = Machines(tmp_path, *options)
    judge = machines.rewards.judge_one

    def failing(facts):
        return judge(facts) if machines.rollout.version < 2 else Verdict(None, failure="crash", detail="gone")

    machines.rewards.judge_one = failing
    with pytest.raises(TooManyRewardFailures, match="eval 2"):
        machines.run()
    assert [line["step"] for line in machines.lines] == [0, 1, 2]
    again = Machines(tmp_path, *options).run()
    assert "load" in again.events
    assert [line["step"] for line in again.lines] == [0, 1, 2, 3]


def test_the_first_failure_of_each_reason_is_told_once_in_an_evaluation_too(tmp_path):
    machines = Machines(tmp_path, "trainer.steps=2", "reward.max_failure_share=0.95")
    judge = machines.rewards.judge_one
    machines.rewards.judge_one = lambda facts: (
        Verdict(None, failure="exception", detail="f: KeyError: 'x'\nTraceback …")
        if facts["completion"] < "5"
        else judge(facts)
    )
    machines.run()
    assert [n for n in machines.progress.notes if "verdict failed" in n] == [
        "step 0: a reward verdict failed (exception): f: KeyError: 'x'"
    ]
    [event] = [e for e in read_lines(machines.run_directory.path / "events.jsonl") if e["event"] == "reward failure"]
    assert event["detail"].endswith("Traceback …")


def test_failed_verdicts_are_counted_over_the_step_and_not_over_a_round(tmp_path):
    machines = Machines(tmp_path, *DYNAMIC, "trainer.steps=1", "reward.max_failure_share=0.4", evals=0)
    stream = make_dataset(10).take(0, 40)
    machines.rewards.broken = {(p.uid, i) for p in stream[4:6] for i in range(4)}  # a whole small round, perhaps
    machines.run()
    line = machines.lines[1]
    requested = sum(len(requests) for requests in machines.asked)
    assert line["reward/failed"] == 8 <= 0.4 * requested


def test_where_all_verdicts_fail_dynamic_sampling_does_not_look_for_other_prompts(tmp_path):
    machines = Machines(tmp_path, *DYNAMIC, evals=0)
    machines.rewards.judge_one = lambda facts: Verdict(None, failure="exception", detail="f: KeyError: 'x'")
    with pytest.raises(TooManyRewardFailures, match=r"16 of 16 .* The first: exception: f: KeyError: 'x'"):
        machines.run()
    assert len(machines.asked) == 1


def test_a_verdict_that_fails_in_a_group_that_is_dropped_is_told_and_not_written(tmp_path):
    machines = Machines(tmp_path, *DYNAMIC, "trainer.steps=1", "reward.max_failure_share=0.9", evals=0)
    uid = make_dataset(10).take(0, 1)[0].uid
    machines.rewards.broken = {(uid, i) for i in range(4)}
    machines.run()
    assert any("a reward verdict failed (timeout)" in note for note in machines.progress.notes)
    assert machines.lines[1]["reward/failed"] == 4
    assert uid not in machines.column("step-000001", "uid")


def test_dynamic_sampling_that_finds_nothing_stops_the_run_with_a_sentence(tmp_path):
    machines = Machines(tmp_path, "dynamic_sampling.enabled=true", "dynamic_sampling.max_rounds=3", evals=0)
    machines.rewards.judge_one = lambda facts: Verdict(1.0, {"zigzag": 1.0})
    with pytest.raises(NothingToLearn, match=r"0 of 4 groups .* after 3 rounds and 12 prompts"):
        machines.run()
    assert machines.policy.updates == []


# --- failures --------------------------------------------------------------------------------------------------------------


def test_failed_verdicts_leave_the_groups_and_are_counted(tmp_path):
    machines = Machines(tmp_path, "trainer.steps=1", evals=0)
    uid = make_dataset(10).take(0, 4)[2].uid
    machines.rewards.broken = {(uid, 0), (uid, 3)}
    machines.run()
    [_, line] = machines.lines
    assert line["reward/failed"] == line["failure/timeout"] == 2
    assert line["tokens"] == 14 * 7
    kept = zip(*(machines.column("step-000001", name) for name in ("uid", "index", "reward", "failure")), strict=True)
    lost = {index: failure for of, index, reward, failure in kept if of == uid and reward is None}
    assert lost == {0: "timeout", 3: "timeout"}, "kept, without a score"
    assert len(machines.column("step-000001", "uid")) == 16


def test_groups_that_teach_nothing_are_counted_and_not_computed(tmp_path):
    machines = Machines(tmp_path, "trainer.steps=1", "trainer.updates_per_step=4", evals=0).run()
    rewards = np.array(machines.column("step-000001", "reward")).reshape(4, 4)
    teaching = sorted(4 * int(n) for n in np.ptp(rewards, 1) > 0)
    assert set(teaching) == {0, 4}, "groups of both kinds"
    sizes = sorted(sum(len(p.samples) for own in packs for p in own) for packs, _ in machines.policy.updates)
    assert sizes == teaching
    assert machines.lines[1]["update/zero_advantage_samples"] == 16 - sum(teaching)


@pytest.mark.parametrize(
    "options",
    [
        ("trainer.updates_per_step=1",),
        ("trainer.updates_per_step=4", "trainer.epochs_per_step=2"),
        ("trainer.updates_per_step=1", "pipeline.max_lag=2"),
        ("algorithm.anchor=rollout", "trainer.updates_per_step=4"),
    ],
    ids=str,
)
def test_a_kl_term_changes_the_meaning_of_no_metric(tmp_path, options):
    """Without one, groups that teach nothing are not computed; the metrics are of all tokens all the same."""
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    line = Machines(tmp_path / "with", *options, "trainer.steps=1", reference=True).run().lines[1]
    other = Machines(tmp_path / "without", *options, "trainer.steps=1").run().lines[1]
    assert 0 == line["update/zero_advantage_samples"] < other["update/zero_advantage_samples"]
    names = ["entropy", "clip_fraction", "clip_fraction/low", "clip_fraction/high", "mismatch/mean_abs"]
    assert {n: other[n] for n in names} == pytest.approx({n: line[n] for n in names}, abs=1e-6)


def test_engines_that_drift_are_noticed_where_no_sample_teaches(tmp_path):
    machines = Machines(tmp_path, "trainer.updates_per_step=1", evals=0)
    machines.rewards.judge_one = lambda row: Verdict(0.0, {"zigzag": 0.0})
    scored: list[list[int]] = []

    def score(packs):
        scored.append([s for own in packs for p in own for s in p.samples])
        return [[p.rollout + np.float32(0.25 * (len(scored) > 1)) for p in own] for own in packs]

    machines.policy.score = score
    with pytest.raises(Disagreement, match=r"step 1: rollout and old log-probs differ by 0\.25 on average"):
        machines.run()
    assert len(scored[1]) == 4, "a sixteenth of the 16 samples is too few to stop a run"


def test_a_whole_mini_batch_without_verdicts_is_an_empty_update(tmp_path):
    machines = Machines(tmp_path, "trainer.steps=1", "trainer.updates_per_step=4", ALL_TEACH, evals=0)
    machines.rewards.broken = {(make_dataset(10).take(0, 4)[2].uid, i) for i in range(4)}
    machines.run()
    sizes = sorted(sum(len(p.samples) for own in packs for p in own) for packs, _ in machines.policy.updates)
    assert sizes == [0, 4, 4, 4]
    assert machines.lines[1]["groups/all_failed"] == 1


def test_too_many_failures_stop_the_run_before_anything_is_learned(tmp_path):
    machines = Machines(tmp_path, evals=0)
    machines.rewards.broken = {(p.uid, i) for p in make_dataset(10).take(0, 4) for i in range(3)}
    with pytest.raises(TooManyRewardFailures, match="12 of 16"):
        machines.run()
    assert machines.policy.updates == []


def test_an_update_that_is_not_finite_is_skipped_and_counted(tmp_path):
    machines = Machines(tmp_path, "trainer.steps=2", "checkpoint.every=1")
    machines.policy.bad = {2: 5}
    machines.run()
    assert [line["update/skipped"] for line in machines.lines[1:]] == [1, 0]
    assert all(np.isfinite(value) for line in machines.lines for value in line.values())
    [event] = [e for e in read_lines(machines.run_directory.path / "events.jsonl") if e["event"] == "skipped update"]
    fifth = (machines.column("step-000001", "uid")[5], machines.column("step-000001", "index")[5])
    assert event["sample"] == f"sample {fifth[1]} of prompt {fifth[0]}"
    assert (event["step"], event["update"], event["loss"]) == (1, 2, "nan")


def test_too_many_such_updates_in_a_row_stop_the_run_and_name_the_first_sample(tmp_path):
    machines = Machines(tmp_path, "trainer.steps=4")
    machines.policy.bad = {1: 0, 3: 9, 4: 2, 5: 0, 6: 1}  # the second update is good
    with pytest.raises(
        FloatingPointError, match=r"4 updates in a row .*; 3 may be\. It began at step 2, update 1: sample 1 of prompt"
    ):
        machines.run()
    assert machines.rollout.version == 2
    assert [line["step"] for line in machines.lines] == [0, 1, 2]
    assert len(machines.column("step-000003", "uid")) == 16, "the samples can be looked at"


def test_a_row_of_skipped_updates_goes_on_behind_a_restart(tmp_path):
    machines = Machines(tmp_path, "checkpoint.every=1")
    machines.policy.bad = {1: 0, 2: 0}
    killed_while(machines, "update", 3)
    again = Machines(tmp_path, "checkpoint.every=1")
    again.policy.bad = {1: 0, 2: 0}
    with pytest.raises(FloatingPointError, match=r"4 updates in a row .* began at step 1, update 1"):
        again.run()


def test_engines_that_disagree_with_the_policy_stop_the_run_before_the_first_step(tmp_path):
    machines = Machines(tmp_path)
    machines.policy.synced = 0.5
    machines.policy.sync = lambda version: None
    with pytest.raises(Disagreement, match=r"mean 0\.5, largest 0\.5 over 56 tokens; the mean may be 0\.001"):
        machines.run()
    assert machines.policy.updates == []


def test_a_run_that_drifts_is_stopped(tmp_path):
    machines = Machines(tmp_path, "trainer.updates_per_step=1", "trainer.max_mismatch=0.25", "checkpoint.every=1")
    sync = machines.policy.sync

    def late(version: int) -> None:
        sync(version)
        machines.policy.synced -= 0.3 * (version == 1)

    machines.policy.sync = late
    with pytest.raises(Disagreement, match=r"step 2: .* differ by 0\.3 on average, more than trainer\.max_mismatch"):
        machines.run()
    assert [line["step"] for line in machines.lines] == [0, 1]


@pytest.mark.parametrize("prompts", [1, 4])
def test_one_odd_sample_does_not_stand_for_all_that_an_update_leaves_out(tmp_path, prompts):
    """All rewards are equal, so that no sample is computed. One of each group is 1 off, which is 0.25 on average."""
    options = ["trainer.updates_per_step=1", "trainer.max_mismatch=0.6", f"trainer.prompts_per_step={prompts}"]
    machines = Machines(tmp_path, *options, evals=0)
    machines.rewards.judge_one = lambda row: Verdict(0.0, {"zigzag": 0.0})
    scored: list[list[int]] = []

    def score(packs):
        scored.append(sorted(m for own in packs for p in own for m in p.samples))
        odd = [[np.float32([m % 4 == 0 for m in p.samples] or [0])[p.sequences] for p in own] for own in packs]
        return [
            [p.rollout + gap for p, gap in zip(own, gaps, strict=True)] for own, gaps in zip(packs, odd, strict=True)
        ]

    machines.trainer.check_agreement = lambda: None
    machines.policy.score = score
    machines.run()
    assert [line["update/zero_advantage_samples"] for line in machines.lines[1:]] == [4 * prompts] * 3
    assert [len(samples) for samples in scored] == [4, 4, 4]
    if prompts == 1:
        assert [line["mismatch/mean_abs"] for line in machines.lines[1:]] == [0.25] * 3, "all are scored"


def test_log_probs_of_engines_that_are_no_numbers_stop_a_run(tmp_path):
    machines = Machines(tmp_path, "trainer.updates_per_step=1", evals=0)
    one = machines.rollout.one

    def without(request, version):
        sample = one(request, version)
        return replace(sample, logprobs=sample.logprobs * np.nan)

    machines.trainer.check_agreement = lambda: None  # the start was fine
    machines.rollout.one = without
    with pytest.raises(Disagreement, match=r"step 1: .* differ by nan on average"):
        machines.run()


# --- one step ahead --------------------------------------------------------------------------------------------------------


def test_one_step_ahead_trains_batches_one_version_old(tmp_path):
    machines = Machines(tmp_path, "pipeline.max_lag=1", "trainer.steps=4").run()
    assert [line["lag"] for line in machines.lines[1:]] == [0, 1, 1, 1]
    assert machines.column("step-000001", "version") == [0] * 16
    assert machines.column("step-000003", "version") == [1] * 16
    assert len(machines.policy.updates) == 8


def test_one_step_ahead_repeats_exactly(tmp_path):
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        runs.append(Machines(tmp_path / name, "pipeline.max_lag=1", "trainer.steps=4").run())
    assert learned(runs[0].lines) == learned(runs[1].lines)
    assert runs[0].policy.weight == runs[1].policy.weight
