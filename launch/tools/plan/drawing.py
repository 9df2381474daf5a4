"""Nodes and their GPUs as boxes, with who is on them and how full they are. Reads the same on a terminal and in a file."""

from rich.box import ROUNDED, SQUARE, Box
from rich.columns import Columns
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from launch.bundles import format_count
from launch.printing import print_line
from launch.tools.plan.fit import Fit, GpuUse, find_process, format_gib, shorten_names
from rlsys.estimates.devices import GIB
from rlsys.estimates.memory import ProcessMemory, total_bytes

WIDTH = 19  # four boxes in 80 columns
BAR = 13


def draw_nodes(f: Fit, console: Console) -> None:
    """Nodes that hold the same kinds of processes are drawn once."""
    alike: list[list[int]] = []
    for n in range(len(f.nodes)):
        if alike and kinds(f, alike[-1][0]) == kinds(f, n):
            alike[-1].append(n)
        else:
            alike.append([n])
    for group in alike:
        n = group[0]
        print_line(console, f"{title(f, n)}{others(f, group)}")
        console.print(Columns(boxes(f, n), padding=(0, 0)))
    if f.config.cluster.device == "gpu":
        on_cpus = [(name, p) for name, p in f.processes.items() if p.role in ("reward", "driver") and not p.device]
        counts = ", ".join(f"{p.count} {name}" for name, p in on_cpus)
        reference = "; the reference" if "reference" in f.processes and not f.config.reference.gpus else ""
        print_line(console, f"on CPUs of any node: {counts}{reference}", "dim")
    elif idle := sum(not gpu for there in f.layout.gpus for gpu in there):
        print_line(console, f"idle: {format_count(idle, 'GPU')}, of which cluster.device cpu makes no use", "yellow")


def title(f: Fit, n: int) -> str:
    node = f.nodes[n]
    smallest = f" (the smallest of what is called {node.ambiguous_name})" if node.ambiguous_name else ""
    has = [f"{node.gpus} x {node.gpu.name} of {node.gpu.memory_gib:g} GiB{smallest}"] if node.gpu and node.gpus else []
    has += [] if node.cpus is None else [f"{node.cpus:g} CPUs"]
    has += [f"{format_gib(node.memory)} GiB of main memory"] if node.memory else []
    return f"node {n}{f' ({node.name})' if node.name else ''}: {', '.join(has)}"


def others(f: Fit, group: list[int]) -> str:
    """Who is on the nodes that are not drawn."""
    if len(group) == 1:
        return ""
    numbers = f"node {group[1]} is" if len(group) == 2 else f"nodes {group[1]} to {group[-1]} are"
    return f"; {numbers} the same, with {', '.join(shorten_names([m for n in group[1:] for m in everyone(f, n)]))}"


def everyone(f: Fit, n: int) -> list[str]:
    found = [m for gpu in f.layout.gpus[n] for m in gpu]
    return list(dict.fromkeys(found + f.layout.cpu_workers[n] * (f.config.cluster.device == "cpu")))


def kinds(f: Fit, n: int) -> list[list[str]]:
    processes = [f.layout.cpu_workers[n]] * (f.config.cluster.device == "cpu")
    return [[m.rpartition("-")[0] or m for m in there] for there in f.layout.gpus[n] + processes]


def boxes(f: Fit, n: int) -> list[Panel]:
    of = {g.index: g for g in f.gpus if g.node == n}
    if f.config.cluster.device == "cpu":
        return [of_gpu(f, g) for g in of.values() if g.workers] + of_processes(f, f.layout.cpu_workers[n])
    every = [of_gpu(f, of[i]) if i in of else empty(i) for i in range(len(f.layout.gpus[n]))]
    tallest = max((len(gpu) for gpu in f.layout.gpus[n]), default=1)
    for box in every:
        box.height = max(tallest, 1) + 4
    return every


def of_gpu(f: Fit, g: GpuUse) -> Panel:
    if not g.workers:
        return empty(g.index)
    wide = f.config.rollout.tensor_parallel
    lines = [Text(part_of(m, g, f, wide), no_wrap=True) for m in g.workers]
    return box(f"GPU {g.index}", [*lines, *meter(g.needed, g.capacity)], ROUNDED)


def part_of(member: str, g: GpuUse, f: Fit, wide: int) -> str:
    """An engine of several GPUs says which part of it is here."""
    if wide == 1 or not member.startswith("rollout"):
        return member
    own = [i for i, gpu in enumerate(f.layout.gpus[g.node]) if member in gpu]
    return f"{member} {own.index(g.index) + 1}/{wide}"


def of_processes(f: Fit, names: list[str]) -> list[Panel]:
    """Those that are alike in one box."""
    alike: dict[int, tuple[ProcessMemory, list[str]]] = {}
    for name in names:
        if p := find_process(f.processes, name):
            alike.setdefault(id(p), (p, []))[1].append(name)
    return [of_process(p, own) for p, own in alike.values()]


def of_process(p: ProcessMemory, names: list[str]) -> Panel:
    several = len(names) > 1
    what = Text(f"{format_gib(total_bytes(p.peak()[1]))} GiB{' each' * several}", no_wrap=True)
    return box(f"{len(names)} x {p.role}" if several else names[0], [what], SQUARE)


def empty(index: int) -> Panel:
    return box(f"GPU {index}", [Text("free", style="dim")], ROUNDED)


def meter(need: float, capacity: float) -> list[Text]:
    share = need / capacity if capacity else 0.0
    style = "red" if share > 1 else "yellow" if share > 0.95 else "green"
    full = min(round(share * BAR), BAR)
    return [
        Text("█" * full + "░" * (BAR - full), style=style, no_wrap=True),
        Text(f"{format_gib(need)} of {capacity / GIB:.1f} GiB", style=style, no_wrap=True),
    ]


def box(title: str, lines: list[Text], border: Box) -> Panel:
    return Panel(Group(*lines), title=title, title_align="left", box=border, width=WIDTH, padding=(0, 0))
