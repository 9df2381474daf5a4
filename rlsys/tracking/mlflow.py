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
from rlsys.tracking.tracker import Figures, RunInfo, Tracker

TAG = "rlsys.run"
STATES = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MOST = 6000  # characters of a parameter


class MLflow(Tracker):
    def __init__(
        self,
        told: RunInfo,
        *,
        uri: str = "",
        experiment: str = "rlsys",
        name: str = "",
        tags: Mapping[str, str] | None = None,
    ):
        """`uri` of a server; else MLFLOW_TRACKING_URI says, or it is mlruns/ in the run directory."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.metric = Metric
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or (told.path / "mlruns").as_uri()
        if uri.startswith("file:"):  # MLflow keeps them for who asks; a database would need its whole server here
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        self.client = MlflowClient(uri)
        there = self.client.get_experiment_by_name(experiment)
        home = there.experiment_id if there else self.client.create_experiment(experiment)
        known = self.client.search_runs([home], f"tags.`{TAG}` = '{told.id}'", max_results=1)
        if known:
            self.run = known[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        self.run = self.client.create_run(
            home, run_name=name or told.name, tags={**(tags or {}), TAG: told.id}
        ).info.run_id
        params = [Param(key, text(value)[:MOST]) for key, value in told.config.items()]
        for i in range(0, len(params), 100):  # so many at a time
            self.client.log_batch(self.run, params=params[i : i + 100])

    def step(self, step: int, figures: Figures) -> None:
        now = int(time.time() * 1000)
        found = [self.metric(mlflow_name(name), value, now, step) for name, value in figures.items()]
        self.client.log_batch(self.run, metrics=found)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.client.log_text(self.run, samples_table(rows), f"samples/eval-{step:06d}.md")

    def end(self, how: str) -> None:
        self.client.set_terminated(self.run, STATES[how])


def mlflow_name(name: str) -> str:
    """A name that MLflow takes: a section and a name in it. Its files cannot hold a figure below another one.

    "lag" -> "step/lag"    "lag/mean" -> "lag/mean"    "eval/aime/pass@4/low" -> "eval/aime.pass_at_4.low"
    """
    section, slash, inner = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_")).partition("/")
    return f"{section}/{inner.replace('/', '.')}" if slash else f"step/{section}"


def text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
