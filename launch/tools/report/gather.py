"""Collects from a run directory what the page shows, as plain data."""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launch.tools.analysis import findings
from launch.tools.analysis.run_events import RunEvent, last_ending, parse_events
from launch.tools.estimates import batch_math
from launch.tools.report.charts import PHASES, choose_charts
from launch.tools.report.lanes import worker_lanes
from rlsys import __version__
from rlsys.config import loading
from rlsys.config.methods import GROUP_RELATIVE
from rlsys.config.option_comments import option_comments
from rlsys.config.schema import Config
from rlsys.config.secrets import closed_environment, redact, redact_nested
from rlsys.errors import ConfigError
from rlsys.runs.directory import read_lines

UNLISTED_EVENTS = ("sync", "checkpoint")  # they come in every step


@dataclass(frozen=True)
class ReportedRun:
    """What is read from the directory of a run."""

    path: Path
    metrics: list[dict[str, float]]  # lines of metrics.jsonl
    events: list[RunEvent]
    config: Config | None  # None: it cannot be read
    options: dict[str, Any]  # by name, as far as config.yaml can be read
    config_problem: str  # why there is no config

    @classmethod
    def read(cls, path: Path) -> "ReportedRun":
        path = path.expanduser().resolve()
        if not (path / "config.yaml").is_file():
            problem = "is no run: it has no config.yaml" if path.exists() else "does not exist"
            raise ConfigError(f"{path} {problem}. Give the directory of a run, such as runs/demo.")
        metrics = [line for line in read_lines(path / "metrics.jsonl") if isinstance(line.get("step"), int | float)]
        config, options, config_problem = _read_config(path / "config.yaml")
        return cls(path, metrics, parse_events(read_lines(path / "events.jsonl")), config, options, config_problem)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def done(self) -> int:
        """The last finished step."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0


def _read_config(file: Path) -> tuple[Config | None, dict[str, Any], str]:
    """Returns the configuration, its options by name, and a sentence if it cannot be read.

    The run may be somebody else's: no reference is resolved in the environment of whoever reads it.
    """
    try:
        tree = OmegaConf.load(file)
        assert isinstance(tree, DictConfig)
    except Exception as error:
        return None, {}, f"config.yaml cannot be read: {error}"
    try:
        with closed_environment():
            config = loading.build_config(tree, [], str(file))
        return config, loading.flatten(config), ""
    except ConfigError as error:
        sections = OmegaConf.to_container(tree, resolve=False)
        assert isinstance(sections, dict)
        flat = {
            f"{section}.{name}": value
            for section, members in sections.items()
            if isinstance(members, dict)
            for name, value in members.items()
        }
        return None, flat, f"config.yaml is of another version of rlsys: {error.problems[0]}"


def page_data(runs: list[ReportedRun]) -> dict[str, Any]:
    """Returns everything on the page but the samples."""
    methods = {run.config.algorithm.advantage for run in runs if run.config}
    lines = [line for run in runs for line in run.metrics]
    compares_groups = methods <= set(GROUP_RELATIVE)
    named_runs = zip(runs, display_names(runs), strict=True)
    return {
        "version": __version__,
        "runs": [run_page_data(run, name, with_lanes=len(runs) == 1) for run, name in named_runs],
        "charts": choose_charts(lines, compares_groups),
        "phases": list(PHASES),
        "differences": differences(runs) if len(runs) > 1 else [],
        "checks": findings.check_descriptions(),
    }


def display_names(runs: list[ReportedRun]) -> list[str]:
    """Returns the names of the directories; where they are not unique, with the parent's, or the whole path."""
    for name in (lambda p: p.name, lambda p: "/".join(p.parts[-2:]), str):
        names = [name(run.path) for run in runs]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"{names[0]} is given twice. A comparison takes different runs.")


def run_page_data(run: ReportedRun, name: str, with_lanes: bool) -> dict[str, Any]:
    lanes = worker_lanes(run.path) if with_lanes else None
    busy_share = {w["name"]: w["busy"] for w in lanes["workers"]} if lanes else {}
    reported = findings.run_checks(findings.RunData(run.metrics, run.events, run.config, busy_share))
    return {
        "name": redact(name),
        "model": redact(str(run.options.get("model.path", ""))),
        "steps": run.config.trainer.steps if run.config else run.done,
        "done": run.done,
        "state": run_state(run),
        "figures": metric_columns(run.metrics),
        "events": [_event_data(event) for event in run.events if event.kind not in UNLISTED_EVENTS],
        "findings": [redact_nested(vars(finding)) for finding in reported],
        "missing": redact_nested(missing_data(run, has_timeline=lanes is not None or not with_lanes)),
        "lanes": lanes,
        "groups": run.config.trainer.prompts_per_step if run.config else 0,
        "tables": redact_nested(settings_tables(run)),
        "options": option_rows(run),
    }


def metric_columns(lines: list[dict[str, float]]) -> dict[str, list[float | None]]:
    """Returns a number or None per line for each metric: JSON has no nan and no infinity."""
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [_round_or_none(line.get(name)) for line in lines] for name in names}


def _round_or_none(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def run_state(run: ReportedRun) -> dict[str, Any]:
    """Returns whether the run is done, stopped, failed or still open, with its start and its last sign of life."""
    ending = last_ending(run.events)
    if ending is None:
        kind = "open"
    elif ending.kind == "done":
        kind = "done"
    else:
        kind = "failed" if ending.tone == "problem" else "stopped"
    times = [event.time for event in run.events if event.time]
    for name in ("metrics.jsonl", "events.jsonl"):
        with contextlib.suppress(OSError):
            times.append((run.path / name).stat().st_mtime)
    starts = [event.time for event in run.events if event.kind in ("start", "begin") and event.time]
    last_time = ending.time if ending and ending.time else max(times, default=None)
    return {"kind": kind, "began": min(starts, default=None), "seen": last_time}


def _event_data(event: RunEvent) -> dict[str, Any]:
    facts = {k: v for k, v in event.facts.items() if v not in (None, "", [])}
    return redact_nested(vars(event) | {"facts": facts})


def missing_data(run: ReportedRun, has_timeline: bool) -> list[str]:
    """Says in sentences what a reader would look for and not find, and why."""
    sentences = [run.config_problem] if run.config_problem else []
    trained = [line for line in run.metrics if "time/step" in line]
    if not trained:
        sentences.append("No step has been finished yet: there are no curves.")
    elif len(trained) == 1:
        sentences.append("One step has been finished: curves are points.")
    if trained and not any(n.endswith("/accuracy") for line in run.metrics for n in line):
        sentences.append(
            "Nothing held out was evaluated (eval.datasets is empty): the reward is that of training prompts alone."
        )
    if trained and not has_timeline:
        sentences.append("No timeline is recorded in logs/*.spans, so there are no lanes.")
    if not run.events:
        sentences.append("There is no events.jsonl: faults and restarts are not known.")
    return sentences


def settings_tables(run: ReportedRun) -> dict[str, list[list[Any]]]:
    if run.config is None:
        return {}
    return {
        "Batch arithmetic": [[name, number, how] for name, how, number in batch_math.batch_rows(run.config)],
        "Method": [list(row) for row in batch_math.method_rows(run.config)],
        "Data": [list(row) for row in batch_math.dataset_rows(run.config)],
        "Processes": [list(row) for row in batch_math.process_rows(run.config)],
    }


def option_rows(run: ReportedRun) -> list[dict[str, Any]]:
    """Returns every option with its default and its meaning."""
    defaults, comments = loading.defaults(run.options.get("cluster.device", "cpu")), option_comments()
    return [
        {
            "name": name,
            "value": redact_nested(_as_yaml(value)),
            "default": _as_yaml(defaults[name]) if name in defaults else None,
            "differs": name not in defaults or value != defaults[name],
            "meaning": comments.get(name, ""),
        }
        for name, value in run.options.items()
        if name != "run.dir"
    ]


def differences(runs: list[ReportedRun]) -> list[dict[str, Any]]:
    """Returns the options in which the runs differ, with each run's value."""
    names = dict.fromkeys(name for run in runs for name in run.options if name != "run.dir")
    rows = [{"name": n, "values": [redact_nested(_as_yaml(run.options.get(n))) for run in runs]} for n in names]
    return [row for row in rows if len(set(row["values"])) > 1]


def _as_yaml(value: Any) -> str:
    """Writes a value on one line, as YAML does."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_as_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_as_yaml, value)) + "]"
    return str(value)
