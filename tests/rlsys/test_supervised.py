"""Supervised training: the loop takes rows in place of samples, and needs engines only where an evaluation samples."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import CODE, FakePolicy, make_dataset
from machines import Machines, killed_while, learned, stopped_while

from rlsys.checks import check
from rlsys.config.derived import has_engines
from rlsys.config.loading import load_config
from rlsys.types import Demonstration, Observation

NLL = [
    *("algorithm.loss=nll", "trainer.samples_per_prompt=1", "trainer.prompts_per_step=4", "trainer.steps=5"),
    *("eval.datasets={easy: {path: 'builtin:copy_heldout'}}", "eval.samples=0", "data.train=builtin:copy"),
]


def shown_dataset(count=12, **options):
    """Each row shows the digits of its prompt, sorted; every other one in two turns."""
    dataset = make_dataset(count, **options)
    return type(dataset)([replace(p, demonstration=show(i, p)) for i, p in enumerate(dataset.prompts)])


def show(i, prompt):
    tokens = np.array([*sorted(prompt.tokens[:-1]), CODE["<eos>"]], dtype=np.int32)
    said = Observation(3, np.array([CODE[">"], CODE["<eos>"]], dtype=np.int32))
    return Demonstration("sorted", tokens, (said,) if i % 2 else ())


class LearningPolicy(FakePolicy):
    """Its weight follows from every target that it learned. A token's log-prob is minus its number, less the weight."""

    def score(self, packs):
        self.events.append("score")
        return [[-p.targets.astype(np.float32) - np.float32(self.weight) for p in own] for own in packs]

    def update(self, packs, lr, kl_coef):
        done = super().update(packs, lr, kl_coef)
        self.weight += lr * sum(
            float((p.weights * p.columns.advantages * p.targets).sum()) for own in packs for p in own
        )
        return done


def machines(folder, *options, **more):
    return Machines(folder, *NLL, *options, policy=LearningPolicy, make_rows=shown_dataset, samples=0, **more)


def test_rows_are_learned_without_engines_and_rewards(tmp_path):
    run = machines(tmp_path).run()
    assert {"generate", "sync", "generating"}.isdisjoint(run.events)
    assert not run.rewards.seen
    assert [line["step"] for line in run.lines] == [0, 1, 2, 3, 4, 5]
    targets = [p.targets.tolist() for packs, _ in run.policy.updates[:2] for own in packs for p in own]
    assert sum(map(len, targets)) == 4 * 7
    shown = run.trainer.batches.take(0, 4)
    assert sorted(t for pack in targets for t in pack) == sorted(t for p in shown for t in p.demonstration.tokens)
    for packs, _ in run.policy.updates:
        weights = np.concatenate([p.weights for own in packs for p in own])
        assert weights.tolist() == pytest.approx([1 / 14] * 14), "a mean over the tokens of a mini-batch"
        assert all((p.columns.advantages == 1).all() and p.columns.old is None for own in packs for p in own)


def test_metrics_have_losses_and_nothing_about_samples(tmp_path):
    run = machines(tmp_path, evals=2).run()
    first, *_, last = run.lines
    numbers = [t for p in shown_dataset(6).prompts for t in p.demonstration.tokens.tolist()]
    assert first == {name: pytest.approx(np.mean(numbers)) for name in first if name != "step"} | {"step": 0}
    assert set(first) == {"step", "eval/easy/loss", "eval/hard/loss", "eval/all/loss"}
    assert last["eval/easy/loss"] == pytest.approx(np.mean(numbers) + run.policy.weight)
    assert {"loss", "grad_norm", "lr", "tokens", "length/mean", "length/max", "time/step"} <= set(last)
    assert not [
        name for name in last if name.startswith(("reward", "entropy", "mismatch", "clip", "lag", "kl", "groups"))
    ]


def test_the_samples_of_a_step_are_its_rows_and_nobody_judged_them(tmp_path):
    run = machines(tmp_path).run()
    assert run.column("step-000001", "reward") == run.column("step-000001", "rollout_logprobs") == [None] * 4
    assert run.column("step-000001", "completion") == ["sorted"] * 4
    assert len(run.column("step-000001", "observations")) == 4


@pytest.mark.parametrize(
    ("moment", "count", "left"), [("update", 3, 0), ("update", 6, 2), ("save", 2, 2), ("update", 9, 4)]
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path, moment, count, left):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = machines(tmp_path / "whole").run()
    killed_while(machines(tmp_path / "killed"), moment, count)
    again = machines(tmp_path / "killed").run()
    assert len(again.policy.updates) == 2 * (5 - left)
    assert learned(again.lines) == learned(whole.lines)
    assert again.policy.weight == whole.policy.weight != 0


def test_a_stop_saves_every_finished_step(tmp_path):
    run = machines(tmp_path)
    assert stopped_while(run, "update", 5, grace_s=30.0) == 3
    again = machines(tmp_path).run()
    assert len(again.policy.updates) == 4


def test_a_set_that_is_sampled_gets_the_weights_and_a_score(tmp_path):
    run = Machines(
        tmp_path, *NLL, "eval.samples=1", "trainer.max_mismatch=99", policy=LearningPolicy, make_rows=shown_dataset
    ).run()
    assert run.events.count("generate") == 1 + 4, "to compare log-probs, and for the steps 0, 2, 4 and 5"
    assert run.events.count("sync") == 1 + 3
    assert "eval/easy/accuracy" in run.lines[-1]
    assert "eval/easy/loss" not in run.lines[-1]


# --- the configuration -----------------------------------------------------------------------------------------------------


def loaded(tmp_path, *options):
    (tmp_path / "a.yaml").write_text("rollout: {max_new_tokens: 10}\n")
    return load_config(tmp_path / "a.yaml", [*NLL, *options])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], False),
        (["eval.datasets={}", "eval.samples=1"], False),
        (["eval.samples=1"], True),
        (["eval.datasets={a: {path: 'builtin:copy_heldout', samples: 2}}"], True),
    ],
)
def test_engines_start_only_if_an_evaluation_samples(tmp_path, options, expected):
    assert has_engines(loaded(tmp_path, *options)) is expected


@pytest.mark.parametrize(
    ("option", "part"),
    [
        ("trainer.samples_per_prompt=4", "a row has one. Use 1."),
        ("rollout.temperature=0.7", "rollout.temperature is 0.7"),
        ("algorithm.advantage=gae", "algorithm.advantage gae is for completions that were sampled"),
        ("algorithm.anchor=rollout", "algorithm.anchor rollout is for"),
        ("correction.method=tis", "correction.method is for"),
        ("entropy.control=clip_cov", "entropy.control is for"),
        ("overlong.mask=true", "overlong.mask is for"),
        ("dynamic_sampling.enabled=true", "dynamic_sampling.enabled is for"),
        ("pipeline.max_lag=1", "pipeline.max_lag is for"),
        ("episode.tools=[python]", "episodes is for"),
    ],
)
def test_what_is_for_sampled_completions_is_refused(tmp_path, option, part):
    assert check(loaded(tmp_path)) == []
    assert any(part in problem for problem in check(loaded(tmp_path, option)))


def test_only_supervised_training_may_evaluate_without_samples(tmp_path):
    problems = check(loaded(tmp_path, "algorithm.loss=ppo_clip", "trainer.samples_per_prompt=2"))
    assert problems == ["eval.samples is 0; it must be a whole number greater than 0."]
