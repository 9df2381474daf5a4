"""Draws nodes and GPUs as boxes, with their workers and how full they are."""

from rich.box import ROUNDED, SQUARE, Box
from rich.columns import Columns
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from launch.bundles import format_count
from launch.printing import print_line
from launch.tools.estimates.devices import GIB
from launch.tools.estimates.memory import ProcessMemory, total_bytes
from launch.tools.fitting.fit import Fit, GpuUse, find_process
from launch.tools.fitting.formatting import format_gib, shorten_names

WIDTH = 19  # four boxes in 80 columns
BAR = 13


def draw_nodes(f: Fit, console: Console) -> None:
    """Draws one node of each series of nodes that hold the same kinds of processes."""
    groups: list[list[int]] = []
    for n in range(len(f.nodes)):
        if groups and process_kinds(f, groups[-1][0]) == process_kinds(f, n):
            groups[-1].append(n)
        else:
            groups.append([n])
    for group in groups:
        print_line(console, f"{node_title(f, group[0])}{describe_same(f, group[1:])}")
        console.print(Columns(node_boxes(f, group[0]), padding=(0, 0)))
    if f.config.cluster.device == "gpu":
        on_cpus = [(name, p) for name, p in f.processes.items() if p.role in ("reward", "driver") and not p.device]
        counts = ", ".join(f"{p.count} {name}" for name, p in on_cpus)
        reference = "; the reference" if "reference" in f.processes and f.config.reference.place == "cpu" else ""
        print_line(console, f"on CPUs of any node: {counts}{reference}", "dim")
    elif idle := sum(not workers for gpus in f.layout.gpus for workers in gpus):
        print_line(console, f"idle: {format_count(idle, 'GPU')}, which cluster.device cpu does not use", "yellow")


def process_kinds(f: Fit, n: int) -> list[list[str]]:
    """The names of workers without their numbers, GPU by GPU."""
    processes = [f.layout.cpu_workers[n]] * (f.config.cluster.device == "cpu")
    return [[name.rpartition("-")[0] or name for name in workers] for workers in f.layout.gpus[n] + processes]


def node_title(f: Fit, n: int) -> str:
    node = f.nodes[n]
    smallest = f" (the smallest of the GPUs named {node.ambiguous_name})" if node.ambiguous_name else ""
    hardware = (
        [f"{node.gpus} x {node.gpu.name} of {node.gpu.memory_gib:g} GiB{smallest}"] if node.gpu and node.gpus else []
    )
    hardware += [] if node.cpus is None else [f"{node.cpus:g} CPUs"]
    hardware += [f"{format_gib(node.memory)} GiB of main memory"] if node.memory else []
    return f"node {n}{f' ({node.name})' if node.name else ''}: {', '.join(hardware)}"


def describe_same(f: Fit, nodes: list[int]) -> str:
    """Names the nodes that are not drawn, and their workers."""
    if not nodes:
        return ""
    numbers = f"node {nodes[0]} is" if len(nodes) == 1 else f"nodes {nodes[0]} to {nodes[-1]} are"
    if f.config.cluster.device == "cpu":
        names = [name for n in nodes for name in f.layout.workers_of(n)]
    else:
        names = list(dict.fromkeys(name for n in nodes for gpu in f.layout.gpus[n] for name in gpu))
    return f"; {numbers} the same, with {', '.join(shorten_names(names))}"


def node_boxes(f: Fit, n: int) -> list[Panel]:
    """The GPUs of a node. On CPU its processes, and only GPUs that are used."""
    uses = {g.index: g for g in f.gpus if g.node == n}
    if f.config.cluster.device == "cpu":
        return [gpu_box(f, g) for g in uses.values() if g.workers] + process_boxes(f, f.layout.cpu_workers[n])
    boxes = [gpu_box(f, uses[i]) if i in uses else free_box(i) for i in range(len(f.layout.gpus[n]))]
    tallest = max((len(gpu) for gpu in f.layout.gpus[n]), default=1)
    for box in boxes:
        box.height = max(tallest, 1) + 4
    return boxes


def gpu_box(f: Fit, g: GpuUse) -> Panel:
    if not g.workers:
        return free_box(g.index)
    lines = [Text(worker_label(name, g, f), no_wrap=True) for name in g.workers]
    return make_box(f"GPU {g.index}", [*lines, *memory_bar(g.needed, g.capacity)], ROUNDED)


def free_box(index: int) -> Panel:
    return make_box(f"GPU {index}", [Text("free", style="dim")], ROUNDED)


def worker_label(name: str, g: GpuUse, f: Fit) -> str:
    """For an engine of several GPUs, `rollout-0 2/4` is its part on the second of them."""
    its_gpus = [i for i, workers in enumerate(f.layout.gpus[g.node]) if name in workers]
    return name if len(its_gpus) == 1 else f"{name} {its_gpus.index(g.index) + 1}/{len(its_gpus)}"


def process_boxes(f: Fit, names: list[str]) -> list[Panel]:
    """One box for all processes that are alike."""
    groups: dict[int, tuple[ProcessMemory, list[str]]] = {}
    for name in names:
        if process := find_process(f.processes, name):
            groups.setdefault(id(process), (process, []))[1].append(name)
    return [process_box(process, group) for process, group in groups.values()]


def process_box(process: ProcessMemory, names: list[str]) -> Panel:
    several = len(names) > 1
    memory = Text(f"{format_gib(total_bytes(process.peak()[1]))} GiB{' each' * several}", no_wrap=True)
    return make_box(f"{len(names)} x {process.role}" if several else names[0], [memory], SQUARE)


def memory_bar(needed: float, capacity: float) -> list[Text]:
    share = needed / capacity if capacity else 0.0
    style = "red" if share > 1 else "yellow" if share > 0.95 else "green"
    filled = min(round(share * BAR), BAR)
    return [
        Text("█" * filled + "░" * (BAR - filled), style=style, no_wrap=True),
        Text(f"{format_gib(needed)} of {capacity / GIB:.1f} GiB", style=style, no_wrap=True),
    ]


def make_box(title: str, lines: list[Text], border: Box) -> Panel:
    return Panel(Group(*lines), title=title, title_align="left", box=border, width=WIDTH, padding=(0, 0))
