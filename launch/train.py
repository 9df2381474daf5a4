"""A training run, from its configuration to its summary."""

import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from launch import datasets
from launch.printing import make_table, print_line
from rlsys.checks.notes import find_notes
from rlsys.checks.unused import find_unused_options
from rlsys.config.schema import Config
from rlsys.episodes.settings import plays
from rlsys.errors import ConfigError, Disagreement, StepAbandoned
from rlsys.runs.checkpoint import Checkpoints, SavedCheckpoint
from rlsys.runs.directory import RunDirectory, read_lines, read_samples
from rlsys.runs.progress import Progress, format_scores
from rlsys.runs.run_log import RunLog
from rlsys.runs.stopping import GRACE_S, StopSignal
from rlsys.text import escape_control_chars
from rlsys.tracking import RunInfo, Tracker
from rlsys.tracking.builtin import missing_libraries
from rlsys.tracking.tracking import Tracking

if TYPE_CHECKING:
    from launch.cluster import ChooseCheckpointing, RunningCluster


@dataclass(frozen=True)
class Advisers:
    """What a run asks of the tools, which are handed in: training imports none of them."""

    choose_checkpointing: "ChooseCheckpointing"
    explain_disagreement: Callable[..., Disagreement]  # agreement, weights, policy, config -> why log-probs differ


def train(
    config: Config, console: Console, advisers: Advisers, *, command: str = "the same command", cause: str = ""
) -> None:
    """Starts or resumes a run.

    `command` is what a user types to resume it. `cause` says why this driver replaces one that was lost.
    """
    refuse_job_folder(Path(config.run.dir).expanduser().resolve())
    stop = StopSignal()
    signal.signal(signal.SIGTERM, lambda *_: stop.request(GRACE_S))
    run, last = RunDirectory(config), config.trainer.steps
    try:
        if cause:
            run.record_event("restart", cause=cause)
        else:
            print_line(console, f"run directory {run.path}")
        checkpoints = Checkpoints(run.path / "checkpoints", config.checkpoint.keep_last)
        newest = checkpoints.load_newest(lambda text: print_line(console, text))
        done = newest.state.step if newest and not newest.state.pending_metrics else 0
        if done >= last:
            clean_up_after_last_step(run)
            outcome = f"finished: {done} steps are done. To go on, set a larger trainer.steps; to start again, another run.dir."
            print_line(console, outcome)
        else:
            with Progress(console, last) as progress:
                done = run_training(config, run, progress, stop, newest, advisers)
        if done >= last:
            return print_summary(run, console)
        run.record_event("stop", cause="stop requested", step=done)
        saved = f"stopped after step {done}, which is saved. Resume with: {command}"
        print_line(console, saved if done else f"stopped before a step was saved. Start again with: {command}")
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk: the error that is raised says so
            run.record_event("stop", cause=f"{type(error).__name__}: {error}"[:2000])
        raise
    finally:
        run.close()


def refuse_job_folder(run: Path) -> None:
    """Ray unpacks a job's files into a folder of its own, and later removes the folder with everything in it."""
    if "working_dir_files" in run.parts:
        raise ConfigError(
            f"run.dir: {run} is in the working directory of a Ray job, which is removed with the job. Give an absolute "
            "path, on storage that all nodes see: run.dir=/shared/runs/NAME"
        )


def clean_up_after_last_step(run: RunDirectory) -> None:
    """Removes what a driver that was killed after its last step has left behind."""
    from launch.ray_session.leftovers import remove_leftovers
    from workers.fleet.process_registry import clear_registry

    remove_leftovers()
    clear_registry(run.logs)


def run_training(
    config: Config,
    run: RunDirectory,
    progress: Progress,
    stop: StopSignal,
    newest: SavedCheckpoint | None,
    advisers: Advisers,
) -> int:
    """Starts the workers and trains, from the newest checkpoint. Returns the last step that is done and saved."""
    from launch.cluster import running_cluster
    from launch.models import find_control_tokens
    from rlsys.models.end_ids import read_end_ids
    from workers.fleet.watchdog import Watchdog

    if problems := missing_libraries(config.tracking):
        raise ConfigError(problems)
    datasets.peek(config)
    for sentence in [*find_unused_options(config), *find_notes(config)]:
        progress.note(sentence)
    watchdog = Watchdog.from_config(config, run.logs, stop, progress.note, run.record_event)
    try:
        tracking = Tracking(config, run.path, progress.note, run.record_event)
        with running_cluster(config, watchdog, advisers.choose_checkpointing) as cluster, tracking:
            from rlsys.sampling.demonstrations import NoEngines
            from rlsys.trainer import Trainer

            run.record_event("start", ray=cluster.address, metrics=cluster.metrics_urls)
            run.warm_up_writer()
            prompts = datasets.load(config, cluster.tokenizer, cluster.limits, progress.note, run.path)
            if prompts.train.take(0, 1)[0].messages and not plays(config):  # for episodes, their processes say it
                end_ids = read_end_ids(cluster.model, cluster.tokenizer, config)
                if sentence := datasets.describe_missing_end(config, cluster.tokenizer, end_ids):
                    progress.note(sentence)
            held_out = {h.name: h.prompts for h in prompts.held_out}
            for note in [*run.notes, *run.check_rows(config, prompts.train, held_out)]:  # before the workers are ready
                progress.note(note)
            cluster.wait_until_ready(prompts.longest_sequence).require_run_directory()
            run.record_inputs(config)
            assert cluster.policy is not None
            tracking.add_tracker("ray", make_ray_metrics(config, run, cluster))
            no_engines = NoEngines()
            trainer = Trainer(
                config,
                train=prompts.train,
                evals=prompts.held_out,
                rollout=cluster.groups.get("rollout", no_engines),
                rewards=cluster.groups.get("reward", no_engines),
                policy=cluster.policy,
                reference=cluster.reference,
                critic=cluster.critic,
                log=RunLog(run, progress, tracking.start),
                explain=partial(advisers.explain_disagreement, policy=cluster.policy, config=config),
                stop=stop,
                control_tokens=find_control_tokens(config, cluster.tokenizer, cluster.limits.vocabulary),
                share_prompts=not cluster.policy.mixers,  # which compute a prompt for each completion
                newest=newest,
            )
            done = trainer.run()
            if lost := trainer.state.step - done:
                progress.note(
                    f"{lost} finished steps could not be saved within {GRACE_S:g} s of the request "
                    "to stop, and run again. A lower checkpoint.every loses fewer"
                )
            progress.note("stopping")
    except StepAbandoned:  # while the workers started
        return newest.state.step if newest else 0
    if done == config.trainer.steps and trainer.state.pending_metrics:
        progress.note("the evaluation of the last step is still to be done: run the same command again")
    elif done == config.trainer.steps:
        run.record_event("done", step=done)
    return done


def make_ray_metrics(config: Config, run: RunDirectory, cluster: "RunningCluster") -> Callable[[RunInfo], Tracker]:
    """The tracker for Ray's dashboard, Prometheus and Grafana."""
    from launch.ray_session.ray_metrics import RayMetrics

    t, events = config.trainer, read_lines(run.path / "events.jsonl")
    return partial(
        RayMetrics,
        samples=t.prompts_per_step * t.samples_per_prompt,
        engines=cluster.rollout.samples_by_engine if "rollout" in cluster.groups else dict,
        verdicts=cluster.rewards.waiting_samples if "reward" in cluster.groups else int,
        restarts=sum(e["event"] == "restart" for e in events),
    )


def print_summary(run: RunDirectory, console: Console) -> None:
    """Prints accuracy before and after, a few completions side by side, and where the run is."""
    evaluated = ("/accuracy", "/loss")
    lines = [line for line in read_lines(run.path / "metrics.jsonl") if any(k.endswith(evaluated) for k in line)]
    console.print()
    if len(lines) > 1:
        first, last = lines[0], lines[-1]
        print_accuracies(first, last, console)
        print_losses(first, last, console)
        if any(key.endswith("/accuracy") for key in last):
            console.print(completions_table(run, int(first["step"]), int(last["step"])))
    print_line(console, f"\nrun directory: {run.path}")
    print_line(console, f"look at it: rlsys report {run.path} --open", "dim")
    print_line(console, f"export the model: rlsys export {run.path} MODEL_DIRECTORY", "dim")


def print_accuracies(first: dict[str, Any], last: dict[str, Any], console: Console) -> None:
    for key in last:
        if key in first and key.startswith("eval/") and key.endswith("/accuracy"):
            source = key.removeprefix("eval/").removesuffix("/accuracy")
            before, after = format_scores([first[key], last[key]])
            measure = "accuracy" if "%" in before else "score"
            print_line(console, f"{source}: held-out {measure} {before} before, {after} after {last['step']} steps")


def print_losses(first: dict[str, Any], last: dict[str, Any], console: Console) -> None:
    for key in last:
        if key in first and key.startswith("eval/") and key.endswith("/loss"):
            source = key.removeprefix("eval/").removesuffix("/loss")
            change = f"{first[key]:.4f} before, {last[key]:.4f} after {last['step']} steps"
            print_line(console, f"{source}: held-out loss {change}")


def completions_table(run: RunDirectory, first_step: int, last_step: int, rows: int = 5) -> Table:
    before, after = (first_per_prompt(read_samples(run.path, f"eval-{step:06d}")) for step in (first_step, last_step))
    names = ("prompt", "before", "", "after", "")
    table = make_table(*(Column(name, max_width=40, overflow="ellipsis", no_wrap=True) for name in names))
    for uid in [uid for uid in after if uid in before][:rows]:
        old, new = before[uid], after[uid]
        texts = (escape_control_chars(text) for text in (new["prompt"], old["completion"], new["completion"]))
        prompt, old_text, new_text = texts
        table.add_row(prompt, old_text, format_score(old["reward"]), new_text, format_score(new["reward"]))
    return table


def first_per_prompt(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The first sample of each prompt, by uid."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(row["uid"], row)
    return first


def format_score(reward: float | None) -> str:
    return "–" if reward is None else f"{reward:g}"
