"""The built-in trackers by name, and checks of the trackers that a configuration names."""

import difflib
import importlib.util
from collections.abc import Callable
from typing import Any

from rlsys.config.options import keyword_options
from rlsys.config.plugins import user_function_problems
from rlsys.config.schema import TrackingConfig
from rlsys.config.secrets import resolve_env
from rlsys.errors import ConfigError
from rlsys.tracking.mlflow import MLflow
from rlsys.tracking.tensorboard import TensorBoard
from rlsys.tracking.wandb import Wandb

TRACKERS: dict[str, Callable[..., Any]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}


def tracker_problems(tracking: TrackingConfig) -> list[str]:
    """Returns problems of names and options, as far as they show without running a user's file."""
    problems = []
    for name, t in tracking.to.items():
        try:
            resolve_env(t.options)
        except ConfigError as error:
            problems.append(f"tracking.to.{name}: {error}")
        if t.tracker in TRACKERS:
            known = keyword_options(TRACKERS[t.tracker])
            for option in (o for o in t.options if o not in known):
                close = difflib.get_close_matches(option, known, 1)
                way_out = f" Did you mean `{close[0]}`?" if close else f" It has {', '.join(known)}."
                problems.append(f"tracking.to.{name} has no option `{option}`.{way_out}")
        elif ":" in t.tracker:
            problems += user_function_problems("tracking.to", t.tracker)
        else:
            close = difflib.get_close_matches(t.tracker.lower(), TRACKERS, 1)
            hint = f" Did you mean `{close[0]}`?" if close else ""
            problems.append(
                f"tracking.to is `{t.tracker}`; known: {', '.join(TRACKERS)}, or module:function. "
                f"metrics.jsonl is written in any case.{hint}"
            )
    return problems


def missing_libraries(tracking: TrackingConfig) -> list[str]:
    """Returns a sentence about each library that is not installed."""
    return [
        f"tracking.to: {t.tracker} is not installed. `pip install 'rlsys[trackers]'` or "
        f"`pip install {PACKAGES[t.tracker]}` installs it; tracking.to=[] goes on without it."
        for t in tracking.to.values()
        if t.tracker in PACKAGES and importlib.util.find_spec(t.tracker) is None
    ]
