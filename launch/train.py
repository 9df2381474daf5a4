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
from launch.printing import say
from rlsys.config.schema import Config, ConfigError
from rlsys.runs.checkpoint import Checkpoints
from rlsys.runs.directory import RunDirectory, read_lines, read_samples
from rlsys.runs.errors import Abandoned
from rlsys.runs.progress import Progress, as_shares
from rlsys.runs.stopping import Stop
from rlsys.text import visible
from rlsys.tracking import Told, Tracker
from rlsys.tracking.known import missing
from rlsys.tracking.tracking import Tracking

if TYPE_CHECKING:
    from launch.cluster import Cluster


def train(config: Config, console: Console, *, command: str = "the same command", cause: str = "") -> None:
    """Runs, or goes on. `cause` is why a driver takes over from another one; `command` is what a user types to go on."""
    refuse_folder_of_a_job(Path(config.run.dir).expanduser().resolve())
    stop = Stop()
    signal.signal(signal.SIGTERM, lambda *_: stop.request(config.run.grace_s))
    run = RunDirectory(config)
    try:
        if cause:
            run.event("restart", cause=cause)
        else:
            say(console, f"run directory {run.path}")
        last = config.trainer.steps
        checkpoints = Checkpoints(run.path / "checkpoints", config.checkpoint.keep_last)
        there = checkpoints.newest(lambda text: say(console, text))
        done = there.step if there and not there.state["owed"] else 0
        if done >= last:
            from launch.local_ray import remove_leftovers
            from workers.supervision.places import forget

            remove_leftovers()  # where it was killed after its last step
            forget(run.logs)
            say(
                console,
                f"finished: {done} steps are done. A larger trainer.steps goes on, another run.dir starts anew.",
            )
        else:
            with Progress(console, last) as progress:
                done = _train(config, run, progress, stop)
        if done >= last:
            return summary(config, run, console)
        run.event("stop", cause="asked to stop", step=done)
        say(
            console,
            f"stopped after step {done}, which is saved. Resume with: {command}"
            if done
            else f"stopped before the first step was done. Start again with: {command}",
        )
    except BaseException as error:
        with contextlib.suppress(OSError):  # on a full disk: what is raised says so
            run.event("stop", cause=f"{type(error).__name__}: {error}"[:2000])
        raise
    finally:
        run.close()


def refuse_folder_of_a_job(place: Path) -> None:
    """Ray unpacks what came with a job into a folder of its own, and removes that at some time after it."""
    if "working_dir_files" in place.parts:
        raise ConfigError(
            f"run.dir: {place} is in the working directory of a Ray job, which goes with the job. Give an absolute path, on "
            "storage that all nodes see: run.dir=/shared/runs/NAME"
        )


def _train(config: Config, run: RunDirectory, progress: Progress, stop: Stop) -> int:
    """The last step that is done and saved."""
    from launch.cluster import started
    from workers.supervision.waiting import Watch

    if unknown := missing(config.tracking):
        raise ConfigError(unknown)
    datasets.peek(config)
    watch = Watch.of(config, run.logs, stop, progress.note, run.event)
    try:
        tracking = Tracking(config, run.path, progress.note, run.event)
        with started(config, watch) as cluster, tracking:
            from rlsys.trainer import Trainer

            run.event("start", ray=cluster.address, metrics=cluster.metrics)
            run.prepare()
            prompts = datasets.load(config, cluster.tokenizer, cluster.window, progress.note, run.path)
            cluster.ready(prompts.longest_prompt).require_run_directory()
            assert cluster.policy is not None
            if config.tracking.ray:
                tracking.add("ray", ray_metrics(config, run, cluster))
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
    except Abandoned:  # while workers were coming up
        return Checkpoints(run.path / "checkpoints", 0).last
    if done == config.trainer.steps:
        run.event("done", step=done)
    return done


def ray_metrics(config: Config, run: RunDirectory, cluster: "Cluster") -> Callable[[Told], Tracker]:
    """The figures for Ray's dashboard, Prometheus and Grafana."""
    from workers.supervision.ray_metrics import RayMetrics

    t, events = config.trainer, read_lines(run.path / "events.jsonl")
    return functools.partial(
        RayMetrics,
        samples=t.prompts_per_step * t.samples_per_prompt,
        engines=cluster.rollout.load,
        verdicts=cluster.rewards.waiting,
        restarts=sum(e["event"] == "restart" for e in events),
    )


def summary(config: Config, run: RunDirectory, console: Console) -> None:
    """Where the run is, accuracy before and after, and a few completions side by side."""
    lines = [line for line in read_lines(run.path / "metrics.jsonl") if any(k.endswith("/accuracy") for k in line)]
    console.print()
    if len(lines) > 1:
        for key in (k for k in lines[-1] if k in lines[0] and k.startswith("eval/") and k.endswith("/accuracy")):
            source = key.removeprefix("eval/").removesuffix("/accuracy")
            before, after = as_shares([lines[0][key], lines[-1][key]])
            what = "accuracy" if "%" in before else "score"
            say(console, f"{source}: held-out {what} {before} before, {after} after {lines[-1]['step']} steps")
        first, last = (read_samples(run.path, f"eval-{line['step']:06d}") for line in (lines[0], lines[-1]))
        then = first_of_each(first)
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("prompt", "before", "", "after", ""):
            table.add_column(name, max_width=40, overflow="ellipsis", no_wrap=True)
        for row in [r for uid, r in first_of_each(last).items() if uid in then][:5]:
            old = then[row["uid"]]
            table.add_row(
                visible(row["prompt"]),
                visible(old["completion"]),
                score(old["reward"]),
                visible(row["completion"]),
                score(row["reward"]),
            )
        console.print(table)
    say(console, f"\nrun directory: {run.path}")
    say(console, f"export the model: rlsys export {run.path} MODEL_DIRECTORY", "dim")


def first_of_each(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The first sample of each prompt, by uid."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["uid"], row)
    return found


def score(reward: float | None) -> str:
    return "–" if reward is None else f"{reward:g}"
