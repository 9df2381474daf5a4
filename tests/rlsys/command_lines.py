"""What processes run, of which any may end while a test looks."""

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Returns its arguments; none if it has ended, or is a zombie."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
