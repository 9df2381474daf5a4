from dataclasses import replace

import numpy as np
import pytest
from fakes import make_batch, make_config

from rlsys.algorithms.credit import CreditAssignment
from rlsys.config.schema import ConfigError
from rlsys.types import Columns


@pytest.fixture
def credit(tmp_path):
    """`credit(batch, columns, "key=value", ...)` for a configuration with these overrides; max_new_tokens is 7."""

    def assign(batch, columns=None, *overrides, kl_coef=0.5, step=1):
        return CreditAssignment(make_config(tmp_path, *overrides))(step, batch, columns or Columns(), kl_coef)

    return assign


def floats(*values):
    return np.array(values, dtype=np.float32)


def test_every_token_gets_its_sample_s_advantage(credit):
    found = credit(make_batch([1, 0], [0, 0], lengths=[1, 3]), None, "algorithm.advantage=dr_grpo")
    assert found.columns.advantages.tolist() == [0.5, -0.5, -0.5, -0.5]
    assert found.advantages.tolist() == [0.5, -0.5]
    assert found.kl is None
    assert found.length_penalty == 0


def test_the_estimator_gets_its_options(credit):
    batch = make_batch([1, 0], [0, 0], lengths=[1, 1])
    found = credit(batch, None, "algorithm.std=population", "algorithm.eps=1").advantages
    assert found.tolist() == pytest.approx([1 / 3, -1 / 3]), "0.5 over 0.5 + 1"
    assert credit(batch, None, "algorithm.std=none").advantages.tolist() == [0.5, -0.5]


def test_opo_gets_the_lengths_and_remax_the_greedy_rewards(credit):
    batch = make_batch([1, 0, 1], [0, 0, 1], lengths=[3, 1, 2])
    assert credit(batch, None, "algorithm.advantage=opo").advantages.tolist() == [0.25, -0.75, 0]
    greedy = replace(batch, greedy=floats(0.25, np.nan))
    assert credit(greedy, None, "algorithm.advantage=remax").advantages.tolist() == [0.75, -0.25, 0]


def test_completions_near_the_limit_lose_reward_before_they_are_compared(credit):
    """Seven tokens are the most; the last four are the buffer."""
    batch = make_batch([1, 1, 1], [0, 0, 0], lengths=[3, 5, 7])
    options = ["algorithm.advantage=raw", "overlong.buffer=4", "overlong.penalty=2"]
    found = credit(batch, None, *options)
    assert found.advantages.tolist() == [1, 0, -1]
    assert found.length_penalty == -1


def test_kl_in_the_reward_is_taken_off_the_sample_and_not_again_in_the_loss(credit):
    batch = make_batch([1, 0], [0, 0], lengths=[2, 1])
    columns = Columns(old=floats(-1, -2, -3), ref=floats(-1.5, -1.0, -3.0))
    found = credit(
        batch, columns, "algorithm.advantage=raw", "algorithm.kl=k1", "reference.kl_in=reward", "reference.kl_coef=0.5"
    )
    assert found.advantages.tolist() == [1.25, 0], "k1 of the first is 0.5 - 1.0, of the second 0; coefficient 0.5"
    assert found.kl == pytest.approx(-0.5 / 3)
    assert found.columns.ref is None
    in_loss = credit(batch, columns, "algorithm.advantage=raw", "algorithm.kl=k1")
    assert in_loss.advantages.tolist() == [1, 0]
    assert in_loss.columns.ref is columns.ref
    assert in_loss.kl is None


def test_gdpo_normalises_each_part_on_its_own_and_weighs_it(credit, tmp_path):
    (tmp_path / "mine.py").write_text("def form(completion): return {'a': 1.0, 'b': 2.0}\n")
    batch = replace(
        make_batch([0, 0], [0, 0], lengths=[1, 1]),
        components=[{"zigzag": 1.0, "form/a": 0.0}, {"zigzag": 0.0, "form/a": 100.0}],
    )
    weights = f"{{zigzag: 2.0, {tmp_path}/mine.py:form: 0.5}}"
    options = ["algorithm.advantage=gdpo", "algorithm.std=population"]
    found = credit(batch, None, *options, f"reward.functions={weights}")
    assert found.advantages.tolist() == pytest.approx([1.5, -1.5], abs=1e-5), (
        "2 * 1 + 0.5 * -1, however large the second part is"
    )


def test_for_gdpo_the_length_penalty_is_a_part_with_its_own_weight(credit):
    batch = replace(make_batch([1, 1], [0, 0], lengths=[3, 7]), components=[{"zigzag": 1.0}, {"zigzag": 1.0}])
    options = ["algorithm.advantage=gdpo", "algorithm.std=population", "overlong.buffer=4"]
    for penalty in (0.25, 2.0):
        found = credit(batch, None, *options, f"overlong.penalty={penalty}").advantages
        assert found.tolist() == pytest.approx([penalty, -penalty], abs=1e-4)


def test_max_rl_refuses_negative_rewards(credit):
    with pytest.raises(ConfigError, match="max_rl is for rewards of 0 or more; one is -1"):
        credit(make_batch([1, -1], [0, 0]), None, "algorithm.advantage=max_rl")


def test_a_user_s_estimator_gets_what_it_names_and_is_told_what_it_misses(credit, tmp_path):
    (tmp_path / "mine.py").write_text("def f(rewards, groups, eps=0.5, *, lengths): return rewards * eps + lengths\n")
    (tmp_path / "plain.py").write_text("def f(rewards, groups): return rewards\n")
    batch = make_batch([1, 0], [0, 0], lengths=[1, 3])
    assert credit(batch, None, f"algorithm.advantage={tmp_path}/mine.py:f").advantages.tolist() == [1.5, 3]
    set_ = credit(batch, None, f"algorithm.advantage={tmp_path}/mine.py:f", "algorithm.eps=2")
    assert set_.advantages.tolist() == [3, 3]
    assert credit(batch, None, f"algorithm.advantage={tmp_path}/plain.py:f").advantages.tolist() == [1, 0]
    with pytest.raises(ConfigError, match=r"algorithm\.std is none, but .* it has eps, lengths"):
        credit(batch, None, f"algorithm.advantage={tmp_path}/mine.py:f", "algorithm.std=none")


def test_gdpo_refuses_samples_of_different_parts(credit):
    batch = replace(make_batch([0, 0], [0, 0]), components=[{"zigzag": 1.0}, {"form": 1.0}])
    with pytest.raises(ConfigError, match="one has zigzag, another form"):
        credit(batch, None, "algorithm.advantage=gdpo")


def test_gae_pays_the_reward_with_the_last_token_and_the_kl_with_each(credit):
    batch = make_batch([1, 0], [0, 0], lengths=[2, 1])
    columns = Columns(old=floats(-1, -2, -3), ref=floats(-1.5, -1.0, -3.0), values=floats(0.5, 0.25, 0.75))
    options = [
        "algorithm.advantage=gae",
        "algorithm.kl=k1",
        "reference.kl_in=reward",
        "reference.kl_coef=0.5",
        "critic.whiten=false",
    ]
    found = credit(batch, columns, *options)
    # Token rewards are -0.25 and 0.5 + 1 for the first, 0 for the second; what is still to come is 1.25, 1.5 and 0.
    assert found.columns.returns.tolist() == [1.25, 1.5, 0]
    assert found.columns.advantages.tolist() == [0.75, 1.25, -0.75]
    assert found.advantages.tolist() == [1, -0.75], "the mean over a sample's tokens"
    whitened = credit(batch, columns, *options[:-1]).columns.advantages
    assert whitened.mean() == pytest.approx(0, abs=1e-6)
    assert whitened.std(ddof=1) == pytest.approx(1)


def test_clip_cov_takes_the_advantage_of_the_tokens_it_leaves_out(credit):
    batch = make_batch([1, 0], [0, 0], lengths=[2, 2])
    columns = Columns(old=floats(0, -4, -4, 0))
    options = ["algorithm.advantage=dr_grpo", "entropy.control=clip_cov", "entropy.share=0.25", "entropy.low=0.5"]
    found = credit(batch, columns, *options).columns.advantages.tolist()
    assert sorted(found) in ([-0.5, -0.5, 0, 0.5], [-0.5, 0, 0.5, 0.5]), "one of four, of covariance 1"
    assert found[1] == 0.5
    assert found[3] == -0.5, "covariance -1: not a candidate"
    again = credit(batch, columns, *options).columns.advantages.tolist()
    assert again == found


def test_kl_cov_holds_the_tokens_of_largest_covariance(credit):
    batch = make_batch([1, 0], [0, 0], lengths=[2, 2])
    columns = Columns(old=floats(0, -4, -3, 0))
    found = credit(batch, columns, "entropy.control=kl_cov", "entropy.share=0.25", "entropy.kl_coef=3").columns
    assert found.anchor.tolist() == [3, 0, 0, 0]
    assert (found.advantages != 0).all()


def test_shuffling_gives_samples_the_rewards_of_others(credit):
    batch = make_batch(list(range(20)), [0] * 20, lengths=[1] * 20)
    options = ["algorithm.advantage=raw", "reward.shuffle=true"]
    found = credit(batch, None, *options).advantages.tolist()
    assert found != batch.rewards.tolist()
    assert sorted(found) == batch.rewards.tolist()
    assert credit(batch, None, *options).advantages.tolist() == found
    assert credit(batch, None, *options, step=2).advantages.tolist() != found
