"""A bench's figures, on the console."""

from rich.console import Console

from launch.printing import say, table
from launch.tools.bench.figures import Report
from rlsys.config.schema import Config


def show(report: Report, config: Config, console: Console) -> None:
    w, figures = report.work, report.as_dict()
    phases = table("phase", "seconds", "share", "FLOP use")
    for name, seconds in figures["phases_s"].items():
        phases.add_row(
            name, f"{seconds:.3f}", f"{seconds / report.seconds:.1%}", percent(figures["flop_use"].get(name))
        )
    spread = f"{min(report.step):.3f} to {max(report.step):.3f}"
    phases.add_row("step", f"{report.seconds:.3f}", spread, percent(figures["flop_use"]["step"]), style="bold")
    console.print()
    console.print(phases)
    workers = table("worker", "idle", "at")
    workers.columns[-1].justify = "left"
    for name, share in report.idle.items():
        at = ", ".join(f"{what} {part:.1%}" for what, part in report.doing[name].items())
        workers.add_row(name, f"{share:.1%}", at)
    console.print()
    console.print(workers)
    if report.unseen:
        say(
            console,
            f"Nothing was recorded of {', '.join(report.unseen)}: their hosts do not see the run directory.",
            "dim",
        )
    console.print()
    say(console, f"{w.samples / report.steps:,.0f} samples a step, {figures['samples_per_s']:,.1f} samples/s")
    say(
        console,
        f"{figures['generated_tokens_per_s']:,.0f} tokens/s generated, {figures['trained_tokens_per_s']:,.0f} trained",
    )
    if report.bandwidth:
        seconds = figures["sync"]["s"]
        say(
            console,
            f"sync: {report.machine.weights / 1e6:,.1f} MB in {seconds:.3f} s, {report.bandwidth:.2f} GB/s",
        )
    say(console, f"not in rollout, score, update or sync: {report.overhead / report.seconds:.1%} of a step")
    if not w.flops:
        say(console, "FLOP use is not known: this architecture's work is not counted (rlsys/models/flops.py)", "dim")
    elif report.machine.peak is None:
        say(console, "FLOP use is not known: nothing is known of these GPUs (rlsys/models/flops.py)", "dim")
    else:
        against = "a large matrix product here" if config.cluster.device == "cpu" else "what the GPUs can do"
        say(console, f"FLOP use: work that is needed, over {against}: {report.machine.peak / 1e9:,.0f} GFLOP/s", "dim")


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
