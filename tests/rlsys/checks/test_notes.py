"""Choices that are probably not meant are named at the start of a run, and others are not."""

import re

import pytest

from rlsys.checks.notes import find_notes
from rlsys.config.loading import load_config

CASES = [  # named; what makes it right
    ("algorithm.loss=sapo algorithm.normalize=token_mean", "algorithm.normalize=auto", "sapo was published with"),
    ("algorithm.loss=dcpo algorithm.normalize=sequence_sum", "algorithm.normalize=auto", "dcpo was published with"),
    ("algorithm.advantage=dr_grpo", "algorithm.normalize=constant", "Dr. GRPO's paper has constant"),
    ("algorithm.normalize=decoupled", "algorithm.control_tokens.a=1", "of weight 0.001"),
    ("algorithm.normalize=decoupled", "algorithm.control_weight=0.25", "of weight 0.001"),
    (
        "algorithm={advantage: dr_grpo, control_tokens: {a: 1}} algorithm.normalize=sequence_mean",
        "algorithm.normalize=decoupled",
        "Dr. GRPO's paper has constant",
    ),
    ("reference.kl_coef=1 reference.kl_in=reward algorithm.kl=k3", "algorithm.kl=k1", "k3 in the reward"),
    ("algorithm.std=none algorithm.eps=0.01", "algorithm.std=sample", "eps 0.01: without effect"),
    (
        "reward={per_token: true, functions: {json:f: 1}}",
        "reward.functions={exact: 1}",
        "where json:f makes a reward neg",
    ),
    ("reward={per_token: true, functions: {repetition: 1}}", "reward.per_token=false", "where repetition makes"),
    (
        "reward={per_token: true, functions: {exact: -1, length: {at_most: 5}}}",
        "reward.functions={exact: 1}",
        "where exact",
    ),
    (
        "reward={per_token: true, on_failure: 'score: -1'}",
        "reward.on_failure=drop",
        "where reward.on_failure score: -1",
    ),
    ("reward.per_token=true overlong.buffer=3", "overlong.buffer=0", "where overlong.penalty makes"),
    ("reward.per_token=true episode.play=json:f", "episode.play=", "where an episode's own score makes"),
    ("episode.tool_parser=hy_v4", "episode.tool_parser=hermes", "the last call is not made, even if it is whole"),
    ("policy.warmup_updates=999 trainer.steps=5", "policy.warmup_updates=2", "has 5 updates"),
    ("critic.warmup_updates=6 trainer.steps=5 algorithm.advantage=gae", "trainer.steps=6", "never reaches critic.lr"),
    (
        "policy.warmup_updates=4 critic.alone_steps=2 trainer.steps=5 algorithm.advantage=gae",
        "trainer.steps=6",
        "policy.warmup_updates 4: the run has 3 updates",
    ),
]


@pytest.mark.parametrize(("options", "right", "note"), CASES)
def test_a_choice_is_noted_until_it_is_right(tmp_path, options, right, note):
    (tmp_path / "base.yaml").write_text("model: {path: builtin:tiny}\n")
    find = lambda *overrides: list(find_notes(load_config(tmp_path / "base.yaml", overrides)))  # noqa: E731
    assert find() == []
    overrides = re.split(" (?=[a-z_.]+=)", options)
    (sentence,) = find(*overrides)
    assert note in sentence
    assert find(*overrides, right) == []
