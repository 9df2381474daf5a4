"""Exports a run's metrics as Ray's own, for its dashboard, Prometheus and Grafana (`launch/grafana.json`).

Ray exports a gauge as ray_NAME, a counter as ray_NAME_total, a histogram as ray_NAME_bucket, …_sum and …_count. All
have the label `run`.
"""

from collections.abc import Callable
from typing import Any

from rlsys.tracking import RunInfo, Tracker

# Ray's name → our metric, and its description.
GAUGES = {
    "rlsys_step": ("step", "last step done"),
    "rlsys_reward_mean": ("reward/mean", "mean reward of the samples of a step"),
    "rlsys_reward_std": ("reward/std", "standard deviation of the rewards of a step"),
    "rlsys_kl": ("kl", "estimate of KL to the reference, per token"),
    "rlsys_entropy": ("entropy", "mean entropy, per token"),
    "rlsys_loss": ("loss", "mean loss of the updates of a step"),
    "rlsys_grad_norm": ("grad_norm", "mean gradient norm of the updates of a step"),
    "rlsys_learning_rate": ("lr", "learning rate of the last update"),
    "rlsys_clip_fraction": ("clip_fraction", "share of tokens whose gradient the clip stops"),
    "rlsys_mismatch_mean": ("mismatch/mean_abs", "mean gap of rollout and old log-probs"),
    "rlsys_mismatch_max": ("mismatch/max_abs", "largest gap of rollout and old log-probs"),
    "rlsys_completion_tokens": ("length/mean", "mean tokens of a completion"),
    "rlsys_truncated_share": ("length/truncated", "share of completions that were truncated"),
    "rlsys_groups_equal": ("groups/equal", "groups of a step with equal rewards, which have no gradient"),
    "rlsys_lag": ("lag", "most updates between the weights that sampled a token and those it trained"),
    "rlsys_tokens_per_second": ("tokens_per_second", "completion tokens over the time of a step"),
    "rlsys_step_seconds": ("time/step", "time of the last step"),
}
PHASES = ("rollout", "reward", "score", "update", "sync")
EVENTS = {  # kind of event → its counter
    "replaced": "rlsys_workers_replaced",
    "stall": "rlsys_stalls",
    "skipped update": "rlsys_updates_skipped",
    "checkpoint": "rlsys_checkpoints",
    "tracker failed": "rlsys_tracker_failures",
}
COUNTERS = {
    "rlsys_tokens": "completion tokens that were trained on",
    "rlsys_samples": "completions with a reward",
    "rlsys_reward_failures": "samples whose reward failed, by reason",
    "rlsys_workers_replaced": "workers that were lost and replaced",
    "rlsys_stalls": "times that workers stalled",
    "rlsys_updates_skipped": "updates whose loss or gradient was not finite",
    "rlsys_checkpoints": "checkpoints written",
    "rlsys_tracker_failures": "failures of other trackers",
}
LABELS = {
    "rlsys_reward_failures": "reason",
    "rlsys_accuracy": "source",
    "rlsys_phase_seconds": "phase",
    "rlsys_engine_samples": "engine",
}
OTHER_GAUGES = {
    "rlsys_steps": "steps the run will have",
    "rlsys_samples_per_second": "completions with a reward over the time of a step",
    "rlsys_accuracy": "mean score on a set of eval.datasets",
    "rlsys_phase_seconds": "time of a phase of the last step",
    "rlsys_restarts": "times the run has restarted itself",
    "rlsys_engine_samples": "samples running in an engine",
    "rlsys_engines_idle": "engines without a sample",
    "rlsys_samples_waiting": "samples that wait for an engine",
    "rlsys_verdicts_waiting": "samples that wait for a reward process",
}
HISTOGRAM = "rlsys_step_duration_seconds"
HISTOGRAM_BOUNDS = [0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000]
SamplesByEngine = Callable[[], dict[str, int]]


class RayMetrics(Tracker):
    overwrites = True  # a gauge has only its last value

    def __init__(
        self, run: RunInfo, *, samples: int, engines: SamplesByEngine, verdicts: Callable[[], int], restarts: int
    ):
        """`samples` is the number of samples in a step.

        `engines()` counts the running samples by engine, and under "" those that wait for an engine. `verdicts()`
        counts the samples that wait for a reward process.
        """
        from ray.util import metrics

        def make(kind: Any, name: str, text: str, **options: Any) -> Any:
            label = LABELS.get(name)
            keys = ("run", label) if label else ("run",)
            return kind(name, description=text, tag_keys=keys, **options).set_default_tags({"run": run.name})

        gauges = {name: text for name, (_, text) in GAUGES.items()} | OTHER_GAUGES
        self.gauges = {name: make(metrics.Gauge, name, text) for name, text in gauges.items()}
        self.counters = {name: make(metrics.Counter, name, text) for name, text in COUNTERS.items()}
        self.durations = make(metrics.Histogram, HISTOGRAM, "time of a step", boundaries=HISTOGRAM_BOUNDS)
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}  # of each gauge, by name and label
        self.samples_per_step, self.engines, self.verdicts = samples, engines, verdicts
        self.set_gauge("rlsys_steps", float(run.config["trainer.steps"]))
        self.set_gauge("rlsys_restarts", float(restarts))

    def set_gauge(self, name: str, value: float, **label: str) -> None:
        self.values[name, tuple(label.items())] = value
        self.gauges[name].set(value, tags=label or None)

    def increment(self, name: str, value: float = 1.0, **label: str) -> None:
        if value > 0:
            self.counters[name].inc(value, tags=label or None)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        metrics = metrics | {"step": float(step)}
        for name, (metric, _) in GAUGES.items():
            if metric in metrics:
                self.set_gauge(name, metrics[metric])
        for metric, value in metrics.items():
            kind, _, rest = metric.partition("/")
            if kind == "eval" and metric.endswith("/accuracy"):
                self.set_gauge("rlsys_accuracy", value, source=rest.removesuffix("/accuracy"))
            elif kind == "failure":
                self.increment("rlsys_reward_failures", value, reason=rest)
        for phase in PHASES:
            if f"time/{phase}" in metrics:
                self.set_gauge("rlsys_phase_seconds", metrics[f"time/{phase}"], phase=phase)
        if seconds := metrics.get("time/step"):
            judged = metrics.get("reward/requested", self.samples_per_step) - metrics.get("reward/failed", 0.0)
            self.set_gauge("rlsys_samples_per_second", judged / seconds)
            self.increment("rlsys_samples", judged)
            self.increment("rlsys_tokens", metrics.get("tokens", 0.0))
            self.durations.observe(seconds)

    def event(self, event: dict[str, Any]) -> None:
        if name := EVENTS.get(event["event"]):
            self.increment(name)

    def poll(self) -> None:
        """Updates the gauges of engines and queues.

        Sets all others again: Ray drops a gauge that was not set for a while.
        """
        for (name, label), value in self.values.items():
            self.gauges[name].set(value, tags=dict(label) or None)
        running = self.engines()
        self.set_gauge("rlsys_samples_waiting", float(running.pop("", 0)))
        self.set_gauge("rlsys_verdicts_waiting", float(self.verdicts()))
        self.set_gauge("rlsys_engines_idle", float(sum(not n for n in running.values())))
        for engine, samples in running.items():
            self.set_gauge("rlsys_engine_samples", float(samples), engine=engine)
