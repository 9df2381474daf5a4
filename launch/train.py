"""A training run from configuration to summary."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch import datasets
from rlsys import checkpoint
from rlsys.config import Config
from rlsys.progress import Progress
from rlsys.run_directory import RunDirectory, read_lines, read_samples


def train(config: Config, console: Console) -> None:
    run = RunDirectory(config)
    try:
        console.print(f"run directory {run.path}", highlight=False, soft_wrap=True)
        if (done := finished_steps(run)) >= config.trainer.steps:
            console.print(
                f"finished: {done} steps are done. A larger trainer.steps goes on, another run.dir starts anew."
            )
        else:
            with Progress(console, config.trainer.steps) as progress:
                _train(config, run, progress)
        summary(config, run, console)
    except BaseException as error:
        run.event("stop", cause=f"{type(error).__name__}: {error}"[:2000])
        raise
    finally:
        run.close()


def _train(config: Config, run: RunDirectory, progress: Progress) -> None:
    from launch.cluster import started
    from rlsys.trainer import Trainer

    datasets.peek(config)
    with started(config, run.logs, progress.note) as cluster:
        run.event("start", ray=cluster.address)
        prompts = datasets.load(config, cluster.tokenizer, cluster.window, progress.note, run.path)
        cluster.ready(prompts.longest_prompt)
        assert cluster.policy is not None
        Trainer(
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
        ).run()
        progress.note("stopping")
    run.event("done", step=config.trainer.steps)


def finished_steps(run: RunDirectory) -> int:
    there = checkpoint.found(run.path / "checkpoints")
    return there[-1][0] if there else 0


def summary(config: Config, run: RunDirectory, console: Console) -> None:
    """Where the run is, accuracy before and after, and a few completions side by side."""
    lines = [line for line in read_lines(run.path / "metrics.jsonl") if any(k.endswith("/accuracy") for k in line)]
    console.print()
    if len(lines) > 1:
        for key in (k for k in lines[-1] if k in lines[0] and k.startswith("eval/") and k.endswith("/accuracy")):
            source = key.removeprefix("eval/").removesuffix("/accuracy")
            console.print(
                f"{source}: held-out accuracy {lines[0][key]:.1%} before, {lines[-1][key]:.1%} after {lines[-1]['step']} steps"
            )
        before, after = (read_samples(run.path, f"eval-{line['step']:06d}") for line in (lines[0], lines[-1]))
        then = first_of_each(before)
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("prompt", "before", "", "after", ""):
            table.add_column(name, max_width=40, overflow="ellipsis", no_wrap=True)
        for row in [r for uid, r in first_of_each(after).items() if uid in then][:5]:
            old = then[row["uid"]]
            table.add_row(
                Text(row["prompt"]),
                Text(old["completion"]),
                score(old["reward"]),
                Text(row["completion"]),
                score(row["reward"]),
            )
        console.print(table)
    console.print(f"\nrun directory: {run.path}", highlight=False, soft_wrap=True)
    console.print(
        f"export the model: rlsys export {run.path} MODEL_DIRECTORY", style="dim", highlight=False, soft_wrap=True
    )


def first_of_each(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The first sample of each prompt, by uid."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["uid"], row)
    return found


def score(reward: float | None) -> str:
    return "–" if reward is None else f"{reward:g}"
