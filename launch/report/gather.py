"""From a run directory to what the page shows of it, as plain data."""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launch.report.charts import PHASES, choose_charts
from launch.report.lanes import worker_lanes
from launch.tables import option_comments
from rlsys import __version__
from rlsys.analysis import findings
from rlsys.analysis.run_events import RunEvent, last_ending, parse_events
from rlsys.checks import GROUP_RELATIVE
from rlsys.config import loading
from rlsys.config.schema import Config, ConfigError
from rlsys.config.secrets import redact, redact_nested
from rlsys.estimates import batch_math
from rlsys.runs.directory import read_lines

UNLISTED_EVENTS = ("sync", "checkpoint")  # events of every step; the page does not list them


@dataclass(frozen=True)
class ReportedRun:
    path: Path
    metrics: list[dict[str, float]]  # of metrics.jsonl
    events: list[RunEvent]
    config: Config | None  # None: of a version that this one cannot read
    options: dict[str, Any]  # by name, as far as config.yaml can be read
    config_problem: str  # why there is no config

    @classmethod
    def read(cls, path: Path) -> "ReportedRun":
        path = path.expanduser().resolve()
        if not (path / "config.yaml").is_file():
            what = "is no run: it has no config.yaml" if path.exists() else "does not exist"
            raise ConfigError(f"{path} {what}. Give the directory of a run, such as runs/demo.")
        lines = [line for line in read_lines(path / "metrics.jsonl") if isinstance(line.get("step"), int | float)]
        config, options, trouble = _settings(path / "config.yaml")
        return cls(path, lines, parse_events(read_lines(path / "events.jsonl")), config, options, trouble)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def done(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0


def _settings(file: Path) -> tuple[Config | None, dict[str, Any], str]:
    try:
        tree = OmegaConf.load(file)
        assert isinstance(tree, DictConfig)
    except Exception as error:
        return None, {}, f"config.yaml cannot be read: {error}"
    try:
        config = loading.build_config(tree, [], str(file))
        return config, loading.flatten(config), ""
    except ConfigError as error:
        flat = {
            f"{section}.{name}": OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            for section, members in tree.items()
            if isinstance(members, DictConfig)
            for name, value in members.items()
        }
        return None, flat, f"config.yaml is of another version of rlsys: {error.problems[0]}"


def page_data(runs: list[ReportedRun]) -> dict[str, Any]:
    """All but the samples."""
    methods = {run.config.algorithm.advantage for run in runs if run.config}
    drawn = choose_charts([line for run in runs for line in run.metrics], compared=methods <= set(GROUP_RELATIVE))
    return {
        "version": __version__,
        "runs": [
            run_page_data(run, name, with_lanes=len(runs) == 1)
            for run, name in zip(runs, display_names(runs), strict=True)
        ],
        "charts": drawn,
        "phases": list(PHASES),
        "differences": differences(runs) if len(runs) > 1 else [],
        "checks": findings.check_descriptions(),
    }


def display_names(runs: list[ReportedRun]) -> list[str]:
    """Of their directories; those of one name have their parent's before it, or all of their path."""
    for name in (lambda p: p.name, lambda p: "/".join(p.parts[-2:]), str):
        found = [name(run.path) for run in runs]
        if len(set(found)) == len(found):
            return found
    raise ConfigError(f"{found[0]} is given twice. A comparison takes different runs.")


def run_page_data(run: ReportedRun, name: str, with_lanes: bool) -> dict[str, Any]:
    drawn = worker_lanes(run.path) if with_lanes else None
    busy = {w["name"]: w["busy"] for w in drawn["workers"]} if drawn else {}
    found = findings.run_checks(findings.RunData(run.metrics, run.events, run.config, busy))
    return {
        "name": redact(name),
        "model": redact(str(run.options.get("model.path", ""))),
        "steps": int(run.options.get("trainer.steps", 0) or run.done),
        "done": run.done,
        "state": run_state(run),
        "figures": metric_columns(run.metrics),
        "events": [_event(h) for h in run.events if h.kind not in UNLISTED_EVENTS],
        "findings": [redact_nested(vars(f)) for f in found],
        "missing": redact_nested(missing_data(run, drawn is not None or not with_lanes)),
        "lanes": drawn,
        "groups": run.config.trainer.prompts_per_step if run.config else 0,
        "tables": redact_nested(settings_tables(run)),
        "options": option_rows(run),
    }


def metric_columns(lines: list[dict[str, float]]) -> dict[str, list[float | None]]:
    """By name, a number or None for each line: JSON knows no nan and no infinity."""
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [_finite(line.get(name)) for line in lines] for name in names}


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def run_state(run: ReportedRun) -> dict[str, Any]:
    """How it stands: done, stopped, failed, or neither, with the time of its last sign of life."""
    last = last_ending(run.events)
    kind = (
        "open" if last is None else "done" if last.kind == "done" else "stopped" if last.tone != "problem" else "failed"
    )
    times = [h.time for h in run.events if h.time]
    for name in ("metrics.jsonl", "events.jsonl"):
        with contextlib.suppress(OSError):
            times.append((run.path / name).stat().st_mtime)
    starts = [h.time for h in run.events if h.kind in ("start", "begin") and h.time]
    return {
        "kind": kind,
        "began": min(starts, default=None),
        "seen": (last.time if last and last.time else max(times, default=None)),
    }


def _event(h: RunEvent) -> dict[str, Any]:
    facts = {k: v for k, v in h.facts.items() if v not in (None, "", [])}
    return redact_nested(
        {"step": h.step, "time": h.time, "kind": h.kind, "tone": h.tone, "title": h.title, "facts": facts}
    )


def missing_data(run: ReportedRun, timeline: bool) -> list[str]:
    """What a reader would look for and not find, and why."""
    found = [run.config_problem] if run.config_problem else []
    trained = [line for line in run.metrics if "time/step" in line]
    if not trained:
        found.append("No step has been finished yet: there are no curves.")
    elif len(trained) == 1:
        found.append("One step has been finished: curves are points.")
    if trained and not any(n.endswith("/accuracy") for line in run.metrics for n in line):
        found.append(
            "Nothing held out was evaluated (eval.datasets is empty): the reward is of training prompts alone."
        )
    if trained and not timeline:
        found.append(
            "No timeline is recorded in logs/*.spans: runs of earlier versions have none, so there are no lanes."
        )
    if not run.events:
        found.append("There is no events.jsonl: faults and restarts are not known.")
    return found


def settings_tables(run: ReportedRun) -> dict[str, list[list[Any]]]:
    if run.config is None:
        return {}
    return {
        "Batch arithmetic": [[what, number, how] for what, how, number in batch_math.batch_rows(run.config)],
        "Method": [list(row) for row in batch_math.method_rows(run.config)],
        "Data": [list(row) for row in batch_math.dataset_rows(run.config)],
        "Processes": [list(row) for row in batch_math.process_rows(run.config)],
    }


def option_rows(run: ReportedRun) -> list[dict[str, Any]]:
    """Every option, whether it is the default, and what it means."""
    defaults, meaning = loading.flatten(Config()), option_comments()
    ours = {key: value for key, value in run.options.items() if key != "run.dir"}
    return [
        {
            "name": key,
            "value": redact_nested(_text(value)),
            "default": _text(defaults[key]) if key in defaults else None,
            "differs": key not in defaults or value != defaults[key],
            "meaning": meaning.get(key, ""),
        }
        for key, value in ours.items()
    ]


def differences(runs: list[ReportedRun]) -> list[dict[str, Any]]:
    """Options in which the runs differ, with each run's value."""
    keys = dict.fromkeys(key for run in runs for key in run.options if key != "run.dir")
    rows = [{"name": key, "values": [redact_nested(_text(run.options.get(key))) for run in runs]} for key in keys]
    return [row for row in rows if len(set(row["values"])) > 1]


def _text(value: Any) -> str:
    """As YAML would have it on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return str(value)
