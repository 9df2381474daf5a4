import time
from dataclasses import replace

import numpy as np
import pytest
from fakes import make_batch

from launch.tools.analysis.findings.learning import entropy_collapse
from launch.tools.analysis.findings.run_data import RunData
from rlsys.algorithms.credit import Credit
from rlsys.metrics import PhaseTimer, batch_metrics, credit_metrics, critic_metrics, sampled_entropy, update_metrics
from rlsys.types import Batch, Columns, Episode, Observation


def test_the_metrics_of_a_batch_by_hand():
    batch = make_batch([1, 0, 1, 1, 0], [0, 0, 1, 1, 3], lengths=[2, 4, 1, 3, 5], prompt_lengths=[4, 4, 4, 4])
    batch = replace(batch, failures={"timeout": 2, "invalid": 1}, requested=8)
    batch.samples[1] = replace(batch.samples[1], finish="length")
    metrics = batch_metrics(batch)
    assert metrics == pytest.approx(
        {
            "reward/mean": 0.6,
            "reward/std": 0.3**0.5,  # squares 2 x 0.36 + 3 x 0.16 = 1.2, over 4
            "reward/requested": 8,
            "reward/failed": 3,
            "groups/one_sample": 1,  # group 3
            "groups/all_failed": 1,  # group 2
            "groups/equal": 1,  # group 1
            "groups/dropped": 0,
            "length/mean": 3,
            "length/max": 5,
            "length/truncated": 0.2,
            "tokens": 15,
            "failure/timeout": 2,
            "failure/invalid": 1,
        }
    )
    assert all(type(value) is float for value in metrics.values()), "they are written as JSON"


def test_a_batch_with_episodes_has_their_figures():
    batch = make_batch([1, 0, 1], [0, 0, 0], lengths=[2, 4, 3])
    observations = Observation(0, np.ones(5, np.int32)), Observation(3, np.ones(1, np.int32))
    episode = Episode(None, [], [0.0, 0.0])
    batch.samples[1] = replace(batch.samples[1], finish="turns", observations=observations, episode=episode)
    metrics = batch_metrics(batch)
    assert (metrics["episode/turns"], metrics["episode/observed_tokens"], metrics["episode/finish/turns"]) == (2, 6, 1)
    assert (metrics["length/mean"], metrics["length/max"], metrics["tokens"]) == (3, 4, 9), "own tokens alone"
    assert metrics["length/truncated"] == pytest.approx(1 / 3)


def test_components_are_shown_where_there_are_several():
    batch = make_batch([1.5, 0.5], [0, 0])
    several = replace(batch, components=[{"exact": 1.0, "form": 0.5}, {"exact": 0.0, "form": 0.5}])
    metrics = batch_metrics(several)
    assert (metrics["reward/component/exact"], metrics["reward/component/form"]) == (0.5, 0.5)
    one = replace(batch, components=[{"exact": 1.5}, {"exact": 0.5}])
    assert "reward/component/exact" not in batch_metrics(one)


def test_a_batch_of_one_sample_has_a_deviation_of_0():
    assert batch_metrics(make_batch([1], [0]))["reward/std"] == 0


FIRST = {"loss": 1.0, "grad_norm": 2.0, "lr": 0.1, "kl": 3.0, "computed": 5.0, "clip_low": 0.0, "clip_high": 1.0}
FIRST |= {"mismatch": 0.5, "mismatch_max": 0.3, "tokens": 6.0}
SECOND = {"loss": 3.0, "grad_norm": 4.0, "lr": 0.2, "kl": 5.0, "computed": 1.0, "clip_low": 2.0, "clip_high": 1.0}
SECOND |= {"mismatch": 0.3, "mismatch_max": 0.2, "tokens": 2.0}


def test_update_sums_become_means_per_update_and_per_token():
    assert update_metrics([FIRST, SECOND]) == pytest.approx(
        {
            "loss": 2.0,
            "grad_norm": 3.0,
            "lr": 0.2,  # the last
            "kl": 8 / 6,  # over the tokens that were computed
            "clip_fraction": 0.5,  # 4 over all 8 tokens
            "clip_fraction/low": 0.25,
            "clip_fraction/high": 0.25,
            "mismatch/mean_abs": 0.1,
            "mismatch/max_abs": 0.3,
        }
    )


def collapsing_batch(likeliest: list[float], rng: np.random.Generator) -> Batch:
    """A group of 4 answers for each probability of the token 0, which is right; the other tokens are equally likely."""
    groups = np.repeat(np.arange(len(likeliest)), 4)
    lengths = rng.integers(1, 8, len(groups)).tolist()
    tokens = [np.where(rng.random(n) < likeliest[g], 0, 1) for g, n in zip(groups, lengths, strict=True)]
    batch = make_batch([float((t == 0).all()) for t in tokens], groups.tolist(), lengths)
    samples = [
        replace(s, logprobs=np.log(np.where(t == 0, likeliest[g], (1 - likeliest[g]) / 15)).astype(np.float32))
        for s, t, g in zip(batch.samples, tokens, groups, strict=True)
    ]
    return replace(batch, samples=samples)


def entropy_of(p: float) -> float:
    return -p * np.log(p) - (1 - p) * np.log((1 - p) / 15)


def test_entropy_is_that_of_all_groups_though_most_have_collapsed_and_teach_nothing():
    """Nine groups of ten answer alike. A mean over those with different rewards would show the tenth."""
    likeliest, rng = [0.995] * 9 + [0.4], np.random.default_rng(0)
    metrics, true, kept = [], [], []
    for _ in range(300):
        batch = collapsing_batch(likeliest, rng)
        entropies = np.array([entropy_of(likeliest[g]) for g in batch.groups])
        teaching = np.isin(batch.groups, [g for g in range(10) if np.ptp(batch.rewards[batch.groups == g])])
        metrics.append(sampled_entropy(batch)["entropy"])
        true.append(np.average(entropies, weights=batch.lengths))
        kept.append(np.average(entropies[teaching], weights=batch.lengths[teaching]) if teaching.any() else np.nan)
    assert np.mean(metrics) == pytest.approx(np.mean(true), rel=0.05)
    assert np.nanmean(kept) > 2 * np.mean(true), "what the samples that teach would show"


def test_a_policy_that_collapses_is_found_by_its_entropy():
    rng, lines = np.random.default_rng(1), []
    for step in range(1, 17):
        batch = collapsing_batch([min(0.2 + 0.1 * step, 0.999)] * 9 + [0.4 + 0.5 * (step > 8)], rng)
        lines.append({"step": step, "reward/mean": float(batch.rewards.mean())} | sampled_entropy(batch))
    assert [f.title for f in entropy_collapse(RunData(lines))] == ["Entropy has collapsed"]


def test_corrections_report_the_effective_share_of_tokens():
    """Weights 1, 1, 1, 0 and 2, 0 are worth 5² / 7 of the 6 tokens with an advantage."""
    first = FIRST | {"correction": 3.0, "correction_squared": 3.0, "masked": 1.0, "corrected": 4.0}
    second = SECOND | {"correction": 2.0, "correction_squared": 4.0, "masked": 1.0, "corrected": 2.0}
    metrics = update_metrics([first, second])
    assert metrics["correction/mean"] == 5 / 6
    assert metrics["correction/masked"] == 2 / 6
    assert metrics["correction/effective_share"] == pytest.approx(25 / 7 / 6)
    nothing = FIRST | {"correction": 0.0, "correction_squared": 0.0, "masked": 4.0, "corrected": 4.0}
    assert update_metrics([nothing])["correction/effective_share"] == 0


def test_an_update_without_tokens_does_not_divide_by_0():
    assert set(update_metrics([dict.fromkeys(FIRST, 0.0)]).values()) == {0.0}


def test_a_step_without_updates_has_no_update_metrics():
    assert update_metrics([]) == critic_metrics([]) == {}


def test_critic_metrics_are_means_over_updates_and_the_last_learning_rate():
    updates = [{"loss": 1.0, "grad_norm": 0.5, "lr": 0.1}, {"loss": 2.0, "grad_norm": 1.5, "lr": 0.3}]
    assert critic_metrics(updates) == pytest.approx({"critic/loss": 1.5, "critic/grad_norm": 1.0, "critic/lr": 0.3})


def test_credit_metrics_by_hand():
    columns = Columns(
        advantages=np.array([0.5, -0.75], dtype=np.float32),
        values=np.array([1, 2], dtype=np.float32),
        returns=np.array([1, 4], dtype=np.float32),
    )
    metrics = credit_metrics(Credit(columns, columns.advantages, kl=0.25, length_penalty=-0.125))
    expected = {"advantage/max_abs": 0.75, "kl": 0.25, "reward/overlong": -0.125, "critic/value_mean": 1.5}
    assert metrics == pytest.approx(expected | {"critic/explained_variance": 1 - 1 / 2.25})
    plain = credit_metrics(
        Credit(Columns(advantages=columns.advantages), columns.advantages, kl=None, length_penalty=0.0)
    )
    assert plain == pytest.approx({"advantage/max_abs": 0.75})


def test_the_timer_measures_phases_and_the_whole_step():
    timer = PhaseTimer()
    for _ in range(2):
        with timer("update"):
            time.sleep(0.01)
    metrics = timer.metrics()
    assert set(metrics) == {f"time/{name}" for name in ("step", "rollout", "reward", "score", "update", "sync")}
    assert metrics["time/step"] >= metrics["time/update"] >= 0.02
    assert metrics["time/score"] == 0


def test_a_phase_that_fails_is_measured_too():
    timer = PhaseTimer()

    def fail() -> None:
        with timer("score"):
            time.sleep(0.01)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert timer.metrics()["time/score"] >= 0.01


def test_seconds_can_be_moved_but_not_more_than_there_are():
    timer = PhaseTimer()
    timer.phases["rollout"] = 3.0
    timer.move_seconds("rollout", "reward", 1.0)
    assert (timer.phases["rollout"], timer.phases["reward"]) == (2.0, 1.0)
    timer.move_seconds("rollout", "reward", 9.0)
    assert (timer.phases["rollout"], timer.phases["reward"]) == (0.0, 3.0)
