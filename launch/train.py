"""A training run from configuration to summary."""

import contextlib
import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from launch import datasets
from launch.printing import print_line
from rlsys.config.schema import Config, ConfigError
from rlsys.runs.checkpoint import Checkpoints
from rlsys.runs.directory import RunDirectory, read_lines, read_samples
from rlsys.runs.errors import StepAbandoned
from rlsys.runs.progress import Progress, format_scores
from rlsys.runs.stopping import StopSignal
from rlsys.text import escape_control_chars
from rlsys.tracking import RunInfo, Tracker
from rlsys.tracking.builtin import missing_libraries
from rlsys.tracking.tracking import Tracking

if TYPE_CHECKING:
    from launch.cluster import RunningCluster


def train(config: Config, console: Console, *, command: str = "the same command", cause: str = "") -> None:
    """Runs, or goes on. `cause` is why a driver takes over from another one; `command` is what a user types to go on."""
    refuse_job_folder(Path(config.run.dir).expanduser().resolve())
    stop = StopSignal()
    signal.signal(signal.SIGTERM, lambda *_: stop.request(config.run.grace_s))
    run = RunDirectory(config)
    try:
        if cause:
            run.record_event("restart", cause=cause)
        else:
            print_line(console, f"run directory {run.path}")
        last = config.trainer.steps
        checkpoints = Checkpoints(run.path / "checkpoints", config.checkpoint.keep_last)
        there = checkpoints.load_newest(lambda text: print_line(console, text))
        done = there.step if there and not there.state["owed"] else 0
        if done >= last:
            from launch.local_ray import remove_leftovers
            from workers.supervision.process_registry import clear_registry

            remove_leftovers()  # where it was killed after its last step
            clear_registry(run.logs)
            print_line(
                console,
                f"finished: {done} steps are done. A larger trainer.steps goes on, another run.dir starts anew.",
            )
        else:
            with Progress(console, last) as progress:
                done = _train(config, run, progress, stop)
        if done >= last:
            return print_summary(config, run, console)
        run.record_event("stop", cause="asked to stop", step=done)
        print_line(
            console,
            f"stopped after step {done}, which is saved. Resume with: {command}"
            if done
            else f"stopped before the first step was done. Start again with: {command}",
        )
    except BaseException as error:
        with contextlib.suppress(OSError):  # on a full disk: what is raised says so
            run.record_event("stop", cause=f"{type(error).__name__}: {error}"[:2000])
        raise
    finally:
        run.close()


def refuse_job_folder(place: Path) -> None:
    """Ray unpacks what came with a job into a folder of its own, and removes that at some time after it."""
    if "working_dir_files" in place.parts:
        raise ConfigError(
            f"run.dir: {place} is in the working directory of a Ray job, which goes with the job. Give an absolute path, on "
            "storage that all nodes see: run.dir=/shared/runs/NAME"
        )


def _train(config: Config, run: RunDirectory, progress: Progress, stop: StopSignal) -> int:
    """The last step that is done and saved."""
    from launch.cluster import running_cluster
    from workers.supervision.watchdog import Watchdog

    if unknown := missing_libraries(config.tracking):
        raise ConfigError(unknown)
    datasets.peek(config)
    watch = Watchdog.from_config(config, run.logs, stop, progress.note, run.record_event)
    try:
        tracking = Tracking(config, run.path, progress.note, run.record_event)
        with running_cluster(config, watch) as cluster, tracking:
            from rlsys.trainer import Trainer

            run.record_event("start", ray=cluster.address, metrics=cluster.metrics_urls)
            run.warm_up_writer()
            prompts = datasets.load(config, cluster.tokenizer, cluster.window, progress.note, run.path)
            cluster.wait_until_ready(prompts.longest_prompt).require_run_directory()
            assert cluster.policy is not None
            if config.tracking.ray:
                tracking.add_tracker("ray", make_ray_metrics(config, run, cluster))
            done = Trainer(
                config,
                train=prompts.train,
                evals=prompts.held_out,
                rollout=cluster.rollout,
                rewards=cluster.rewards,
                policy=cluster.policy,
                reference=cluster.reference,
                critic=cluster.critic,
                run=run,
                progress=progress,
                stop=stop,
                tracking=tracking,
            ).run()
            progress.note("stopping")
    except StepAbandoned:  # while workers were coming up
        return Checkpoints(run.path / "checkpoints", 0).last_step
    if done == config.trainer.steps:
        run.record_event("done", step=done)
    return done


def make_ray_metrics(config: Config, run: RunDirectory, cluster: "RunningCluster") -> Callable[[RunInfo], Tracker]:
    """The figures for Ray's dashboard, Prometheus and Grafana."""
    from workers.supervision.ray_metrics import RayMetrics

    t, events = config.trainer, read_lines(run.path / "events.jsonl")
    return functools.partial(
        RayMetrics,
        samples=t.prompts_per_step * t.samples_per_prompt,
        engines=cluster.rollout.samples_by_engine,
        verdicts=cluster.rewards.waiting_samples,
        restarts=sum(e["event"] == "restart" for e in events),
    )


def print_summary(config: Config, run: RunDirectory, console: Console) -> None:
    """Where the run is, accuracy before and after, and a few completions side by side."""
    lines = [line for line in read_lines(run.path / "metrics.jsonl") if any(k.endswith("/accuracy") for k in line)]
    console.print()
    if len(lines) > 1:
        for key in (k for k in lines[-1] if k in lines[0] and k.startswith("eval/") and k.endswith("/accuracy")):
            source = key.removeprefix("eval/").removesuffix("/accuracy")
            before, after = format_scores([lines[0][key], lines[-1][key]])
            what = "accuracy" if "%" in before else "score"
            print_line(console, f"{source}: held-out {what} {before} before, {after} after {lines[-1]['step']} steps")
        first, last = (read_samples(run.path, f"eval-{line['step']:06d}") for line in (lines[0], lines[-1]))
        then = first_per_prompt(first)
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("prompt", "before", "", "after", ""):
            table.add_column(name, max_width=40, overflow="ellipsis", no_wrap=True)
        for row in [r for uid, r in first_per_prompt(last).items() if uid in then][:5]:
            old = then[row["uid"]]
            table.add_row(
                escape_control_chars(row["prompt"]),
                escape_control_chars(old["completion"]),
                format_score(old["reward"]),
                escape_control_chars(row["completion"]),
                format_score(row["reward"]),
            )
        console.print(table)
    print_line(console, f"\nrun directory: {run.path}")
    print_line(console, f"export the model: rlsys export {run.path} MODEL_DIRECTORY", "dim")


def first_per_prompt(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The first sample of each prompt, by uid."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["uid"], row)
    return found


def format_score(reward: float | None) -> str:
    return "–" if reward is None else f"{reward:g}"
