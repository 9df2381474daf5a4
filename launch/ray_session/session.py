"""The Ray that this process is connected to."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys.runs.stopping import StopSignal

POLL_S = 1.0  # between two looks at Ray's own processes


@dataclass(frozen=True)
class RaySession:
    """A connection to Ray. A private Ray also has its own processes, and on CPU fork servers for its workers."""

    ray: Any  # the module
    forkserver_dir: Path | None = None  # of servers that fork workers, see workers/start/worker_forkserver.py
    processes: Mapping[str, Any] = field(default_factory=dict)  # of a private Ray, by name

    @contextlib.contextmanager
    def monitored(self, stop: StopSignal) -> Iterator[None]:
        """Reports the end of any of Ray's processes to `stop`: Ray itself may block forever without an error."""
        if not self.processes:
            yield
            return
        finished = threading.Event()

        def poll() -> None:
            while not finished.wait(POLL_S):
                for name, process in self.processes.items():
                    if process.poll() is not None:
                        return stop.mark_lost(f"Ray's {name} has ended")

        thread = threading.Thread(target=poll, name="monitor of Ray", daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()
