"""Prints the figures of a bench."""

from rich.console import Console
from rich.table import Column

from launch.printing import make_table, print_line
from launch.tools.bench.figures import BenchReport
from launch.tools.estimates.devices import GIB
from rlsys.config.schema import Config


def print_report(report: BenchReport, config: Config, console: Console) -> None:
    """Prints where the time of a step goes, what each worker did, and rates."""
    figures = report.as_dict()
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
    workers = make_table("worker", "idle", Column("at", no_wrap=True))
    for name, share in report.idle_shares.items():
        spans = ", ".join(f"{span} {part:.1%}" for span, part in report.span_shares[name].items())
        workers.add_row(name, f"{share:.1%}", spans)
    console.print()
    console.print(workers)
    if report.unrecorded_workers:
        names = ", ".join(report.unrecorded_workers)
        print_line(console, f"Nothing was recorded of {names}: their hosts do not see the run directory.", "dim")
    console.print()
    print_rates(report, console)
    print_flop_use_note(report, config, console)


def print_rates(report: BenchReport, console: Console) -> None:
    w, figures = report.work, report.as_dict()
    print_line(console, f"{w.samples / report.steps:,.0f} samples a step, {figures['samples_per_s']:,.1f} samples/s")
    print_line(console, f"{w.trained_samples:,} of {w.samples:,} samples trained")
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
    if memory := report.machine.memory:
        planned = "not known" if memory.planned is None else f"{memory.planned / GIB:.2f}"
        print_line(console, f"a rank's GPU: {memory.allocated / GIB:.2f} GiB of tensors at most; plan: {planned}")
    print_line(console, f"not in rollout, score, update or sync: {report.overhead / report.mean_seconds:.1%} of a step")


def print_flop_use_note(report: BenchReport, config: Config, console: Console) -> None:
    peak = report.machine.peak_flops
    if not report.work.flops:
        note = "FLOP use is not known: this architecture's work is not counted (rlsys/models/flops.py)"
    elif peak is None:
        note = "FLOP use is not known: these GPUs are not in the table (launch/tools/estimates/devices.py)"
    else:
        reference = "a large matrix product here" if config.cluster.device == "cpu" else "the peak of the GPUs"
        note = f"FLOP use: necessary work, over {reference}: {peak / 1e9:,.0f} GFLOP/s"
    print_line(console, note, "dim")


def format_percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
