"""TCP ports of this host."""

import socket
from contextlib import closing


def free_port() -> int:
    with closing(socket.socket()) as s:
        s.bind(("", 0))
        port: int = s.getsockname()[1]
        return port


def port_is_taken(port: int) -> bool:
    with closing(socket.socket()) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError:
            return True
    return False
