"""Compares the log-probs of engines and policy, and looks for the cause of a gap. Trains nothing, writes no run."""

import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from launch import datasets
from launch.printing import make_table, print_line
from launch.tools.diagnosis.explain import Diagnosis, diagnose
from rlsys import agreement
from rlsys.config.schema import Config
from rlsys.runs.checkpoint import list_checkpoints
from rlsys.runs.progress import Progress

PROMPTS = 32


def check_agreement(config: Config, console: Console) -> int:
    """Returns the exit code: 0 if they agree."""
    config = replace(  # without reference and critic, which play no part
        config,
        reference=replace(config.reference, kl_coef=0.0),
        algorithm=replace(config.algorithm, advantage="grpo"),
        eval=replace(config.eval, datasets={}),
    )
    datasets.peek(config)
    from launch.cluster import running_cluster
    from launch.tools.advice import choose_checkpointing
    from workers.fleet.watchdog import Watchdog

    with (
        tempfile.TemporaryDirectory(prefix="rlsys-doctor-") as logs,
        Progress(console, 0) as progress,
        running_cluster(config, Watchdog(Path(logs), note=progress.note), choose_checkpointing) as cluster,
    ):
        prompts = datasets.load(config, cluster.tokenizer, cluster.limits, progress.note)
        cluster.wait_until_ready(prompts.longest_sequence)
        assert cluster.policy is not None
        cluster.policy.sync(0)
        progress.note(f"sampling {PROMPTS} prompts")
        measured = agreement.measure_agreement(cluster.rollout, cluster.policy, prompts.train.take(0, PROMPTS), config)
        progress.note("looking for the cause of a gap")
        diagnosis = diagnose(measured, checkpoint_weights(config), policy=cluster.policy, config=config)
    return print_diagnosis(diagnosis, config, console)


def checkpoint_weights(config: Config) -> dict[str, str]:
    """Weights that engines may still have instead of the policy's: those of the newest checkpoint."""
    checkpoints = list_checkpoints(Path(config.run.dir).expanduser() / "checkpoints")
    return {f"the checkpoint of step {step}": str(folder / "model") for step, folder in checkpoints[-1:]}


def print_diagnosis(diagnosis: Diagnosis, config: Config, console: Console) -> int:
    """Prints the gap, what each supposition leaves of it, and the verdict. Returns the exit code."""
    agree, gap = diagnosis.agreement.within_limit, diagnosis.agreement
    rows = make_table("supposition", "mean gap", "largest")
    rows.add_row("as they are", f"{gap.mean:.1e}", f"{gap.largest:.1e}")
    for s in diagnosis.tested:
        style = "bold" if s is diagnosis.explanation and not agree else None
        rows.add_row(f"{s.cause}: {s.claim}", f"{s.mean:.1e}", f"{s.largest:.1e}", style=style)
    for cause, why in diagnosis.untested.items():
        rows.add_row(f"{cause}: {why}", "–", "–", style="dim")
    console.print()
    console.print(rows)
    console.print()
    engine, policy = config.rollout.dtype, config.policy.dtype
    scale = f"; bfloat16 alone would make {diagnosis.bfloat16_gap:.1e}" if diagnosis.bfloat16_gap is not None else ""
    print_line(console, f"gap: |rollout - policy| log-prob, engines in {engine}, policy in {policy}{scale}", "dim")
    for remark in diagnosis.tokenizer_remarks:
        print_line(console, f"note: {remark}", "yellow")
    if agree:
        print_line(console, f"✓ {gap}; the mean may be {gap.limit:g}", "green")
        return 0
    print_line(console, f"✗ {gap}", "red")
    print_line(console, f"cause: {diagnosis}", "red")
    return 1
