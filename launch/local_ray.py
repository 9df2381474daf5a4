"""A private Ray on this machine: started for one run, gone without a trace after it."""

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from rlsys.config import Config, ConfigError
from workers.process import port_is_taken


@contextlib.contextmanager
def ray_session(config: Config, logs: Path) -> Iterator[Any]:
    """Connects to `cluster.address` or RAY_ADDRESS, or starts a private Ray. Yields the ray module."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a late call after the end must not start another Ray
    terminated = signal.getsignal(signal.SIGTERM)
    import ray

    address = config.cluster.address or os.environ.get("RAY_ADDRESS", "")
    if address:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
            signal.signal(signal.SIGTERM, terminated)  # Ray puts its own in place
        except ConnectionError as error:
            raise ConfigError(
                f"cluster.address: no Ray cluster answers at {address} ({str(error).splitlines()[0]})."
            ) from None
        try:
            yield ray
        finally:
            ray.shutdown()
        return

    port = config.cluster.dashboard_port
    if port and port_is_taken(port):
        raise ConfigError(
            f"cluster.dashboard_port: port {port} is taken on this machine. Choose another, or 0 for any free one."
        )
    remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"rlsys-{os.getpid()}-", dir=short_temporary_directory()))
    (folder / "tmp").mkdir()
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), os.getcwd()) if p)
    # Where libraries leave their things, in the workers and here.
    os.environ |= {"TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "tmp" / "inductor")}
    try:
        ray.init(
            num_cpus=max(os.cpu_count() or 1, 2),
            include_dashboard=True,  # `ray list actors` asks it
            dashboard_host="127.0.0.1",
            dashboard_port=port or None,
            log_to_driver=False,
            logging_level="error",
            configure_logging=True,
            _temp_dir=str(folder),
            object_store_memory=object_store_bytes(),
        )
        signal.signal(signal.SIGTERM, terminated)  # Ray puts its own in place
        yield ray
    finally:
        with uninterrupted():
            children = psutil.Process().children(recursive=True)
            ray.shutdown()
            end(children)
            keep_logs(folder, logs / "ray")
            shutil.rmtree(folder, ignore_errors=True)


def short_temporary_directory() -> str:
    """Ray's sockets lie deep in its folder, and the path of a socket has at most 107 characters."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 24 else "/tmp"


def object_store_bytes() -> int:
    """A sixth of what shared memory or main memory has free, whichever is less, within 128 MiB and 8 GiB."""
    free = min(
        psutil.virtual_memory().available, shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 1 << 40
    )
    return max(128 << 20, min(free // 6, 8 << 30))


def end(processes: list[psutil.Process], patience_s: float = 5) -> None:
    """Waits for what Ray started to go, and helps where it does not."""
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def keep_logs(folder: Path, target: Path) -> None:
    """Ray's own logs move into the run directory; the last session's are kept."""
    for session in folder.glob("session_2*"):
        if (session / "logs").is_dir():
            shutil.rmtree(target, ignore_errors=True)
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(session / "logs", target, symlinks=True)


def remove_leftovers() -> None:
    """Folders, and what still runs in them, of private Rays whose driver was killed before it could tidy up."""
    for folder in Path(short_temporary_directory()).glob("rlsys-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            end([process for process in psutil.process_iter() if works_in(process, folder)], patience_s=0)
            shutil.rmtree(folder, ignore_errors=True)


def works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get("TMPDIR", "").startswith(str(folder))
    except psutil.Error:  # gone, or another user's
        return False


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave half of the processes behind."""
    before = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
