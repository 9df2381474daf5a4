"""Hosts on this machine that share nothing but its disk: each has its own network, processes, name, shared memory and some folders.

A host is a tree of processes below one `unshare`; who kills that has pulled the plug. It takes root and a kernel that lets it.
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

NETWORK = f"10.213.{os.getpid() % 250 + 1}"  # of the hosts; this machine's address in it ends in 254
INSIDE = 'hostname "$1"; shift; while [ "$1" != -- ]; do mount -t tmpfs tmpfs "$1"; shift; done; shift; mkdir -p "$TMPDIR"; "$@"; exit $?'


class NoHosts(Exception):
    """Why there can be none."""


class Host:
    """`Host(1, [folder]).start(["ray", "start", …], environment)`; what is in `folder` is its own, and empty at first."""

    def __init__(self, number: int, own: list[Path]):
        self.number, self.own, self.name = number, [Path("/dev/shm"), *own], f"host{number}"
        self.address, self.space = f"{NETWORK}.{number}", f"rlsys-{os.getpid()}-{number}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], environment: dict[str, str], out: IO[str]) -> "subprocess.Popen[bytes]":
        """The first command takes the host up, with all that it starts."""
        apart = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
        within = [
            "setpriv",
            "--pdeathsig=KILL",
            "nsenter",
            f"--net=/run/netns/{self.space}",
            *apart,
            "sh",
            "-c",
            INSIDE,
            "sh",
            self.name,
        ]
        inside = [*within, *map(str, self.own), "--", *command]
        process = subprocess.Popen(inside, env=environment, stdout=out, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process

    def lose(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def hosts(count: int, own: list[Path]) -> Iterator[list[Host]]:
    """So many hosts in one network, or `NoHosts`."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        raise NoHosts("network namespaces take root, `ip` and `unshare`")
    remove_leftovers()
    bridge, made = f"rl{os.getpid()}", [Host(i, own) for i in range(1, count + 1)]
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
            ip("addr", "add", f"{NETWORK}.254/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            for host in made:
                cable = f"{bridge}-{host.number}"
                ip("netns", "add", host.space)
                ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", host.space)
                ip("link", "set", cable, "master", bridge, "up")
                ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    ip("-n", host.space, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            raise NoHosts(str(error.stderr).strip()) from None
        yield made
    finally:
        for host in made:
            host.lose()
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "del", host.space)
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            ip("link", "del", bridge)


def remove_leftovers() -> None:
    """Of tests that were killed."""
    spaces = re.findall(r"^rlsys-(\d+)-\d+", ip("netns", "list"), re.M)
    bridges = re.findall(r"^\d+: rl(\d+):", ip("-oneline", "link"), re.M)
    for pid in {*spaces, *bridges} - {str(p) for p in psutil.pids()}:
        for name in re.findall(rf"^rlsys-{pid}-\d+", ip("netns", "list"), re.M):
            ip("netns", "del", name)
        if pid in bridges:
            ip("link", "del", f"rl{pid}")


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
