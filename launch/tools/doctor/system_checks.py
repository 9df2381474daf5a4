"""Checks of hardware, limits, folders and network. Each is a function of the facts."""

import re

from launch.tools.doctor.facts import UNLIMITED, MachineFacts
from launch.tools.doctor.results import CheckResult, ok, warning, wrong
from launch.tools.estimates.devices import GIB

ENOUGH_FILES = 8192


def gpus(f: MachineFacts) -> list[CheckResult]:
    if not f.gpus:
        return no_gpus(f)
    first = f.gpus[0]
    results = ok("GPUs", f"{len(f.gpus)} x {first.name}, {first.memory / GIB:.0f} GiB, driver {f.driver}")
    if f.needed_gpus > len(f.gpus) and not f.address:
        results = wrong("GPUs", f"{len(f.gpus)}, but {f.needed_gpus:g} are needed", "rlsys plan CONFIG")
    busy = [str(i) for i, g in enumerate(f.gpus) if g.used_memory > 0.02 * g.memory + (1 << 29)]
    if busy:
        results += warning("GPU memory", f"other processes use GPU {', '.join(busy)}", "nvidia-smi")
    return results


def no_gpus(f: MachineFacts) -> list[CheckResult]:
    if f.gpu_files or f.driver:
        return wrong("GPUs", "there are device files, but nvidia-smi shows no GPU", "nvidia-smi")
    if f.device == "gpu" and not f.address:
        return wrong("GPUs", "cluster.device is gpu, but there is none here", "rlsys train CONFIG cluster.address=URL")
    return ok("GPUs", "none; cluster.device cpu runs here")


def topology(f: MachineFacts) -> list[CheckResult]:
    """Checks how GPUs reach each other: weights and gradients take these links."""
    rows = [line.split("\t") for line in f.links.splitlines() if re.match(r"GPU\d", line)]
    pairs = [cell.strip() for i, row in enumerate(rows) for cell in row[1 : len(rows) + 1][i + 1 :]]
    if not pairs:
        return []
    linked = sum(p.startswith("NV") for p in pairs)
    if linked == len(pairs):
        return ok("GPU links", "NVLink between all")
    across_sockets = sum(p in ("SYS", "NODE") for p in pairs)
    message = f"NVLink between {linked} of {len(pairs)} pairs"
    message += f", {across_sockets} cross CPU sockets" if across_sockets else ""
    return warning("GPU links", f"{message}: syncs and ZeRO will be slower", "nvidia-smi topo -m")


def cores(f: MachineFacts) -> list[CheckResult]:
    if f.cores >= 2:
        return ok("CPU cores", str(f.cores))
    return warning("CPU cores", "1: engines and ranks take turns", "nproc")


def memory(f: MachineFacts) -> list[CheckResult]:
    message, fix = f"{f.available / GIB:.1f} GiB free of {f.memory / GIB:.1f}", "ps aux --sort=-rss | head"
    if f.available < 2 * GIB:
        return wrong("main memory", f"{message}; the smallest run takes 3.3", fix)
    if f.available < 4 * GIB:
        return warning("main memory", f"{message}; the smallest run takes 3.3", fix)
    return ok("main memory", message)


def shared_memory(f: MachineFacts) -> list[CheckResult]:
    fix = "mount -o remount,size=8G /dev/shm  # in a container: docker run --shm-size=8g"
    if f.shared_memory is None:
        return wrong("shared memory", "there is no /dev/shm; Ray keeps its objects there", fix)
    message = f"/dev/shm: {f.shared_free / GIB:.1f} GiB free of {f.shared_memory / GIB:.1f}"
    if f.shared_free < 256 << 20:
        return wrong("shared memory", f"{message}; Ray's object store takes 128 MiB or more", fix)
    if f.shared_memory < 1 << 30:
        return warning("shared memory", f"{message}; large batches and NCCL need more", fix)
    return ok("shared memory", message)


def open_files(f: MachineFacts) -> list[CheckResult]:
    message = f"{f.open_files_limit:,} at a time"
    if f.open_files_limit >= ENOUGH_FILES:
        return ok("open files", message)
    limit = min(65536, f.open_files_hard_limit) if f.open_files_hard_limit != UNLIMITED else 65536
    fix = f"ulimit -n {limit}"
    if limit < ENOUGH_FILES:
        fix = (
            "echo '* - nofile 65536' >> /etc/security/limits.conf  # as root; then log in again. "
            "In a container: docker run --ulimit nofile=65536"
        )
    message = f"{message}; Ray needs {ENOUGH_FILES:,} or more"
    return (wrong if f.open_files_limit < 1024 else warning)("open files", message, fix)


def tasks(f: MachineFacts) -> list[CheckResult]:
    if f.task_limit == UNLIMITED:
        return ok("processes", "no limit")
    left = f.task_limit - f.tasks_in_use
    message = f"{left:,} more processes and threads of {f.task_limit:,}"
    if left >= 4000:
        return ok("processes", message)
    fix = "ulimit -u 16384  # in a container: docker run --pids-limit=-1"
    message = f"{message}; a run on two cores takes about 1,000"
    return (wrong if left < 1000 else warning)("processes", message, fix)


def disk(f: MachineFacts) -> list[CheckResult]:
    results = []
    for folder in f.folders:
        fix = f"export {folder.variable}=/with/room" if folder.variable else "rlsys train CONFIG run.dir=/with/room"
        message = f"{folder.path}: {folder.free / GIB:.1f} GiB free"
        if not folder.writable:
            results += wrong(folder.purpose, f"{folder.path} cannot be written to", fix)
        elif folder.free < 1 * GIB:
            results += wrong(folder.purpose, message, fix)
        elif folder.free < 10 * GIB:
            message += "; a checkpoint of 1.5 billion parameters takes 21"
            results += warning(folder.purpose, message, fix)
        else:
            results += ok(folder.purpose, message)
    return results


def temp_dir(f: MachineFacts) -> list[CheckResult]:
    """Checks that temporary files go where TMPDIR says, and that its path is short enough for Ray's sockets."""
    if f.system_temp_dir != f.tmpdir:
        problem = f"TMPDIR is {f.tmpdir}, which does not exist or cannot be written to"
        fix = f"mkdir -p {f.tmpdir}  # or export TMPDIR=/tmp"
        return warning("temporary path", f"{problem}: {f.system_temp_dir} is used instead", fix)
    if f.ray_temp_dir != f.system_temp_dir:
        message = f"{f.tmpdir} is too long a path for Ray's sockets: {f.ray_temp_dir} is used instead"
        return warning("temporary path", message, "export TMPDIR=/tmp")
    return []


def network(f: MachineFacts) -> list[CheckResult]:
    if not f.loopback:
        return wrong("network", "a process cannot listen on 127.0.0.1 and be reached there", "ip link set lo up")
    if taken := {option: (port, owner) for option, (port, owner) in f.ports.items() if owner}:
        owners = "; ".join(f"{port}: {owner}" for port, owner in taken.values())
        message = f"`ray start --head` needs ports that are taken (a private Ray takes free ones): {owners}"
        command = f"ray start --head {' '.join(f'{option}=OTHER' for option in taken)}"
        return warning("ports", message, f"{command}  # to join the Ray that uses them: cluster.address=auto")
    return ok("network", "127.0.0.1 answers" + (", ports are free" if f.ports else ""))


def leftovers(f: MachineFacts) -> list[CheckResult]:
    if not f.leftovers:
        return ok("leftovers", "none of killed runs")
    folders = f"{len(f.leftovers)} folders of killed runs: {', '.join(f.leftovers[:3])}"
    return warning("leftovers", f"{folders}; the next run removes them", f"rm -rf {' '.join(f.leftovers)}")


def token(f: MachineFacts) -> list[CheckResult]:
    if not f.token:
        return []
    if f.token_mode & 0o077:
        message = f"{f.token} has mode {f.token_mode:o}: other users can read it, and use Ray in your name"
        return wrong("Ray's token", message, f"chmod 600 {f.token}")
    return ok("Ray's token", f"{f.token}, for its owner only")
