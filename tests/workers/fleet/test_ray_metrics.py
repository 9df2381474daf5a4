"""Metrics as a real Ray exports them."""

import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from launch.ray_session import ray_metrics
from launch.ray_session.connect import metrics_urls
from launch.ray_session.ray_metrics import RayMetrics
from rlsys.tracking import RunInfo

METRICS = {
    "reward/mean": 0.5,
    "reward/failed": 2.0,
    "failure/timeout": 2.0,
    "tokens": 700.0,
    "tokens_per_second": 350.0,
    "time/step": 2.0,
    "time/rollout": 1.5,
    "eval/sums/accuracy": 0.75,
    "eval/sums/accuracy/low": 0.5,
}


def exported(ray: Any, run: str) -> dict[str, float]:
    """Returns the exported metrics of a run by name and label: `ray_rlsys_accuracy source=sums`."""
    values = {}
    (url,) = metrics_urls(ray)
    with urllib.request.urlopen(url, timeout=5) as page:
        for line in page.read().decode().splitlines():
            if (match := re.match(r"(ray_rlsys_\w+)\{(.*)\} (\S+)$", line)) and f'run="{run}"' in match[2]:
                labels = re.findall(r'\b(source|phase|engine|reason|le)="([^"]*)"', match[2])
                values[" ".join([match[1], *(f"{name}={value}" for name, value in labels)])] = float(match[3])
    return values


@pytest.mark.long
def test_ray_exports_every_metric_under_the_name_that_the_dashboard_uses(ray: Any) -> None:
    run = RunInfo("adding-1", "adding", Path("adding"), {"trainer.steps": 10}, first_step=0, resumed=False)
    metrics = RayMetrics(
        run, samples=32, engines=lambda: {"": 5, "rollout-0": 3, "rollout-1": 0}, verdicts=lambda: 4, restarts=1
    )
    metrics.step(1, METRICS)
    metrics.step(2, METRICS)
    for event in (*ray_metrics.EVENTS, "sync"):
        metrics.event({"event": event})
    metrics.poll()

    deadline = time.monotonic() + 40
    while "ray_rlsys_checkpoints_total" not in (values := exported(ray, "adding")):
        assert time.monotonic() < deadline, values
        time.sleep(0.5)
        metrics.poll()

    expected = {
        "ray_rlsys_step": 2,
        "ray_rlsys_steps": 10,
        "ray_rlsys_restarts": 1,
        "ray_rlsys_reward_mean": 0.5,
        "ray_rlsys_tokens_per_second": 350,
        "ray_rlsys_samples_per_second": 15,
        "ray_rlsys_step_seconds": 2,
        "ray_rlsys_phase_seconds phase=rollout": 1.5,
        "ray_rlsys_accuracy source=sums": 0.75,
        "ray_rlsys_samples_waiting": 5,
        "ray_rlsys_verdicts_waiting": 4,
        "ray_rlsys_engines_idle": 1,
        "ray_rlsys_engine_samples engine=rollout-0": 3,
        "ray_rlsys_engine_samples engine=rollout-1": 0,
        "ray_rlsys_tokens_total": 1400,
        "ray_rlsys_samples_total": 60,
        "ray_rlsys_reward_failures_total reason=timeout": 4,
        "ray_rlsys_step_duration_seconds_count": 2,  # the sum is Ray's estimate, from the buckets
    } | {f"ray_{name}_total": 1 for name in ray_metrics.EVENTS.values()}
    assert {name: values.get(name) for name in expected} == expected
    assert not any("low" in name for name in values), "the bound of an interval is no data set"
    assert "ray_rlsys_step_duration_seconds_bucket le=2.5" in values
