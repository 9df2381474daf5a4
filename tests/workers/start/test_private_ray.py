"""The private Ray: it is reached from this host and used with its token only, and it leaves nothing behind."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from killing import apart

from launch.ray_session.connect import address_for_ray_cli
from launch.ray_session.leftovers import abandoned_folders, is_locked, lock_folder, remove_leftovers
from launch.ray_session.patches import treat_timeout_as_lost
from launch.ray_session.private import protect_token_file
from rlsys.errors import WorkerLost

pytestmark = pytest.mark.long

QUERY = """
import sys
from ray._raylet import GcsClient
print(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None))
"""
CALLS = """
import sys, grpc

METHODS = (
    "NodeManagerService/RequestWorkerLease", "ObjectManagerService/Pull", "CoreWorkerService/PushTask",
    "InternalKVGcsService/InternalKVKeys", "JobInfoGcsService/GetAllJobInfo", "ReporterService/GetTraceback",
)
channels = {port: grpc.insecure_channel(f"127.0.0.1:{port}") for port in sys.argv[1:]}
calls = {  # all at once: ports of other protocols never answer
    (port, method): channel.unary_unary(f"/ray.rpc.{method}").future(b"", timeout=10)
    for port, channel in channels.items()
    for method in METHODS
}
for (port, method), call in calls.items():
    error = call.exception()
    print(error.code().name if error else "ANSWERED", port, method)
"""


def listening() -> dict[str, str]:
    """Returns the addresses that this process and its descendants listen on, with the names of the processes."""
    me = psutil.Process()
    return {
        f"{c.laddr.ip}:{c.laddr.port}": p.name()
        for p in [me, *me.children(recursive=True)]
        for c in p.net_connections("inet")
        if c.status == psutil.CONN_LISTEN or (c.type == 2 and not c.raddr)
    }


@pytest.fixture(scope="module")
def listeners(ray) -> dict[str, str]:
    """The addresses that are listened on while an actor lives."""

    @ray.remote
    class Actor:
        def where(self) -> str:
            return str(ray.util.get_node_ip_address())

    actor = Actor.remote()
    assert ray.get(actor.where.remote()) == "127.0.0.1"
    addresses = listening()
    ray.kill(actor)
    return addresses


@pytest.fixture
def no_token(tmp_path) -> dict[str, str]:
    """The environment of a process without the token."""
    return {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"HOME": str(tmp_path)}


def test_a_private_ray_listens_on_loopback_only(listeners):
    assert {"gcs_server", "raylet"} <= set(listeners.values())
    assert [address for address in listeners if not address.removeprefix("::ffff:").startswith("127.")] == []


def test_ray_answers_nobody_without_its_token(ray, no_token):
    gcs = ray.get_runtime_context().gcs_address
    for token in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        done = subprocess.run(
            [sys.executable, "-c", QUERY, gcs], env=no_token | token, capture_output=True, text=True, timeout=60
        )
        assert done.returncode != 0
        assert "uthenticat" in done.stderr


def test_no_process_of_ray_obeys_a_caller_without_the_token(listeners, no_token):
    ports = [address.rpartition(":")[2] for address in listeners]
    output = subprocess.run(
        [sys.executable, "-c", CALLS, *ports], env=no_token, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "ANSWERED" not in output
    refused = {line.split()[2] for line in output.splitlines() if line.startswith("UNAUTHENTICATED")}
    assert len(refused) == 6, output


@pytest.mark.parametrize("path", ["/api/jobs/", "/api/v0/actors", "/nodes?view=summary", "/logs/"])
def test_dashboard_and_jobs_demand_the_token(ray, path):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(address_for_ray_cli(ray) + path, timeout=10)
    assert refused.value.code == 401


def test_with_the_token_actors_can_be_listed(ray):
    command = [str(Path(sys.executable).parent / "ray"), "list", "actors", "--address", address_for_ray_cli(ray)]
    done = subprocess.run(
        command, env=os.environ | {"RAY_AUTH_MODE": "token"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_only_its_user_may_enter_the_folder_of_a_private_ray(ray):
    folder = Path(os.environ["TMPDIR"]).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    sockets = [p for p in folder.rglob("*") if p.is_socket()]
    assert any(p.name == "raylet" for p in sockets)
    assert max(len(str(p)) for p in sockets) <= 107


def test_a_driver_holds_the_folder_of_its_private_ray(ray):
    assert is_locked(Path(os.environ["TMPDIR"]).parent)


def test_runs_of_other_tests_have_nothing_of_its_folder_in_their_environment(ray):
    with apart() as place:
        mine, theirs = os.environ["TMPDIR"], " ".join(place.environment.values())
    assert str(Path(mine).parent) not in theirs


def test_a_token_is_written_and_kept_for_its_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ray" / "auth_token"
    protect_token_file()
    token = file.read_text()
    assert len(token) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)  # as Ray writes it
    protect_token_file()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text() == token
    assert [p.name for p in file.parent.iterdir()] == ["auth_token"]


def test_a_start_of_ray_is_retried_after_a_timeout_but_not_after_an_error():
    with pytest.raises(WorkerLost, match="Ray did not come up: the node timed out"), treat_timeout_as_lost():
        raise Exception("the node timed out")  # as Ray does
    for message in (
        "Failed to start GCS.  Last 0 lines",
        "Timed out waiting for file gcs_server_port",
    ):  # it was killed
        with pytest.raises(WorkerLost, match=message), treat_timeout_as_lost():
            raise RuntimeError(message)
    with pytest.raises(ValueError, match="no such port"), treat_timeout_as_lost():
        raise ValueError("no such port")


MONITOR = """
import sys, time
from pathlib import Path
import psutil
from launch.ray_session.connect import ray_session
from rlsys.checks import load_checked
from rlsys.errors import WorkerLost
from rlsys.runs.stopping import StopSignal

def words(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""

with ray_session(load_checked("configs/tiny_cpu.yaml"), Path(sys.argv[1])) as session:
    stop = StopSignal()
    with session.monitored(stop):
        time.sleep(1.5)
        stop.raise_if_stopped()
        [victim] = [p for p in psutil.Process().children(recursive=True) if sys.argv[2] in words(p)]
        victim.kill()
        print("killed", flush=True)
        for _ in range(100):
            time.sleep(0.1)
            try:
                stop.raise_if_stopped()
            except WorkerLost as why:
                print(why, flush=True)
                break
"""


@pytest.mark.parametrize("victim", ["ray::DashboardAgent", "gcs_server"])
def test_a_wait_ends_when_ray_loses_a_process_it_needs(tmp_path: Path, victim: str) -> None:
    command = [sys.executable, "-c", MONITOR, str(tmp_path), victim]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    first, *others = done.stdout.splitlines()
    assert first == "killed", done.stdout + done.stderr
    if done.returncode == 0:  # else Ray itself has ended the process
        assert others in (["Ray's raylet has ended"], ["Ray's gcs_server has ended"])
    assert "Traceback" not in done.stderr


LATE_CALL = """
import os
import sys
import tempfile
import time
from pathlib import Path
import psutil
from launch.cluster import running_cluster  # imports what a run does, Ray too
from launch.ray_session.connect import ray_session
from rlsys.checks import load_checked

before, folder = dict(os.environ), tempfile.gettempdir()
with ray_session(load_checked("configs/tiny_cpu.yaml"), Path(sys.argv[1])) as session:
    ref = session.ray.put(1)
    print(sorted(os.environ.items() - before.items()))
    time.sleep(3)
    [raylet] = [p for p in psutil.Process().children() if p.name() == "raylet"]
    print("workers:", sum("Agent" not in p.name() for p in raylet.children()))
print("left:", sorted(os.environ.items() ^ before.items()), tempfile.gettempdir() == folder)
try:
    session.ray.wait([ref])
except Exception as error:
    print(type(error).__name__, session.ray.is_initialized())
"""


def test_no_worker_starts_before_an_actor_and_after_a_session_no_other_ray_and_the_environment_is_as_before(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", LATE_CALL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    changed, workers, left, error = done.stdout.splitlines()
    assert "TMPDIR" in changed, done.stdout + done.stderr
    assert workers == "workers: 0"
    assert left == "left: [] True"
    assert error.endswith("False")


def test_leftovers_of_a_dead_driver_are_removed_and_of_a_running_one_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.ray_session.leftovers.short_temp_dir", lambda: str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    while psutil.Process(dead.pid).status() != psutil.STATUS_ZOMBIE:  # its parent has not waited for it yet
        time.sleep(0.01)
    folders = [tmp_path / f"rlsys-{pid}-abc" for pid in (dead.pid, os.getpid())]
    for folder in folders:
        folder.mkdir()
    remove_leftovers()
    assert [folder.exists() for folder in folders] == [False, True]
    dead.wait()


def test_a_driver_in_another_container_is_seen_to_run_by_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.ray_session.leftovers.short_temp_dir", lambda: str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folder = tmp_path / f"rlsys-{dead.pid}-abc"
    folder.mkdir()
    with lock_folder(folder):
        assert abandoned_folders() == []
        remove_leftovers()
        assert folder.exists()
    assert abandoned_folders() == [folder]
    remove_leftovers()
    assert not folder.exists()
