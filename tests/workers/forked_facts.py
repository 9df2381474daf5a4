"""A process that says what it is, and starts one that would outlive it."""

import json
import os
import random
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from workers.processes.child import run_child


def preload(settings: Any) -> None:
    if settings.description == "broken":
        raise ImportError("a library is missing")
    import wave  # noqa: F401  a module that nothing else imports


def main(fd: int, parent: int) -> None:
    imported = "wave" in sys.modules

    def make_server(connection: Connection, settings: Any) -> Any:
        def serve() -> None:
            orphan = os.fork()
            if not orphan:
                os.setsid()
                time.sleep(600)
            started = subprocess.Popen(["sleep", "600"], start_new_session=True)
            facts: dict[str, Any] = {
                "pids": [os.getpid(), orphan, started.pid],
                "parent": os.getppid() == parent,
                "session": os.getsid(0) == os.getpid(),
                "folder": os.getcwd(),
                "path": sys.path,
                "environment": dict(os.environ),
                "random": [random.random(), float(np.random.rand())],
                "hash": hash("the order of sets"),
                "preloaded": imported,
                "stdin": sys.stdin.read(),
            }
            connection.send_bytes(json.dumps(facts).encode())
            connection.recv_bytes()
            sys.exit(7)

        return serve

    run_child(fd, parent, make_server, "serving")
