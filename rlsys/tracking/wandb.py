"""Weights & Biases. Without a network, `mode: offline` writes a folder per start, which `wandb sync` sends later."""

import os
from collections.abc import Sequence
from typing import Any

from rlsys.errors import ConfigError
from rlsys.tracking.tracker import RunInfo, Tracker
from rlsys.types import Metrics

CODES = {"done": 0, "stopped": 0, "failed": 1}


class Wandb(Tracker):
    def __init__(
        self,
        run_info: RunInfo,
        *,
        project: str = "rlsys",
        entity: str | None = None,
        name: str = "",
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
        dir: str = "",
    ):
        """`name` and `dir` are by default the run's. `mode` is online or offline; null: WANDB_MODE, else online."""
        import wandb

        # The service of an outer process, a notebook or a sweep, would outlive a kill and report the run as in use.
        os.environ.pop("WANDB_SERVICE", None)
        settings = wandb.Settings(
            console="off",  # our output stays ours
            silent=True,
            init_timeout=60,
            stop_fn=lambda: None,  # only the driver stops a run
        )
        wandb.setup(settings=settings)  # else it prints a greeting at login
        if (mode or wandb.Settings().mode) == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "there is no API key. `wandb login` asks for one, WANDB_API_KEY holds one, "
                "and `mode: offline` needs none"
            )
        self.wandb = wandb
        self.run = wandb.init(
            project=project,
            entity=entity,
            name=name or run_info.name,
            group=group,
            tags=list(tags),
            id=run_info.id,
            resume="allow",
            mode=mode,  # type: ignore[arg-type]
            dir=dir or str(run_info.path),
            config=dict(run_info.config),
            reinit="create_new",
            settings=settings,
        )

    def step(self, step: int, metrics: Metrics) -> None:
        self.run.log(metrics, step=step, commit=True)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        names = ("uid", "prompt", "completion", "reward")
        table = self.wandb.Table(columns=list(names), data=[[row[name] for name in names] for row in rows])
        self.run.log({"samples": table}, step=step, commit=False)  # its metrics complete the step

    def end(self, how: str) -> None:
        self.run.finish(exit_code=CODES[how])
        self.wandb.teardown()  # its service may still be writing
