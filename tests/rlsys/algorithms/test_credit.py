from dataclasses import replace

import numpy as np
import plain
import pytest
from fakes import make_batch, make_config

from rlsys.algorithms.credit import CreditAssignment
from rlsys.errors import ConfigError
from rlsys.metrics import credit_metrics
from rlsys.rewards.episode_verdict import add_own_verdict
from rlsys.types import Columns, Episode, Verdict


@pytest.fixture
def credit(tmp_path):
    """`credit(batch, columns, "key=value", ...)` assigns credit with these overrides; max_new_tokens is 7."""

    def assign(batch, columns=None, *overrides, kl_coef=0.5, step=1):
        return CreditAssignment(make_config(tmp_path, *overrides))(step, batch, columns or Columns(), kl_coef)

    return assign


def floats(*values):
    return np.array(values, dtype=np.float32)


def test_every_token_gets_its_sample_s_advantage(credit):
    credited = credit(make_batch([1, 0], [0, 0], lengths=[1, 3]), None, "algorithm.advantage=dr_grpo")
    assert credited.columns.advantages.tolist() == [0.5, -0.5, -0.5, -0.5]
    assert credited.advantages.tolist() == [0.5, -0.5]
    assert credited.kl is None
    assert credited.length_penalty == 0


def test_the_estimator_gets_its_options(credit):
    batch = make_batch([1, 0], [0, 0], lengths=[1, 1])
    credited = credit(batch, None, "algorithm.std=population", "algorithm.eps=1").advantages
    assert credited.tolist() == pytest.approx([1 / 3, -1 / 3]), "0.5 over 0.5 + 1"
    assert credit(batch, None, "algorithm.std=none").advantages.tolist() == [0.5, -0.5]


def test_opo_gets_the_lengths_and_remax_the_greedy_rewards(credit):
    batch = make_batch([1, 0, 1], [0, 0, 1], lengths=[3, 1, 2])
    assert credit(batch, None, "algorithm.advantage=opo").advantages.tolist() == [0.25, -0.75, 0]
    greedy = replace(batch, greedy=floats(0.25, np.nan))
    assert credit(greedy, None, "algorithm.advantage=remax").advantages.tolist() == [0.75, -0.25, 0]


def test_reinforce_pp_gets_the_lengths(credit):
    batch = make_batch([1, 0, 1], [0, 1, 2], lengths=[3, 1, 2])
    options = ["algorithm.advantage=reinforce_pp", "algorithm.std=none"]
    assert credit(batch, None, *options).advantages.tolist() == pytest.approx([1 / 6, -5 / 6, 1 / 6])
    over_samples = credit(batch, None, *options, "algorithm.whiten_over=samples").advantages
    assert over_samples.tolist() == pytest.approx([1 / 3, -2 / 3, 1 / 3])


def test_the_length_penalty_is_applied_before_samples_are_compared(credit):
    """At most seven tokens, of which the last four are the buffer."""
    batch = make_batch([1, 1, 1], [0, 0, 0], lengths=[3, 5, 7])
    options = ["algorithm.advantage=raw", "overlong.buffer=4", "overlong.penalty=2"]
    credited = credit(batch, None, *options)
    assert credited.advantages.tolist() == [1, 0, -1]
    assert credited.length_penalty == -1


def test_the_length_penalty_counts_from_a_data_sets_own_limit(credit):
    """The first prompt's completions have at most seven tokens, the second's at most five."""
    batch = make_batch([1, 1, 1, 1], [0, 0, 1, 1], lengths=[3, 5, 3, 5])
    batch = replace(batch, prompts=[batch.prompts[0], replace(batch.prompts[1], max_new_tokens=5)])
    options = ["algorithm.advantage=raw", "overlong.buffer=4"]
    assert credit(batch, None, *options).advantages.tolist() == [1, 1 - 2 / 4, 1 - 2 / 4, 0]


def test_kl_in_the_reward_lowers_the_reward_and_leaves_the_loss_alone(credit):
    batch = make_batch([1, 0], [0, 0], lengths=[2, 1])
    columns = Columns(old=floats(-1, -2, -3), ref=floats(-1.5, -1.0, -3.0))
    credited = credit(
        batch, columns, "algorithm.advantage=raw", "algorithm.kl=k1", "reference.kl_in=reward", "reference.kl_coef=0.5"
    )
    assert credited.advantages.tolist() == [1.25, 0], (
        "k1 is 0.5 - 1.0 for the first and 0 for the second; coefficient 0.5"
    )
    assert credited.kl == pytest.approx(-0.5 / 3)
    assert credited.columns.ref is None
    in_loss = credit(batch, columns, "algorithm.advantage=raw", "algorithm.kl=k1")
    assert in_loss.advantages.tolist() == [1, 0]
    assert in_loss.columns.ref is columns.ref
    assert in_loss.kl is None


@pytest.mark.parametrize("std", ["sample", "population", "none"])
def test_rewards_per_token_are_divided_before_mean_and_deviation(credit, std):
    rewards, groups, lengths = [1.0, 1.0, 0.0, 3.0, 1.0, -1.0], [0, 0, 0, 1, 1, 1], [2, 7, 4, 6, 0, 5]
    divided = [r / length if length else r for r, length in zip(rewards, lengths, strict=True)]
    batch = make_batch(rewards, groups, lengths=lengths)
    credited = credit(batch, None, "reward.per_token=true", f"algorithm.std={std}")
    assert credited.advantages[lengths.index(0)] == 0, "no token has its advantage"
    expected = [a if length else 0 for a, length in zip(plain.grpo(divided, groups, std=std), lengths, strict=True)]
    assert credited.advantages.tolist() == pytest.approx(expected, abs=1e-5)


def test_penalties_are_divided_with_the_reward(credit):
    """Of at most seven tokens, the last four are the buffer; KL costs 0.5 per token of difference."""
    batch = make_batch([1, 1], [0, 1], lengths=[5, 2])
    columns = Columns(old=floats(0, 0, 0, 0, 0, 1, 0), ref=floats(0, 0, 0, 0, 0, 0, 0))
    options = ["algorithm.advantage=raw", "overlong.buffer=4", "reference.kl_in=reward", "reference.kl_coef=0.5"]
    credited = credit(batch, columns, *options, "reward.per_token=true")
    assert credited.advantages.tolist() == pytest.approx([(1 - 2 / 4) / 5, (1 - 0.5) / 2])


def test_per_token_divides_each_component_for_gdpo(credit, tmp_path):
    """Divided, the second components are 1 and 1, and say nothing; the first are 0 and 1/2."""
    (tmp_path / "mine.py").write_text("def form(completion): return 1.0\n")
    components = [{"zigzag": 0.0, "form": 4.0}, {"zigzag": 1.0, "form": 2.0}]
    batch = replace(make_batch([4, 3], [0, 0], lengths=[4, 2]), components=components)
    options = ["algorithm.advantage=gdpo", "algorithm.std=population", "algorithm.whiten=false"]
    functions = f"reward.functions={{zigzag: 1.0, {tmp_path}/mine.py:form: 1.0}}"
    credited = credit(batch, None, *options, functions, "reward.per_token=true")
    assert credited.advantages.tolist() == pytest.approx([-1, 1], abs=1e-4)


def begin_with(batch, *tokens):
    samples = [replace(s, tokens=np.array([t, *s.tokens[1:]])) for s, t in zip(batch.samples, tokens, strict=True)]
    return replace(batch, samples=samples)


def test_a_control_token_decides_what_a_right_answer_is_worth(tmp_path):
    """1 after 20, 1/2 after 21, -1 if wrong or without either; the length penalty goes off as usual."""
    batch = begin_with(make_batch([1, 1, 0, 0, 1], [0] * 5, lengths=[3, 3, 3, 7, 2]), 20, 21, 20, 21, 5)
    options = ["algorithm.advantage=raw", "overlong.buffer=4"]
    assign = CreditAssignment(make_config(tmp_path, *options), {20: 1.0, 21: 0.5})
    assert assign(1, batch, Columns(), 0.0).advantages.tolist() == [1, 0.5, -1, -2, -1]
    assert CreditAssignment(make_config(tmp_path, *options))(1, batch, Columns(), 0.0).advantages[1] == 1


def test_an_empty_completion_begins_with_no_control_token(tmp_path):
    batch = make_batch([1], [0], lengths=[0])
    assert batch.first_tokens == [-1]
    assign = CreditAssignment(make_config(tmp_path, "algorithm.advantage=raw"), {20: 1.0})
    assert assign(1, batch, Columns(), 0.0).columns.advantages.tolist() == []


@pytest.mark.parametrize("score", [-1.0, -0.01, 1.5])
def test_a_mode_takes_scores_from_wrong_to_right_only(tmp_path, score):
    """With -1 for a wrong answer, a completion without a control token would be the best of the wrong ones."""
    batch = begin_with(make_batch([1, score], [0, 0]), 20, 20)
    assign = CreditAssignment(make_config(tmp_path), {20: 1.0})
    with pytest.raises(ConfigError, match=rf"scores from 0 \(wrong\) to 1 \(right\); one is {score:g}\. Change"):
        assign(1, batch, Columns(), 0.0)


def test_gdpo_standardizes_each_component_and_weights_it(credit, tmp_path):
    (tmp_path / "mine.py").write_text("def form(completion): return {'a': 1.0, 'b': 2.0}\n")
    batch = replace(
        make_batch([0, 0], [0, 0], lengths=[1, 1]),
        components=[{"zigzag": 1.0, "form/a": 0.0}, {"zigzag": 0.0, "form/a": 100.0}],
    )
    weights = f"{{zigzag: 2.0, {tmp_path}/mine.py:form: 0.5}}"
    options = ["algorithm.advantage=gdpo", "algorithm.std=population", "algorithm.whiten=false"]
    credited = credit(batch, None, *options, f"reward.functions={weights}")
    assert credited.advantages.tolist() == pytest.approx([1.5, -1.5], abs=1e-5), (
        "2 * 1 + 0.5 * -1, however large the second part is"
    )


def test_for_gdpo_the_length_penalty_is_a_component_with_its_own_weight(credit):
    batch = replace(make_batch([1, 1], [0, 0], lengths=[3, 7]), components=[{"zigzag": 1.0}, {"zigzag": 1.0}])
    options = ["algorithm.advantage=gdpo", "algorithm.std=population", "algorithm.whiten=false", "overlong.buffer=4"]
    for penalty in (0.25, 2.0):
        credited = credit(batch, None, *options, f"overlong.penalty={penalty}").advantages
        assert credited.tolist() == pytest.approx([penalty, -penalty], abs=1e-4)


def test_max_rl_refuses_negative_rewards(credit):
    with pytest.raises(ConfigError, match="max_rl is for rewards of 0 or more; one is -1"):
        credit(make_batch([1, -1], [0, 0]), None, "algorithm.advantage=max_rl")


def test_a_users_estimator_gets_the_options_it_names_and_no_others(credit, tmp_path):
    (tmp_path / "mine.py").write_text("def f(rewards, groups, eps=0.5, *, lengths): return rewards * eps + lengths\n")
    (tmp_path / "plain.py").write_text("def f(rewards, groups): return rewards\n")
    batch = make_batch([1, 0], [0, 0], lengths=[1, 3])
    assert credit(batch, None, f"algorithm.advantage={tmp_path}/mine.py:f").advantages.tolist() == [1.5, 3]
    set_ = credit(batch, None, f"algorithm.advantage={tmp_path}/mine.py:f", "algorithm.eps=2")
    assert set_.advantages.tolist() == [3, 3]
    assert credit(batch, None, f"algorithm.advantage={tmp_path}/plain.py:f").advantages.tolist() == [1, 0]
    with pytest.raises(ConfigError, match=r"algorithm\.std is none, but .* it has eps, lengths"):
        credit(batch, None, f"algorithm.advantage={tmp_path}/mine.py:f", "algorithm.std=none")


@pytest.mark.parametrize(
    ("result", "returned"),
    [("rewards.mean()", r"a tensor \[\]"), ("rewards[:, None]", r"a tensor \[2, 1\]"), ("rewards.tolist()", "a list")],
)
def test_a_users_estimator_returns_one_number_per_sample(credit, tmp_path, result, returned):
    (tmp_path / "mine.py").write_text(f"def f(rewards, groups): return {result}\n")
    for unit, option in (("sample", "episode"), ("turn", "turn")):
        with pytest.raises(ConfigError, match=f"algorithm.advantage: the function returned {returned} for 2 {unit}s;"):
            credit(
                make_batch([1, 0], [0, 0]),
                None,
                f"algorithm.advantage={tmp_path}/mine.py:f",
                f"algorithm.credit={option}",
            )


def test_gdpo_refuses_samples_with_different_components(credit):
    batch = replace(make_batch([0, 0], [0, 0]), components=[{"zigzag": 1.0}, {"form": 1.0}])
    with pytest.raises(ConfigError, match="one has zigzag, another form"):
        credit(batch, None, "algorithm.advantage=gdpo")


def test_gae_gives_the_reward_to_the_last_token_and_the_kl_to_each_token(credit):
    batch = make_batch([1, 0], [0, 0], lengths=[2, 1])
    columns = Columns(old=floats(-1, -2, -3), ref=floats(-1.5, -1.0, -3.0), values=floats(0.5, 0.25, 0.75))
    options = [
        "algorithm.advantage=gae",
        "algorithm.kl=k1",
        "reference.kl_in=reward",
        "reference.kl_coef=0.5",
        "algorithm.whiten=false",
    ]
    credited = credit(batch, columns, *options)
    # Token rewards are -0.25 and 0.5 + 1 for the first, 0 for the second; returns are 1.25, 1.5 and 0.
    assert credited.columns.returns.tolist() == [1.25, 1.5, 0]
    assert credited.columns.advantages.tolist() == [0.75, 1.25, -0.75]
    assert credited.advantages.tolist() == [1, -0.75], "the mean over a sample's tokens"
    whitened = credit(batch, columns, *options[:-1]).columns.advantages
    assert whitened.mean() == pytest.approx(0, abs=1e-6)
    assert whitened.std(ddof=1) == pytest.approx(1)


@pytest.mark.parametrize("limit", ["length", "turns", "tokens", "window"])
def test_gae_gives_truncated_completions_no_value_behind_their_end(credit, limit):
    batch = make_batch([1, 1, 0], [0, 0, 0], lengths=[2, 1, 1])
    ends = [limit, "stop", limit]
    batch = replace(batch, samples=[replace(s, finish=end) for s, end in zip(batch.samples, ends, strict=True)])
    columns = Columns(old=floats(0, 0, 0, 0), values=floats(0.5, 0.25, 0.25, 0.75))
    options = ["algorithm.advantage=gae", "algorithm.whiten=false"]
    assert credit(batch, columns, *options).columns.returns.tolist() == [1, 1, 1, 0]


def test_clip_cov_sets_the_advantage_of_dropped_tokens_to_0(credit):
    batch = make_batch([1, 0], [0, 0], lengths=[2, 2])
    columns = Columns(old=floats(0, -4, -4, 0))
    options = ["algorithm.advantage=dr_grpo", "entropy.control=clip_cov", "entropy.share=0.25"]
    credited = credit(batch, columns, *options).columns.advantages.tolist()
    assert sorted(credited) in ([-0.5, -0.5, 0, 0.5], [-0.5, 0, 0.5, 0.5]), "one of four, of covariance 1"
    assert credited[1] == 0.5
    assert credited[3] == -0.5, "covariance -1: not a candidate"
    again = credit(batch, columns, *options).columns.advantages.tolist()
    assert again == credited


def test_kl_cov_holds_the_tokens_of_largest_covariance(credit):
    batch = make_batch([1, 0], [0, 0], lengths=[2, 2])
    columns = Columns(old=floats(0, -4, -3, 0))
    credited = credit(batch, columns, "entropy.control=kl_cov", "entropy.share=0.25").columns
    assert credited.old_kl_coef.tolist() == [1, 0, 0, 0]
    assert (credited.advantages != 0).all()


def test_the_share_of_tokens_under_entropy_control_is_reported(credit):
    batch, columns = make_batch([1, 0], [0, 0], lengths=[2, 2]), Columns(old=floats(0, -4, -3, 0))
    assert credit(batch, columns).controlled is None
    kl_cov = credit(batch, columns, "entropy.control=kl_cov", "entropy.share=0.5")
    assert (kl_cov.controlled, credit_metrics(kl_cov)["entropy/controlled"]) == (0.5, 0.5)
    alike = make_batch([1, 1], [0, 0], lengths=[2, 2])
    assert credit(alike, columns, "entropy.control=clip_cov").controlled == 0, "no covariance from 1 to 5"


def test_shuffling_gives_samples_the_rewards_of_others(credit):
    batch = make_batch(list(range(20)), [0] * 20, lengths=[1] * 20)
    options = ["algorithm.advantage=raw", "reward.shuffle=true"]
    credited = credit(batch, None, *options).advantages.tolist()
    assert credited != batch.rewards.tolist()
    assert sorted(credited) == batch.rewards.tolist()
    assert credit(batch, None, *options).advantages.tolist() == credited
    assert credit(batch, None, *options, step=2).advantages.tolist() != credited


GDPO = ["algorithm.advantage=gdpo", "algorithm.std=population", "algorithm.whiten=false"]


def play_batch(tmp_path, verdicts, groups, finish=None):
    """A batch of episodes, with the rewards that the player, the reward pool and the collector make of these verdicts."""
    (tmp_path / "game.py").write_text("async def play(row, ask): ...\n")
    batch = make_batch([0.0] * len(verdicts), groups, lengths=[1] * len(verdicts))
    samples = [
        replace(sample, finish=why, episode=Episode(verdict, [], []))
        for sample, verdict, why in zip(batch.samples, verdicts, finish or ["stop"] * len(verdicts), strict=True)
    ]
    judged = [add_own_verdict(sample, Verdict(0.0)) for sample in samples]
    assert not any(v.failure for v in judged)
    rewards = floats(*(v.score for v in judged))
    return replace(batch, samples=samples, rewards=rewards, components=[v.components for v in judged])


def test_gdpo_compares_what_episodes_return_and_the_scores_of_their_turns(credit, tmp_path):
    """Each component has -1 and 1 in its group. A component that only one episode has is 0 for the other."""
    verdicts = [
        Verdict(0.1, {"play/near": 0.1, "play/solved": 0.0}),
        Verdict(5.2, {"play/near": 0.2, "play/solved": 1.0, "turns": 4.0}),
        Verdict(0.3, {"play/near": 0.3, "play/solved": 0.0}),
        Verdict(0.1, {"play/near": 0.1, "play/solved": 0.0}),
    ]
    batch = play_batch(tmp_path, verdicts, [0, 0, 1, 1])
    options = [*GDPO, f"episode={{play: '{tmp_path}/game.py:play'}}", "reward.functions={}"]
    assert credit(batch, None, *options).advantages.tolist() == pytest.approx([-3, 3, 1, -1], abs=1e-3)


def test_for_gdpo_an_episode_that_ends_at_a_limit_has_0_of_every_component(credit, tmp_path):
    play, function = f"episode={{play: '{tmp_path}/game.py:play'}}", "reward.functions={}"
    won, over = Verdict(1.0, {"play": 1.0}), None
    batch = play_batch(tmp_path, [over, won], [0, 0], finish=["turns", "stop"])
    assert credit(batch, None, *GDPO, play, function).advantages.tolist() == pytest.approx([-1, 1], abs=1e-3)
    batch = play_batch(tmp_path, [won, over], [0, 0], finish=["stop", "window"])
    assert credit(batch, None, *GDPO, play, function).advantages.tolist() == pytest.approx([1, -1], abs=1e-3)
    batch = play_batch(tmp_path, [over, over], [0, 0], finish=["tokens", "turns"])
    assert credit(batch, None, *GDPO, play, function).advantages.tolist() == [0, 0]


def test_gdpo_weighs_reward_functions_beside_episodes_and_refuses_one_name_for_both(credit, tmp_path):
    batch = play_batch(tmp_path, [Verdict(0.0, {"play": 0.0}), Verdict(9.0, {"play": 9.0})], [0, 0])
    components = [{"play": 0.0, "zigzag": 1.0}, {"play": 9.0, "zigzag": 0.5}]
    options = [*GDPO, f"episode={{play: '{tmp_path}/game.py:play'}}", "reward.functions={zigzag: 3.0}"]
    credited = credit(replace(batch, components=components), None, *options)
    assert credited.advantages.tolist() == pytest.approx([2, -2], abs=1e-3), "3 * 1 - 1"
    (tmp_path / "mine.py").write_text("def play(completion): return 1.0\n")
    with pytest.raises(
        ConfigError, match=r"`play` of reward\.functions has the name of what `.*game\.py:play` returns"
    ):
        credit(batch, None, *options[:-1], f"reward.functions={{{tmp_path}/mine.py:play: 1.0}}")
