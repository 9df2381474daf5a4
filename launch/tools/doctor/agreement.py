"""Whether engines and policy compute the same log-probs, and what explains it if they do not. Trains nothing, writes no run."""

import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from launch import datasets
from launch.printing import say, table
from rlsys.config.schema import Config
from rlsys.numerics import agreement
from rlsys.numerics.diagnosis import Diagnosis, diagnose
from rlsys.runs.checkpoint import found
from rlsys.runs.progress import Progress

PROMPTS = 32


def doctor(config: Config, console: Console) -> int:
    """The exit code: 0 if they agree."""
    # Neither is asked anything.
    config = replace(
        config,
        reference=replace(config.reference, kl_coef=0.0),
        algorithm=replace(config.algorithm, advantage="grpo"),
        eval=replace(config.eval, datasets={}),
    )
    datasets.peek(config)
    from launch.cluster import started
    from workers.supervision.waiting import Watch

    with (
        tempfile.TemporaryDirectory(prefix="rlsys-doctor-") as logs,
        Progress(console, 0) as progress,
        started(config, Watch(Path(logs), note=progress.note)) as cluster,
    ):
        prompts = datasets.load(config, cluster.tokenizer, cluster.window, progress.note).train
        cluster.ready(prompts.longest)
        assert cluster.policy is not None
        cluster.policy.sync(0)
        progress.note(f"sampling {PROMPTS} prompts")
        measured = agreement.measure(cluster.rollout, cluster.policy, prompts.take(0, PROMPTS), config)
        progress.note("trying what could explain a gap")
        diagnosis = diagnose(measured, cluster.policy, config, older_weights(config))
    return show(diagnosis, config, console)


def older_weights(config: Config) -> dict[str, str]:
    """What engines may have in place of the policy's weights, beside those of step 0: the newest checkpoint's."""
    there = found(Path(config.run.dir).expanduser() / "checkpoints")
    return {f"the checkpoint of step {step}": str(folder / "model") for step, folder in there[-1:]}


def show(diagnosis: Diagnosis, config: Config, console: Console) -> int:
    """What was measured, what each supposition leaves of it, and the verdict."""
    fine, before = diagnosis.found.fine, diagnosis.found
    rows = table("supposition", "mean gap", "largest")
    rows.add_row("as they are", f"{before.mean:.1e}", f"{before.largest:.1e}")
    for s in diagnosis.tried:
        style = "bold" if s is diagnosis.best and not fine else None
        rows.add_row(f"{s.cause}: {s.claim}", f"{s.mean:.1e}", f"{s.largest:.1e}", style=style)
    for cause, why in diagnosis.untried.items():
        rows.add_row(f"{cause}: {why}", "–", "–", style="dim")
    console.print()
    console.print(rows)
    console.print()
    engine, policy = config.rollout.dtype, config.policy.dtype
    scale = f"; bfloat16 alone would make {diagnosis.rounding:.1e}" if diagnosis.rounding is not None else ""
    say(console, f"gap: |rollout - policy| log-prob, engines in {engine}, policy in {policy}{scale}", "dim")
    for remark in diagnosis.remarks:
        say(console, f"note: {remark}", "yellow")
    if fine:
        say(console, f"✓ {before}; the mean may be {before.limit:g}", "green")
        return 0
    say(console, f"✗ {before}", "red")
    say(console, f"cause: {diagnosis}", "red")
    return 1
