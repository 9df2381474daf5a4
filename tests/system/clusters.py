"""Ray clusters on this machine, with several nodes, a job server and a token."""

import contextlib
import fcntl
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from hosts import Host, NoHosts, hosts
from killing import ROOT

RAY = str(Path(sys.executable).parent / "ray")
HEAD, OTHER, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"  # addresses of the loopback, as if they were machines
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlsys"


@contextlib.contextmanager
def cluster_of_three(environment: dict[str, str]) -> Iterator["Cluster"]:
    """Three hosts, or three nodes of this one where hosts cannot be had. Not started yet."""
    with contextlib.ExitStack() as stack:
        cluster = Cluster(environment)
        with contextlib.suppress(NoHosts):
            three_hosts = stack.enter_context(hosts(3, [cluster.folder]))
            CACHE.mkdir(parents=True, exist_ok=True)
            for host in three_hosts[1:]:  # the built-in model is made where the driver is
                host.own.append(CACHE)
            cluster.hosts = {host.address: host for host in three_hosts}
            cluster.head, *cluster.others = cluster.hosts
            del cluster.environment["GLOO_SOCKET_IFNAME"]
        try:
            yield cluster
        finally:
            cluster.end()


PORTS = iter(random.sample(range(20_000, 32_000), 12_000))  # the kernel gives these to nobody who leaves it the choice


def free_port() -> int:
    """Another one with every call: Ray does not start with two equal ports."""
    for port in PORTS:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise AssertionError("no free port is left")


class Cluster:
    """`Cluster(environment).start()`, and `end()` whatever happens."""

    def __init__(self, environment: dict[str, str]):
        self.lock = os.open(__file__, os.O_RDONLY)  # until `end`, no other cluster of tests has these addresses
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.folder, self.nodes = Path(environment["TMPDIR"]) / "r", {}
        self.told: dict[str, tuple[str, ...]] = {}  # by address: with what `ray start` was called there
        self.hosts: dict[str, Host] = {}  # by address; none: all nodes are of this host
        self.head, self.others = HEAD, [OTHER, THIRD]
        self.port, self.clients, self.dashboard = free_port(), free_port(), free_port()
        (self.folder / "tmp").mkdir(parents=True)
        self.said = Path(environment["TMPDIR"]) / "said"  # by `ray start`, of each node
        self.said.mkdir()
        self.environment = environment | {
            "TMPDIR": str(self.folder / "tmp"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(RAY).parent}:{os.environ['PATH']}",  # where a job finds `rlsys`
            "GLOO_SOCKET_IFNAME": "lo",  # no interface has these addresses for its own
        }

    def start(self, *others: str, cpus: int = 2, options: tuple[str, ...] = ()) -> "Cluster":
        """A head, and a node for each of the other addresses; `options` are for all of them."""
        options = (f"--num-cpus={cpus}", *options)
        host = self.head if self.hosts else "127.0.0.1"
        head = [f"--port={self.port}", f"--dashboard-host={host}", f"--dashboard-port={self.dashboard}"]
        head += [f"--ray-client-server-port={self.clients}"]
        self.node(self.head, "--head", *head, f"--temp-dir={self.folder}", *options)
        self.wait_for(1)
        for address in others:
            self.node(address, f"--address={self.head}:{self.port}", *options)
        self.wait_for(1 + len(others))
        return self

    def node(self, address: str, *options: str) -> None:
        self.told[address] = options
        names = ("metrics-export", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent")
        ports = [f"--{name}-port={free_port()}" for name in names]
        size = [f"--object-store-memory={128 << 20}"]
        command = [RAY, "start", "--block", f"--node-ip-address={address}", *size, *ports, *options]
        with (self.said / address).open("w") as out:
            if self.hosts:
                self.nodes[address] = self.hosts[address].start(command, self.environment, out)
            else:
                self.nodes[address] = subprocess.Popen(
                    command, env=self.environment, stdout=out, stderr=subprocess.STDOUT
                )

    def wait_for(self, count: int, timeout_s: float = 150) -> None:
        """Until so many nodes are there. One that Ray has given up while it started is started again."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, KeyError, TypeError):
                nodes = self.ask("/nodes?view=summary")["data"]["summary"]
                if sum(node["raylet"]["state"] == "ALIVE" for node in nodes) == count:
                    return
            for address, node in self.nodes.items():
                if (node.poll() or 0) > 0:
                    self.node(address, *self.told[address])
            time.sleep(0.2)
        logs = "\n".join(f"{file.name}: {file.read_text()[-3000:]}" for file in self.said.iterdir())
        raise AssertionError(f"no {count} nodes. {logs}")

    @property
    def url(self) -> str:
        return f"http://{self.head if self.hosts else '127.0.0.1'}:{self.dashboard}"

    def stop(self, job: str) -> None:
        """As `ray job stop` does, which takes seconds to start."""
        assert self.ask(f"/api/jobs/{job}/stop", method="POST") == {"stopped": True}

    def ask(self, path: str, **more: Any) -> Any:
        token = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        request = urllib.request.Request(f"{self.url}{path}", headers=token, **more)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def lose(self, address: str) -> None:
        """The host, or the node's raylet and all that it has started."""
        if self.hosts:
            return self.hosts[address].lose()
        [raylet] = [p for p in psutil.Process(self.nodes[address].pid).children() if p.name() == "raylet"]
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def lose_head(self) -> None:
        """And all that runs on its node."""
        end_all(self.nodes.pop(self.head))

    def end(self) -> None:
        for node in self.nodes.values():
            end_all(node)
        shutil.rmtree(self.folder)
        os.close(self.lock)
        shutil.rmtree(self.said)


def end_all(node: "subprocess.Popen[bytes]") -> None:
    """Kills what `ray start` runs, and all of its processes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [p := psutil.Process(node.pid), *p.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    node.wait(30)
