"""Where files are kept between runs that can be made again at any time."""

import os
from pathlib import Path


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlsys"


def hub_cache() -> tuple[Path, str]:
    """Returns the download directory of Hugging Face's libraries, and the environment variable that decides it."""
    if directory := os.environ.get("HF_HUB_CACHE"):
        return Path(directory).expanduser(), "HF_HUB_CACHE"
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub", "HF_HOME"
    return cache_dir().parent.expanduser() / "huggingface" / "hub", "XDG_CACHE_HOME"
