"""Tasks that come with the package, as data sets `builtin:NAME`."""

from typing import Any

from rlsys.tasks import basics, zigzag


def builtin_rows(name: str) -> list[dict[str, Any]]:
    """Returns the rows of `builtin:NAME`."""
    return (basics if name.startswith("basics") else zigzag).rows(name)
