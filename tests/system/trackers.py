"""Every tracker that a run can have, and what each must have of a run of ten steps, however often it was killed."""

import json
import re
import urllib.request
from pathlib import Path

import pytest
from killing import ROOT, read

EVERY_TRACKER = "tracking.to={tensorboard: {}, mlflow: {}, wandb: {mode: offline}}"
# Counters of what went wrong: their lines are there once it has.
RARE = {"ray_rlsys_reward_failures_total", "ray_rlsys_workers_replaced_total", "ray_rlsys_stalls_total"}
RARE |= {"ray_rlsys_updates_skipped_total", "ray_rlsys_tracker_failures_total", "ray_rlsys_checkpoints_total"}


def variables(folder: Path) -> dict[str, str]:
    """Of the environment: W&B's files go into the folder."""
    own = {f"WANDB_{kind}_DIR": str(folder) for kind in ("CACHE", "CONFIG", "DATA")}
    own["WANDB_SERVICE"] = "3-1-tcp-localhost-1"  # of a process around the run's
    return own | {"RAY_metrics_report_interval_ms": "500"}


def page(run: Path) -> str:
    """What Ray's node tells Prometheus, once it has all kinds of our figures."""
    (address,) = [e for e in read(run / "events.jsonl") if e["event"] == "start"][-1]["metrics"]
    with urllib.request.urlopen(address, timeout=5) as answer:
        text: str = answer.read().decode()
    expected = ("reward_mean{", "step_duration_seconds_bucket{", "tokens_total{", "engine_samples{")
    return text if all(f"ray_rlsys_{name}" in text for name in expected) else ""


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


def require_all_figures(text: str) -> None:
    """Those that the Grafana board asks for, too."""
    figures = exported(text)
    assert figures["ray_rlsys_steps"] == 10
    assert 1 <= figures["ray_rlsys_step"] <= 10
    names = {name.split()[0] for name in figures}
    queried = set(re.findall(r"ray_rlsys_\w+", (ROOT / "launch" / "grafana.json").read_text()))
    assert queried <= names | RARE, queried - names


def require_each_step_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = read(run / "events.jsonl")
    assert not [e for e in events if e["event"] in ("tracker failed", "tracker is late")]
    steps = list(range(11))
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [e.step for e in board.Scalars("time/rollout")] == steps[1:]
    assert [e.step for e in board.Scalars("eval/zigzag/accuracy")] == [0, 5, 10]
    of_lines = [line["reward/mean"] for line in read(run / "metrics.jsonl")[1:]]
    assert [e.value for e in board.Scalars("reward/mean")] == pytest.approx(of_lines, rel=1e-6)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((run / "mlruns").as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "rlsys"]
    (mlflow_run,) = client.search_runs([experiment.experiment_id])
    assert mlflow_run.info.status == "FINISHED"
    logged_steps = [m.step for m in client.get_metric_history(mlflow_run.info.run_id, "reward/mean")]
    assert sorted(set(logged_steps)) == steps[1:]
    assert len(logged_steps) <= 11, "the step in which the driver was killed may be there twice"
    sent = json.loads((run / "tracking.json").read_text())["sent"]
    assert sent == dict.fromkeys(["tensorboard", "mlflow", "wandb", "ray"], 10)
