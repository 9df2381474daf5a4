"""A private Ray on this machine: started for one run, and removed without a trace after it.

It listens on loopback only, works in a folder that other users cannot enter, and requires a token.
"""

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from launch.ray_session import patches
from launch.ray_session.leftovers import (
    SYSTEM_TEMP_DIR,
    end_processes,
    end_processes_in,
    lock_folder,
    remove_leftovers,
    short_temp_dir,
)
from launch.ray_session.session import RaySession
from rlsys.config.cache import cache_dir
from rlsys.config.schema import Config
from workers.rollout.engine_settings import CPU_ENVIRONMENT
from workers.start.worker_forkserver import start_forkservers


@contextlib.contextmanager
def private_ray(config: Config, logs: Path) -> Iterator[RaySession]:
    """Starts a Ray in a folder of its own. Afterwards ends all its processes and removes the folder."""
    import ray

    remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"rlsys-{os.getpid()}-", dir=short_temp_dir()))
    lock = lock_folder(folder)
    set_environment(folder)
    protect_token_file()
    forkserver_dir = folder / "n" if config.cluster.device == "cpu" else None
    forkservers, other_children = None, set(psutil.Process().children(recursive=True))
    try:
        if forkserver_dir:  # they import while Ray starts
            forkservers = start_forkservers(forkserver_dir, CPU_ENVIRONMENT, logs / "forkserver.log")
        yield RaySession(ray, forkserver_dir, start_ray(folder))
    finally:
        with ignore_signals():
            children = [p for p in psutil.Process().children(recursive=True) if p not in other_children]
            ray.shutdown()
            if forkservers:
                forkservers.kill()
                forkservers.wait()
            end_processes(children)
            end_processes_in(folder)  # grandchildren that have outlived their parent
            save_ray_logs(folder / "r", logs / "ray")
            lock.close()
            shutil.rmtree(folder, ignore_errors=True)
            tempfile.tempdir = SYSTEM_TEMP_DIR


def start_ray(folder: Path) -> dict[str, Any]:
    """Starts Ray and connects to it. Returns the processes that the run cannot do without, by name."""
    import ray
    from ray._private import worker

    with (
        patches.listen_on_loopback(),
        patches.skip_unused_processes(),
        patches.keep_signal_handlers(),
        patches.treat_timeout_as_lost(),
    ):
        ray.init(
            num_cpus=max(os.cpu_count() or 1, 2),
            include_dashboard=True,  # `ray list actors` needs it
            dashboard_host="127.0.0.1",
            log_to_driver=False,
            logging_level="error",
            configure_logging=True,
            _temp_dir=str(folder / "r"),
            object_store_memory=object_store_bytes(),
            _system_config={"prestart_worker_first_driver": False},  # one per CPU; actors start workers of their own
        )
    processes = worker._global_node.all_processes
    return {name: processes[name][0].process for name in ("gcs_server", "raylet")}


def set_environment(folder: Path) -> None:
    """Sends the temporary files of libraries, here and in the workers, into the run's folder."""
    (folder / "tmp").mkdir()  # not in Ray's own folder "r", which Ray opens to everyone
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), os.getcwd()) if p)
    tempfile.tempdir = str(folder / "tmp")  # tempfile reads TMPDIR only once
    os.environ |= {"TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(compile_cache_dir(folder / "tmp"))}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # workers/start/network.py chooses gloo's


def compile_cache_dir(fallback: Path) -> Path:
    """The folder of compiled layers, for the next start; below `fallback` if it cannot be written."""
    folder = cache_dir() / "compiled"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK) else fallback / "compiled"


def protect_token_file() -> None:
    """Writes the token file, or changes its mode, so that only its owner can read it. Ray would let others read it."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    file = Path.home() / ".ray" / "auth_token"
    if file.is_file():
        with contextlib.suppress(PermissionError):  # another user's file
            file.chmod(0o600)
        return
    file.parent.mkdir(exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent)
    with open(handle, "w") as out:
        out.write(secrets.token_hex(32))
    with contextlib.suppress(FileExistsError):  # another run was faster
        os.link(temporary, file)
    os.unlink(temporary)


def object_store_bytes() -> int:
    """A sixth of the free shared memory or free main memory, whichever is less, within 128 MiB and 8 GiB."""
    shared_memory = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 1 << 40
    free = min(psutil.virtual_memory().available, shared_memory)
    return max(128 << 20, min(free // 6, 8 << 30))


def save_ray_logs(folder: Path, target: Path) -> None:
    """Copies the logs of the last Ray session into the run directory."""
    for session in folder.glob("session_2*"):
        if (session / "logs").is_dir():
            shutil.rmtree(target, ignore_errors=True)
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(session / "logs", target, symlinks=True)
                for copy in (target, *(p for p in target.rglob("*") if p.is_dir())):
                    copy.chmod(0o755)  # Ray lets everyone write


@contextlib.contextmanager
def ignore_signals() -> Iterator[None]:
    """A second Ctrl-C must not leave half of the processes behind."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
