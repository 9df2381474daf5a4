"""A whole run with every tracker, killed in the middle: it is the same run, and they have each step once. Ray's page has the figures."""

import json
import re
import urllib.request
from pathlib import Path

import pytest
from killing import ROOT, STEPS, read, require_equal, running


def exported(text: str) -> dict[str, float]:
    """The figures on a page for Prometheus, by name and our own labels: `rlsys_accuracy{source=…}`."""
    values = {}
    for line in text.splitlines():
        if match := re.match(r"(ray_rlsys_\w+)\{(.*)\} (\S+)$", line):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
            more = [labels[k] for k in ("source", "phase", "engine", "reason", "le") if k in labels]
            values[" ".join([match[1], *more])] = float(match[3])
            assert labels["run"] == "run"
    return values


def test_a_run_with_every_tracker_that_is_killed_is_the_same_run(
    environment: dict[str, str], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    environment |= {
        "WANDB_CACHE_DIR": str(tmp_path),
        "WANDB_CONFIG_DIR": str(tmp_path),
        "WANDB_DATA_DIR": str(tmp_path),
    }
    to = "tracking.to={tensorboard: {}, mlflow: {}, wandb: {mode: offline}}"
    environment["RAY_metrics_report_interval_ms"] = "500"
    environment["WANDB_SERVICE"] = "3-1-tcp-localhost-1"  # of a process around the run's
    pages: list[str] = []

    with running(tmp_path / "run", *STEPS, "checkpoint.keep_last=10", to, environment=environment) as run:
        run.until_step(2)
        pages.append(run.until(lambda: page(run.path)))
        run.family()[1].kill()  # the driver; another one goes on
        assert run.wait() == 0, run.text()
    require_equal(run.path, undisturbed)
    assert len(run.events("restart")) == 1
    assert not run.events("tracker failed")
    assert not run.events("tracker is late")

    first = exported(pages[0])
    assert first["ray_rlsys_steps"] == 10
    assert 1 <= first["ray_rlsys_step"] <= 10
    names = {name.split()[0] for name in first}
    board = (ROOT / "launch" / "grafana.json").read_text()
    queried = set(re.findall(r"ray_rlsys_\w+", board))
    rare = {"ray_rlsys_reward_failures_total", "ray_rlsys_workers_replaced_total", "ray_rlsys_stalls_total"}
    rare |= {"ray_rlsys_updates_skipped_total", "ray_rlsys_tracker_failures_total", "ray_rlsys_checkpoints_total"}
    assert queried <= names | rare, queried - names

    steps = list(range(11))
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("time/rollout")] == steps[1:]
    assert [e.step for e in events.Scalars("eval/zigzag/accuracy")] == [0, 5, 10]
    lines = read(run.path / "metrics.jsonl")
    of_lines = [line["reward/mean"] for line in lines[1:]]
    assert [e.value for e in events.Scalars("reward/mean")] == pytest.approx(of_lines, rel=1e-6)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((run.path / "mlruns").as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "rlsys"]
    (mlflow_run,) = client.search_runs([experiment.experiment_id])
    assert mlflow_run.info.status == "FINISHED"
    logged_steps = [m.step for m in client.get_metric_history(mlflow_run.info.run_id, "reward/mean")]
    assert sorted(set(logged_steps)) == steps[1:]
    assert len(logged_steps) <= 11, "the step in which it was killed may be there twice"
    assert json.loads((run.path / "tracking.json").read_text())["sent"] == dict.fromkeys(
        ["tensorboard", "mlflow", "wandb", "ray"], 10
    )


def page(run: Path) -> str:
    """What Ray's node tells Prometheus, once it has all kinds of our figures."""
    (address,) = [e for e in read(run / "events.jsonl") if e["event"] == "start"][-1]["metrics"]
    with urllib.request.urlopen(address, timeout=5) as answer:
        text: str = answer.read().decode()
    expected = ("reward_mean{", "step_duration_seconds_bucket{", "tokens_total{", "engine_samples{")
    return text if all(f"ray_rlsys_{name}" in text for name in expected) else ""
