"""Figures as Ray's own metrics, for its dashboard, Prometheus and Grafana (`launch/grafana.json`). A tracker like the others.

Ray calls them ray_NAME, a counter ray_NAME_total, a histogram ray_NAME_bucket, …_sum and …_count. All of them have the label `run`.
"""

from collections.abc import Callable
from typing import Any

from rlsys.tracking import RunInfo, Tracker

# By what Ray calls it: the figure, and what it is.
GAUGES = {
    "rlsys_step": ("step", "last step that is done"),
    "rlsys_reward_mean": ("reward/mean", "mean reward of the samples of a step"),
    "rlsys_reward_std": ("reward/std", "their deviation"),
    "rlsys_kl": ("kl", "estimate of KL to the reference, per token"),
    "rlsys_entropy": ("entropy", "mean entropy, per token"),
    "rlsys_loss": ("loss", "mean loss of the updates of a step"),
    "rlsys_grad_norm": ("grad_norm", "mean norm of their gradients"),
    "rlsys_learning_rate": ("lr", "learning rate of the last update"),
    "rlsys_clip_fraction": ("clip_fraction", "share of tokens that the clip holds"),
    "rlsys_mismatch_mean": ("mismatch/mean_abs", "mean gap of rollout and old log-probs"),
    "rlsys_mismatch_max": ("mismatch/max_abs", "largest gap of rollout and old log-probs"),
    "rlsys_completion_tokens": ("length/mean", "mean tokens of a completion"),
    "rlsys_truncated_share": ("length/truncated", "share of completions that were cut"),
    "rlsys_groups_equal": ("groups/equal", "groups of a step whose rewards are equal, which teach nothing"),
    "rlsys_lag": ("lag", "updates between a token's weights and those that it trained, at most"),
    "rlsys_tokens_per_second": ("tokens_per_second", "completion tokens over the time of a step"),
    "rlsys_step_seconds": ("time/step", "time of the last step"),
}
PHASES = ("rollout", "reward", "score", "update", "sync")
EVENTS = {  # by kind of event: the counter it is counted in
    "replaced": "rlsys_workers_replaced",
    "stall": "rlsys_stalls",
    "skipped update": "rlsys_updates_skipped",
    "checkpoint": "rlsys_checkpoints",
    "tracker failed": "rlsys_tracker_failures",
}
COUNTERS = {
    "rlsys_tokens": "completion tokens that were trained on",
    "rlsys_samples": "completions with a reward",
    "rlsys_reward_failures": "samples without a verdict, by reason",
    "rlsys_workers_replaced": "workers that were lost and replaced",
    "rlsys_stalls": "workers that were waited for too long",
    "rlsys_updates_skipped": "updates whose loss or gradient was not finite",
    "rlsys_checkpoints": "checkpoints written",
    "rlsys_tracker_failures": "failures of trackers",
}
LABELS = {
    "rlsys_reward_failures": "reason",
    "rlsys_accuracy": "source",
    "rlsys_phase_seconds": "phase",
    "rlsys_engine_samples": "engine",
}
OTHER_GAUGES = {
    "rlsys_steps": "steps that the run is to have",
    "rlsys_samples_per_second": "completions with a reward over the time of a step",
    "rlsys_accuracy": "mean score on a set of eval.datasets",
    "rlsys_phase_seconds": "time of a phase of the last step",
    "rlsys_restarts": "times the run has started itself again",
    "rlsys_engine_samples": "samples that an engine is at now",
    "rlsys_engines_idle": "engines that are at no sample now",
    "rlsys_samples_waiting": "samples that wait for an engine now",
    "rlsys_verdicts_waiting": "samples that wait for a reward process now",
}
HISTOGRAM = "rlsys_step_duration_seconds"
HISTOGRAM_BOUNDS = [0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000]
SamplesByEngine = Callable[[], dict[str, int]]


class RayMetrics(Tracker):
    overwrites = True  # a gauge has no past

    def __init__(
        self, told: RunInfo, *, samples: int, engines: SamplesByEngine, verdicts: Callable[[], int], restarts: int
    ):
        """`samples` in a step; `engines()`: what each is at now, and "" what waits for one; `verdicts()`: what waits for one."""
        from ray.util import metrics

        def made(kind: Any, name: str, text: str, **more: Any) -> Any:
            label = LABELS.get(name)
            keys = ("run", label) if label else ("run",)
            return kind(name, description=text, tag_keys=keys, **more).set_default_tags({"run": told.name})

        gauges = {name: text for name, (_, text) in GAUGES.items()} | OTHER_GAUGES
        self.gauges = {name: made(metrics.Gauge, name, text) for name, text in gauges.items()}
        self.counters = {name: made(metrics.Counter, name, text) for name, text in COUNTERS.items()}
        self.durations = made(metrics.Histogram, HISTOGRAM, "time of a step", boundaries=HISTOGRAM_BOUNDS)
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.in_a_step, self.engines, self.verdicts = samples, engines, verdicts
        self.set_gauge("rlsys_steps", float(told.config["trainer.steps"]))
        self.set_gauge("rlsys_restarts", float(restarts))

    def set_gauge(self, name: str, value: float, **label: str) -> None:
        self.values[name, tuple(label.items())] = value
        self.gauges[name].set(value, tags=label or None)

    def increment(self, name: str, value: float = 1.0, **label: str) -> None:
        if value > 0:
            self.counters[name].inc(value, tags=label or None)

    def step(self, step: int, figures: dict[str, float]) -> None:
        figures = figures | {"step": float(step)}
        for name, (figure, _) in GAUGES.items():
            if figure in figures:
                self.set_gauge(name, figures[figure])
        for figure, value in figures.items():
            kind, _, rest = figure.partition("/")
            if kind == "eval" and figure.endswith("/accuracy"):
                self.set_gauge("rlsys_accuracy", value, source=rest.removesuffix("/accuracy"))
            elif kind == "failure":
                self.increment("rlsys_reward_failures", value, reason=rest)
        for phase in PHASES:
            if f"time/{phase}" in figures:
                self.set_gauge("rlsys_phase_seconds", figures[f"time/{phase}"], phase=phase)
        if seconds := figures.get("time/step"):
            judged = figures.get("reward/asked", self.in_a_step) - figures.get("reward/failed", 0.0)
            self.set_gauge("rlsys_samples_per_second", judged / seconds)
            self.increment("rlsys_samples", judged)
            self.increment("rlsys_tokens", figures.get("tokens", 0.0))
            self.durations.observe(seconds)

    def event(self, event: dict[str, Any]) -> None:
        if name := EVENTS.get(event["event"]):
            self.increment(name)

    def look(self) -> None:
        """What engines are at. Everything else is said again: Ray forgets a gauge that it has not heard of for a while."""
        for (name, label), value in self.values.items():
            self.gauges[name].set(value, tags=dict(label) or None)
        at = self.engines()
        self.set_gauge("rlsys_samples_waiting", float(at.pop("", 0)))
        self.set_gauge("rlsys_verdicts_waiting", float(self.verdicts()))
        self.set_gauge("rlsys_engines_idle", float(sum(not n for n in at.values())))
        for engine, samples in at.items():
            self.set_gauge("rlsys_engine_samples", float(samples), engine=engine)
