"""Weights & Biases. Without a network, `mode: offline` writes a folder for each start, which `wandb sync` sends later."""

import os
from collections.abc import Sequence
from typing import Any

from rlsys.config.schema import ConfigError
from rlsys.tracking.tracker import Figures, RunInfo, Tracker

CODES = {"done": 0, "stopped": 0, "failed": 1}


class Wandb(Tracker):
    def __init__(
        self,
        told: RunInfo,
        *,
        project: str = "rlsys",
        entity: str | None = None,
        name: str = "",
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
        dir: str = "",
    ):
        """`mode` is online or offline; else WANDB_MODE says, or it is online. `name`: the run's; `dir`: the run directory."""
        import wandb

        # The service of a process around this one, a notebook's or a sweep's, would outlive a kill and call the run in use.
        os.environ.pop("WANDB_SERVICE", None)
        settings = wandb.Settings(
            console="off",  # our output stays ours
            silent=True,
            init_timeout=60,
            stop_fn=lambda: None,  # who stops a run is its driver
        )
        wandb.setup(settings=settings)  # it would greet whoever logs in
        if (mode or wandb.Settings().mode) == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "there is no API key. `wandb login` asks for one, WANDB_API_KEY holds one, and `mode: offline` needs none"
            )
        self.wandb = wandb
        self.run = wandb.init(
            project=project,
            entity=entity,
            name=name or told.name,
            group=group,
            tags=list(tags),
            id=told.id,
            resume="allow",
            mode=mode,  # type: ignore[arg-type]
            dir=dir or str(told.path),
            config=dict(told.config),
            reinit="create_new",
            settings=settings,
        )

    def step(self, step: int, figures: Figures) -> None:
        self.run.log(figures, step=step, commit=True)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        names = ("uid", "prompt", "completion", "reward")
        table = self.wandb.Table(columns=list(names), data=[[row[name] for name in names] for row in rows])
        self.run.log({"samples": table}, step=step, commit=False)  # its figures complete the step

    def end(self, how: str) -> None:
        self.run.finish(exit_code=CODES[how])
        self.wandb.teardown()  # its service may still be writing
