"""A bench's figures, on the console."""

from rich.console import Console

from launch.printing import make_table, print_line
from launch.tools.bench.figures import BenchReport
from rlsys.config.schema import Config


def print_report(report: BenchReport, config: Config, console: Console) -> None:
    w, figures = report.work, report.as_dict()
    phases = make_table("phase", "seconds", "share", "FLOP use")
    for name, seconds in figures["phases_s"].items():
        phases.add_row(
            name,
            f"{seconds:.3f}",
            f"{seconds / report.mean_seconds:.1%}",
            format_percent(figures["flop_use"].get(name)),
        )
    spread = f"{min(report.step_seconds):.3f} to {max(report.step_seconds):.3f}"
    phases.add_row(
        "step", f"{report.mean_seconds:.3f}", spread, format_percent(figures["flop_use"]["step"]), style="bold"
    )
    console.print()
    console.print(phases)
    workers = make_table("worker", "idle", "at")
    workers.columns[-1].justify = "left"
    for name, share in report.idle_shares.items():
        at = ", ".join(f"{what} {part:.1%}" for what, part in report.span_shares[name].items())
        workers.add_row(name, f"{share:.1%}", at)
    console.print()
    console.print(workers)
    if report.unrecorded_workers:
        print_line(
            console,
            f"Nothing was recorded of {', '.join(report.unrecorded_workers)}: their hosts do not see the run directory.",
            "dim",
        )
    console.print()
    print_line(console, f"{w.samples / report.steps:,.0f} samples a step, {figures['samples_per_s']:,.1f} samples/s")
    print_line(
        console,
        f"{figures['generated_tokens_per_s']:,.0f} tokens/s generated, {figures['trained_tokens_per_s']:,.0f} trained",
    )
    if report.bandwidth:
        seconds = figures["sync"]["s"]
        print_line(
            console,
            f"sync: {report.machine.weight_bytes / 1e6:,.1f} MB in {seconds:.3f} s, {report.bandwidth:.2f} GB/s",
        )
    print_line(console, f"not in rollout, score, update or sync: {report.overhead / report.mean_seconds:.1%} of a step")
    if not w.flops:
        print_line(
            console, "FLOP use is not known: this architecture's work is not counted (rlsys/models/flops.py)", "dim"
        )
    elif report.machine.peak_flops is None:
        print_line(console, "FLOP use is not known: nothing is known of these GPUs (rlsys/models/flops.py)", "dim")
    else:
        against = "a large matrix product here" if config.cluster.device == "cpu" else "what the GPUs can do"
        print_line(
            console,
            f"FLOP use: work that is needed, over {against}: {report.machine.peak_flops / 1e9:,.0f} GFLOP/s",
            "dim",
        )


def format_percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
