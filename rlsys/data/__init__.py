"""Prompts from data that people already have: files, folders, Hugging Face data sets, several mixed. README.md shows how."""

from rlsys.data.dataset import Dataset
from rlsys.data.keep import Rules, choose, contamination, notes, shared, write_bad_rows
from rlsys.data.order import Shuffled, Weighted
from rlsys.data.origin import Origin
from rlsys.data.peek import peek
from rlsys.data.prepare import Preparation
from rlsys.data.render import Form
from rlsys.data.store import Joined, Rows, Stored

__all__ = [
    "Dataset",
    "Form",
    "Joined",
    "Origin",
    "Preparation",
    "Rows",
    "Rules",
    "Shuffled",
    "Stored",
    "Weighted",
    "choose",
    "contamination",
    "notes",
    "peek",
    "shared",
    "write_bad_rows",
]
