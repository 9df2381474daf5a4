"""A run seen from outside while it trains: what its processes listen on, and what stands in their command lines."""

from dataclasses import dataclass, field

import psutil
from killing import Run


@dataclass
class Seen:
    run: Run
    listening: list[str] = field(default_factory=list)  # address, port and process
    commands: list[str] = field(default_factory=list)


def look(run: Run) -> Seen:
    observed = Seen(run)
    for process in run.family():
        try:
            observed.commands.append(" ".join(process.cmdline()))
            for c in process.net_connections("inet"):
                if c.status == psutil.CONN_LISTEN or (c.type == 2 and not c.raddr):
                    observed.listening.append(f"{c.laddr.ip} {c.laddr.port} {process.name()}")
        except psutil.NoSuchProcess:  # a reward process that has been replaced
            continue
    return observed
