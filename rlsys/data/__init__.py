"""Prompts from existing data: files, folders, Hugging Face data sets, several of them mixed. README.md shows how."""

from rlsys.data.bos import describe_missing_bos
from rlsys.data.dataset import Dataset
from rlsys.data.order import ShuffledOrder, WeightedOrder
from rlsys.data.origin import Origin
from rlsys.data.peek import peek
from rlsys.data.prepare import DatasetPreparer
from rlsys.data.render import PromptFormat
from rlsys.data.selection import (
    SelectionRules,
    describe_contamination,
    describe_rows,
    describe_shared_prompts,
    select_rows,
    write_bad_rows,
)
from rlsys.data.store import JoinedPrompts, PromptRows, StoredDataset

__all__ = [
    "Dataset",
    "DatasetPreparer",
    "JoinedPrompts",
    "Origin",
    "PromptFormat",
    "PromptRows",
    "SelectionRules",
    "ShuffledOrder",
    "StoredDataset",
    "WeightedOrder",
    "describe_contamination",
    "describe_missing_bos",
    "describe_rows",
    "describe_shared_prompts",
    "peek",
    "select_rows",
    "write_bad_rows",
]
