"""Where what can be made again is kept between runs. It may be removed at any time."""

import os
from pathlib import Path


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlsys"
