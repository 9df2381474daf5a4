"""A private Ray on this machine: started for one run, gone without a trace after it.

It listens on loopback only, in a folder of its own that others may not enter, and demands a token.
"""

import contextlib
import fcntl
import functools
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from launch.ray_token import explain_token_refusal, requires_token, use_token_if_available
from rlsys.config.cache import cache_dir
from rlsys.config.schema import Config, ConfigError
from rlsys.runs.errors import WorkerLost
from rlsys.runs.stopping import StopSignal
from workers.rollout.engines import CPU_ENVIRONMENT
from workers.supervision import worker_command
from workers.supervision.worker_forkserver import start_forkservers
from workers.supervision.worker_setup import port_is_taken

POLL_S = 1.0  # between two looks at Ray's own processes
SYSTEM_TEMP_DIR = tempfile.gettempdir()  # where temporary files go that are of no Ray of ours


@dataclass(frozen=True)
class RaySession:
    """A Ray that this process is connected to."""

    ray: Any  # the module
    nursery: Path | None = None  # where workers can be forked, see workers/supervision/worker_forkserver.py
    processes: Mapping[str, Any] = field(default_factory=dict)  # its own, by name; of a Ray that was joined, none

    @contextlib.contextmanager
    def monitored(self, stop: StopSignal) -> Iterator[None]:
        """Whoever waits is told when one of its processes has ended: Ray itself may wait on without a word."""
        if not self.processes:
            yield
            return
        over = threading.Event()

        def look() -> None:
            while not over.wait(POLL_S):
                for name, process in self.processes.items():
                    if process.poll() is not None:
                        return stop.mark_lost(f"Ray's {name} has ended")

        thread = threading.Thread(target=look, name="looks after Ray", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def compile_cache_dir(otherwise: Path) -> Path:
    """Where layers that were compiled are kept for the next start; in another folder if that cannot be written."""
    place = cache_dir() / "compiled"
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
    return place if os.access(place, os.W_OK) else otherwise / "compiled"


@contextlib.contextmanager
def ray_session(config: Config, logs: Path) -> Iterator[RaySession]:
    """Connects to `cluster.address` or RAY_ADDRESS, or starts a private Ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray._private import auto_init_hook, worker

    auto_init_hook.enable_auto_connect = False  # a late call, of a thread, after the end must not start another Ray
    worker.listen_error_messages = lambda *_: None  # Ray's own words on every worker that dies; ours name the cause
    address = config.cluster.address or os.environ.get("RAY_ADDRESS", "")
    if address:
        join_cluster(address)
        try:
            yield RaySession(ray)
        finally:
            ray.shutdown()
        return

    port = config.cluster.dashboard_port
    if port and port_is_taken(port):
        raise ConfigError(
            f"cluster.dashboard_port: port {port} is taken on this machine. Choose another, or 0 for any free one."
        )
    remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"rlsys-{os.getpid()}-", dir=short_temp_dir()))
    lock = lock_folder(folder)
    (folder / "tmp").mkdir()  # Ray lets everyone into its own folder and its sockets: it gets one inside, "r"
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), os.getcwd()) if p)
    # Where libraries leave their things, in the workers and here.
    tempfile.tempdir = str(folder / "tmp")  # it would not look at TMPDIR again
    os.environ |= {"TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(compile_cache_dir(folder / "tmp"))}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # gloo's place is chosen in workers/learner/rendezvous.py
    protect_token_file()
    nursery = folder / "n" if config.cluster.device == "cpu" else None
    nurse, others = None, set(psutil.Process().children(recursive=True))
    try:
        if nursery:
            nurse = start_forkservers(
                nursery, CPU_ENVIRONMENT, logs / "nursery.log"
            )  # its imports go on while Ray comes up
        with listen_on_loopback(), skip_unused_processes(), keep_signal_handlers(), treat_timeout_as_lost():
            ray.init(
                num_cpus=max(os.cpu_count() or 1, 2),
                include_dashboard=True,  # `ray list actors` asks it
                dashboard_host="127.0.0.1",
                dashboard_port=port or None,
                log_to_driver=False,
                logging_level="error",
                configure_logging=True,
                _temp_dir=str(folder / "r"),
                object_store_memory=object_store_bytes(),
            )
        started = worker._global_node.all_processes
        yield RaySession(ray, nursery, {name: started[name][0].process for name in ("gcs_server", "raylet")})
    finally:
        with ignore_signals():
            children = [p for p in psutil.Process().children(recursive=True) if p not in others]
            ray.shutdown()
            if nurse:
                nurse.kill()
                nurse.wait()
            end_processes(children)
            end_processes_in(folder)  # what has outlived its parent
            save_ray_logs(folder / "r", logs / "ray")
            lock.close()
            shutil.rmtree(folder, ignore_errors=True)
            tempfile.tempdir = SYSTEM_TEMP_DIR


def join_cluster(address: str) -> None:
    """Connects to a cluster, and shows it the token where it demands one. Raises `ConfigError` where that cannot be.

    Ray shows a token by itself only to a cluster that it has found (`auto`). One that demands none must not be shown it: this process
    would demand one in turn of all who call it.
    """
    import ray
    from ray.exceptions import AuthenticationError

    try:
        shown = (address == "auto" or requires_token(address)) and use_token_if_available()
        with keep_signal_handlers():
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except AuthenticationError:  # RAY_AUTH_MODE=token, and none is found
        raise ConfigError(
            f"cluster.address: the Ray cluster at {address} {explain_token_refusal(shown=False)}"
        ) from None
    except ConnectionError as error:
        if AuthenticationError.__name__ in str(error.__cause__):
            raise ConfigError(f"cluster.address: the Ray cluster at {address} {explain_token_refusal(shown)}") from None
        raise ConfigError(
            f"cluster.address: no Ray cluster answers at {address} ({str(error).splitlines()[0]})."
        ) from None


@contextlib.contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """A Ray that starts or is joined now would put handlers for SIGTERM of its own in place, which end this process without a word: first
    one of Python's, then, when it is connected, one of its library's.
    """
    from ray._private import utils

    terminated = signal.getsignal(signal.SIGTERM)
    before, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda _: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before
        signal.signal(signal.SIGTERM, terminated)


@contextlib.contextmanager
def listen_on_loopback() -> Iterator[None]:
    """A Ray that starts now takes 127.0.0.1 for its node's address; then none of its processes listens anywhere else.

    `ray.init(_node_ip_address="127.0.0.1")` would be replaced by the host's own address. The switch used here is Ray's for macOS
    and Windows. Its environment variable is read at import, and would hold for clusters that are joined too.
    """
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def skip_unused_processes() -> Iterator[None]:
    """A Ray that starts now does without two processes, an autoscaler for nodes that never come and a reader of logs that nobody listens to,
    starts workers by a command of ours, which imports less, and does not import the dashboard's libraries here to see that they are there.
    `ray.init` has no options for these.
    """
    from ray._private import parameter, utils

    params, ask = parameter.RayParams, utils.get_dashboard_dependency_error
    parameter.RayParams = functools.partial(
        params, no_monitor=True, include_log_monitor=False, setup_worker_path=worker_command.__file__
    )
    utils.get_dashboard_dependency_error = lambda: None
    try:
        yield
    finally:
        parameter.RayParams, utils.get_dashboard_dependency_error = params, ask


@contextlib.contextmanager
def treat_timeout_as_lost() -> Iterator[None]:
    """On a busy machine Ray gives up on its own processes after a while, with a plain Exception. Another try may do."""
    try:
        yield
    except Exception as error:
        if type(error) is Exception:
            raise WorkerLost(f"Ray did not come up: {error}") from error
        raise


def address_for_ray_cli(ray: Any) -> str:
    """What `ray list actors --address` needs.

    For a private Ray that is its dashboard: Ray's commands take 127.0.0.1:PORT for PORT of the host's own address, where nothing listens.
    """
    from ray._private.worker import get_dashboard_url

    address: str = ray.get_runtime_context().gcs_address
    return f"http://{get_dashboard_url()}" if address.startswith(("127.", "[::1]")) else address


def metrics_urls(ray: Any) -> list[str]:
    """One of each node, with Ray's own figures and ours."""
    return [f"http://{n['NodeManagerAddress']}:{n['MetricsExportPort']}/metrics" for n in ray.nodes() if n["Alive"]]


def protect_token_file() -> None:
    """Ray would write its token as any other file, readable by all who may enter the home directory."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    file = Path.home() / ".ray" / "auth_token"
    if file.is_file():
        with contextlib.suppress(PermissionError):  # not ours to change
            file.chmod(0o600)
        return
    file.parent.mkdir(exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=file.parent)
    with open(handle, "w") as out:
        out.write(secrets.token_hex(32))
    with contextlib.suppress(FileExistsError):  # another run has been faster
        os.link(aside, file)
    os.unlink(aside)


def short_temp_dir() -> str:
    """Ray's sockets lie deep in its folder, and the path of a socket has at most 107 characters."""
    pid, usual = os.getpid(), SYSTEM_TEMP_DIR
    deepest = f"/rlsys-{pid}-12345678/r/session_2026-01-01_00-00-00_000000_{pid}/sockets/dash_MetricsHead"
    return usual if len(usual) + len(deepest) <= 107 else "/tmp"


def object_store_bytes() -> int:
    """A sixth of what shared memory or main memory has free, whichever is less, within 128 MiB and 8 GiB."""
    free = min(
        psutil.virtual_memory().available, shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 1 << 40
    )
    return max(128 << 20, min(free // 6, 8 << 30))


def end_processes(processes: list[psutil.Process], patience_s: float = 1) -> None:
    """Waits for what Ray started to go, and helps where it does not."""
    for process in wait_for_exit(processes, patience_s):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_for_exit(processes, 5)


def wait_for_exit(processes: list[psutil.Process], patience_s: float) -> list[psutil.Process]:
    """Those that still run after that time."""
    deadline = time.monotonic() + patience_s
    while (alive := [process for process in processes if is_running(process.pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def save_ray_logs(folder: Path, target: Path) -> None:
    """Ray's own logs move into the run directory; the last session's are kept."""
    for session in folder.glob("session_2*"):
        if (session / "logs").is_dir():
            shutil.rmtree(target, ignore_errors=True)
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(session / "logs", target, symlinks=True)
                for place in (target, *(p for p in target.rglob("*") if p.is_dir())):
                    place.chmod(0o755)  # Ray lets everyone write


def remove_leftovers() -> None:
    """Folders, and what still runs in them, of private Rays whose driver was killed before it could tidy up."""
    for folder in abandoned_folders():
        end_processes_in(folder)
        shutil.rmtree(folder, ignore_errors=True)


def abandoned_folders() -> list[Path]:
    """Folders of private Rays whose driver runs no more, here or where this process cannot see it."""
    named = ((folder, folder.name.split("-")[1]) for folder in Path(short_temp_dir()).glob("rlsys-*-*"))
    return [folder for folder, pid in named if pid.isdigit() and not is_running(int(pid)) and not is_locked(folder)]


def lock_folder(folder: Path) -> IO[str]:
    """Says that its driver lives, as long as the file is open: to other containers, and to other hosts where they see the folder."""
    lock = (folder / "lock").open("w")
    with contextlib.suppress(OSError):  # no locks there: what counts is the number of the process
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def is_locked(folder: Path) -> bool:
    try:
        with (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # or another user's
        return True
    except OSError:  # no such file, or no locks there
        return False
    return False


def is_running(pid: int) -> bool:
    """Not so of one that is dead and that its parent has not asked about: in a container nobody may ever do so."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_processes_in(folder: Path) -> None:
    end_processes([process for process in psutil.process_iter() if has_temp_dir_in(process, folder)], patience_s=0)


def has_temp_dir_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get("TMPDIR", "").startswith(str(folder))
    except psutil.Error:  # gone, or another user's
        return False


@contextlib.contextmanager
def ignore_signals() -> Iterator[None]:
    """A second Ctrl-C must not leave half of the processes behind."""
    before = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
