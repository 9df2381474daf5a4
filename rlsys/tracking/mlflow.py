"""MLflow: a server, or files in the run directory.

`MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri RUN/mlruns` shows those, where all of mlflow is installed.
"""

import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from rlsys.tracking.tensorboard import samples_table
from rlsys.tracking.tracker import RunInfo, Tracker
from rlsys.types import Metrics

TAG = "rlsys.run"
STATES = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MAX_PARAM_CHARS = 6000


class MLflow(Tracker):
    def __init__(
        self,
        run_info: RunInfo,
        *,
        uri: str = "",
        experiment: str = "rlsys",
        name: str = "",
        tags: Mapping[str, str] | None = None,
    ):
        """`uri` is a server's address; empty: MLFLOW_TRACKING_URI if set, else mlruns/ in the run directory."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.metric = Metric
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or (run_info.path / "mlruns").as_uri()
        if uri.startswith("file:"):  # a database would need the whole MLflow server
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        self.client = MlflowClient(uri)
        known = self.client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known else self.client.create_experiment(experiment)
        runs = self.client.search_runs([experiment_id], f"tags.`{TAG}` = '{run_info.id}'", max_results=1)
        if runs:
            self.run = runs[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        self.run = self.client.create_run(
            experiment_id, run_name=name or run_info.name, tags={**(tags or {}), TAG: run_info.id}
        ).info.run_id
        params = [Param(key, text(value)[:MAX_PARAM_CHARS]) for key, value in run_info.config.items()]
        for i in range(0, len(params), 100):  # MLflow takes 100 at a time
            self.client.log_batch(self.run, params=params[i : i + 100])

    def step(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        entries = [self.metric(mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self.client.log_batch(self.run, metrics=entries)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.client.log_text(self.run, samples_table(rows), f"samples/eval-{step:06d}.md")

    def end(self, how: str) -> None:
        self.client.set_terminated(self.run, STATES[how])


def mlflow_name(name: str) -> str:
    """Returns a name that MLflow accepts: a section and a name in it. Its files cannot hold a metric below another one.

    "lag" -> "step/lag"    "lag/mean" -> "lag/mean"    "eval/aime/pass@4/low" -> "eval/aime.pass_at_4.low"
    """
    section, slash, inner = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_")).partition("/")
    return f"{section}/{inner.replace('/', '.')}" if slash else f"step/{section}"


def text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
