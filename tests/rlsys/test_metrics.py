import time
from dataclasses import replace

import numpy as np
import pytest
from fakes import make_batch

from rlsys.metrics import Clock, of_batch, of_updates


def test_the_figures_of_a_batch_by_hand():
    batch = make_batch([1, 0, 1, 1, 0], [0, 0, 1, 1, 3], lengths=[2, 4, 1, 3, 5], prompt_lengths=[4, 4, 4, 4])
    batch = replace(batch, failures={"timeout": 2, "invalid": 1})
    batch.samples[1] = replace(batch.samples[1], finish="length")
    found = of_batch(batch, np.array([0.5, -0.75, 0, 0, 0], dtype=np.float32), asked=8)
    assert found == pytest.approx(
        {
            "reward/mean": 0.6,
            "reward/std": 0.3**0.5,  # squares 2 x 0.36 + 3 x 0.16 = 1.2, over 4
            "reward/failed": 3,
            "groups/alone": 1,  # group 3
            "groups/lost": 1,  # group 2
            "groups/equal": 1,  # group 1
            "advantage/max_abs": 0.75,
            "length/mean": 3,
            "length/max": 5,
            "length/truncated": 0.2,
            "tokens": 15,
            "failure/timeout": 2,
            "failure/invalid": 1,
        }
    )
    assert all(type(value) is float for value in found.values()), "they are written as JSON"


def test_components_are_shown_where_there_are_several():
    batch = make_batch([1.5, 0.5], [0, 0])
    several = replace(batch, components=[{"exact": 1.0, "form": 0.5}, {"exact": 0.0, "form": 0.5}])
    found = of_batch(several, np.zeros(2, dtype=np.float32), asked=2)
    assert (found["reward/component/exact"], found["reward/component/form"]) == (0.5, 0.5)
    one = replace(batch, components=[{"exact": 1.5}, {"exact": 0.5}])
    assert "reward/component/exact" not in of_batch(one, np.zeros(2, dtype=np.float32), asked=2)


def test_a_batch_of_one_sample_has_no_spread():
    assert of_batch(make_batch([1], [0]), np.zeros(1, dtype=np.float32), asked=1)["reward/std"] == 0


def test_update_sums_become_means_per_update_and_per_token():
    first = {"loss": 1.0, "grad_norm": 2.0, "lr": 0.1, "kl": 3.0, "entropy": 6.0, "clipped": 0.0}
    second = {"loss": 3.0, "grad_norm": 4.0, "lr": 0.2, "kl": 5.0, "entropy": 2.0, "clipped": 4.0}
    found = of_updates(
        [
            first | {"mismatch": 0.5, "mismatch_max": 0.3, "tokens": 6.0},
            second | {"mismatch": 0.3, "mismatch_max": 0.2, "tokens": 2.0},
        ]
    )
    assert found == pytest.approx(
        {
            "loss": 2.0,
            "grad_norm": 3.0,
            "lr": 0.2,  # the last
            "kl": 1.0,  # 8 over 8 tokens
            "entropy": 1.0,
            "clip_fraction": 0.5,
            "mismatch/mean_abs": 0.1,
            "mismatch/max_abs": 0.3,
        }
    )


def test_an_update_without_tokens_divides_by_nothing():
    nothing = dict.fromkeys(
        ("loss", "grad_norm", "lr", "kl", "entropy", "clipped", "mismatch", "mismatch_max", "tokens"), 0.0
    )
    assert set(of_updates([nothing]).values()) == {0.0}


def test_the_clock_measures_phases_and_the_whole():
    clock = Clock()
    for _ in range(2):
        with clock("update"):
            time.sleep(0.01)
    found = clock.metrics()
    assert set(found) == {f"time/{name}" for name in ("step", "rollout", "reward", "score", "update", "sync")}
    assert found["time/step"] >= found["time/update"] >= 0.02
    assert found["time/score"] == 0


def test_a_phase_that_fails_is_measured_too():
    clock = Clock()

    def fail() -> None:
        with clock("score"):
            time.sleep(0.01)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert clock.metrics()["time/score"] >= 0.01


def test_seconds_can_be_booked_elsewhere_but_not_more_than_there_are():
    clock = Clock()
    clock.phases["rollout"] = 3.0
    clock.split("rollout", "reward", 1.0)
    assert (clock.phases["rollout"], clock.phases["reward"]) == (2.0, 1.0)
    clock.split("rollout", "reward", 9.0)
    assert (clock.phases["rollout"], clock.phases["reward"]) == (0.0, 3.0)
