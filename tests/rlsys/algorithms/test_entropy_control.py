import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.entropy_control import clip_cov, kl_cov, token_covariance

# Log-probs in sixteenths and advantages in eighths.
PAIRS = st.lists(
    st.tuples(st.integers(-80, 0).map(lambda n: n / 16), st.integers(-24, 24).map(lambda n: n / 8)),
    min_size=1,
    max_size=30,
)


def columns(pairs: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.array(column, dtype=np.float32) for column in zip(*pairs, strict=True))


def test_four_tokens_by_hand():
    """Means are -2 and 0. Likely good tokens and unlikely bad ones have positive terms."""
    logprobs, advantages = np.array([-1.0, -1.0, -3.0, -3.0]), np.array([2.0, -1.0, -2.0, 1.0])
    assert token_covariance(logprobs, advantages).tolist() == [2, -1, 2, -1]


@given(PAIRS)
def test_the_mean_of_the_terms_is_the_covariance(pairs):
    logprobs, advantages = columns(pairs)
    expected = np.cov(logprobs.astype(float), advantages.astype(float), bias=True)[0, 1]
    assert token_covariance(logprobs, advantages).mean() == pytest.approx(expected, abs=1e-4)


@given(PAIRS, st.sampled_from([1e-9, 0.1, 0.5, 1.0]))
def test_kl_cov_holds_the_tokens_of_largest_covariance(pairs, share):
    logprobs, advantages = columns(pairs)
    chosen, terms = kl_cov(logprobs, advantages, share=share), token_covariance(logprobs, advantages)
    assert chosen.dtype == bool
    assert chosen.sum() == max(1, round(share * len(pairs)))
    assert min(terms[chosen], default=np.inf) >= max(terms[~chosen], default=-np.inf)


@given(PAIRS, st.sampled_from([1e-9, 0.1, 0.5, 1.0]), st.integers(0, 5))
def test_clip_cov_selects_at_most_its_share_and_only_within_its_bounds(pairs, share, seed):
    logprobs, advantages = columns(pairs)
    terms = token_covariance(logprobs, advantages)
    chosen = clip_cov(logprobs, advantages, share=share, low=0.1, high=2.0, rng=np.random.default_rng(seed))
    within = (terms >= 0.1) & (terms <= 2.0)
    assert not (chosen & ~within).any()
    assert chosen.sum() == min(max(1, round(share * len(pairs))), within.sum())


def test_clip_cov_draws_uniformly_from_its_candidates():
    """Six of ten tokens are within the bounds; two are drawn, so each of the six a third of the time."""
    logprobs = np.array([-1.0] * 3 + [-3.0] * 3 + [-2.0] * 4, dtype=np.float32)
    advantages = np.array([1.0] * 3 + [-1.0] * 3 + [0.0] * 4, dtype=np.float32)
    rng = np.random.default_rng(0)
    counts = sum(clip_cov(logprobs, advantages, share=0.2, low=0.5, high=1.5, rng=rng).astype(int) for _ in range(3000))
    assert counts[6:].tolist() == [0] * 4
    assert counts[:6].sum() == 6000
    assert abs(counts[:6] - 1000).max() < 4 * (3000 * (1 / 3) * (2 / 3)) ** 0.5


def test_a_small_share_of_a_small_batch_is_one_token():
    """verl takes max(1, int(share · tokens)) too; 0.002 of four tokens would be none. Covariances: 2, -1, 2.25, -1."""
    logprobs, advantages = np.array([-1.0, -1.0, -3.0, -3.0]), np.array([2.0, -1.0, -2.25, 1.25])
    assert kl_cov(logprobs, advantages, share=0.002).tolist() == [False, False, True, False]
    rng = np.random.default_rng(0)
    assert clip_cov(logprobs, advantages, share=0.002, low=2.1, high=5.0, rng=rng).tolist() == [
        False,
        False,
        True,
        False,
    ]


def test_the_same_seed_chooses_the_same_tokens():
    logprobs, advantages = columns([(-i / 16, i / 8) for i in range(24)])
    options = {"share": 0.2, "low": -9.0, "high": 9.0}
    first, again, other = (clip_cov(logprobs, advantages, rng=np.random.default_rng(s), **options) for s in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


@given(PAIRS, st.randoms(use_true_random=False))
def test_the_covariance_does_not_depend_on_the_order(pairs, rng):
    order = list(range(len(pairs)))
    rng.shuffle(order)
    logprobs, advantages = columns(pairs)
    np.testing.assert_allclose(
        token_covariance(logprobs[order], advantages[order]), token_covariance(logprobs, advantages)[order], atol=1e-4
    )


def test_equal_advantages_have_no_covariance():
    assert token_covariance(np.array([-1.0, -9.0, -2.0]), np.array([0.5, 0.5, 0.5])).tolist() == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value")
def test_without_tokens_none_is_chosen():
    none = np.zeros(0, dtype=np.float32)
    assert kl_cov(none, none, share=0.5).tolist() == []
    assert clip_cov(none, none, share=0.5, low=0.0, high=1.0, rng=np.random.default_rng(0)).tolist() == []


TEN = np.arange(10, dtype=np.float32)


@pytest.mark.parametrize(("advantages", "share"), [(TEN, -0.1), (TEN, 0.0), (TEN, 1.5), (TEN, np.nan), (TEN[:1], 0.1)])
def test_a_wrong_share_and_columns_of_different_length_are_refused(advantages, share):
    with pytest.raises(ValueError, match=r"^(kl_cov|token_covariance): "):
        kl_cov(TEN, advantages, share=share)
