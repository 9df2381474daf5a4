"""Where what can be made again is kept between runs. It may be removed at any time."""

import os
from pathlib import Path


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlsys"


def hub_cache() -> tuple[Path, str]:
    """Where Hugging Face's libraries keep what comes from the hub, and the variable of the environment that says so."""
    if own := os.environ.get("HF_HUB_CACHE"):
        return Path(own).expanduser(), "HF_HUB_CACHE"
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub", "HF_HOME"
    return cache_dir().parent.expanduser() / "huggingface" / "hub", "XDG_CACHE_HOME"
