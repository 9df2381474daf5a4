"""Finds what is wrong with the safetensors files of a model directory, from their headers alone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER = 100_000_000  # bytes, the format's own limit


def weight_file_problems(folder: Path) -> Iterator[str]:
    """Returns a sentence for each file that is missing, truncated or damaged, or that lacks what the index says it holds.

    Directories with weights in another format, or with none, are not checked.
    """
    try:
        names_by_file = expected_names(folder)
    except (ValueError, KeyError, TypeError, AttributeError):
        yield f"{folder / INDEX} is not an index of safetensors files. Copy or download it again."
        return
    for file, names in names_by_file.items():
        try:
            stored = read_header(folder / file)
        except ValueError as problem:
            yield f"{problem}. Copy or download it again."
        else:
            if absent := [name for name in names if name not in stored]:
                more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
                yield (
                    f"{folder / file} does not hold {absent[0]}{more}, and {INDEX} says that it does. Copy or download all "
                    "files of the model again."
                )


def expected_names(folder: Path) -> dict[str, list[str]]:
    """Returns the files with weights, and the tensors that the index promises in each."""
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return {SINGLE: []} if (folder / SINGLE).exists() else {}
    names_by_file: dict[str, list[str]] = {}
    for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items():
        names_by_file.setdefault(file, []).append(name)
    return names_by_file


def read_header(file: Path) -> dict[str, Any]:
    """Returns dtype, shape and data_offsets by name of tensor. Raises `ValueError` for a file that is not whole."""
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    with file.open("rb") as source:
        length = int.from_bytes(source.read(8), "little")
        try:
            assert length <= MAX_HEADER
            header: dict[str, Any] = json.loads(source.read(length))
            header.pop("__metadata__", None)
            end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        except (AssertionError, ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{file} is not a safetensors file, or its beginning is damaged") from None
    if (size := file.stat().st_size) != end:
        raise ValueError(f"{file} is truncated or damaged: it has {size:,} bytes, and needs {end:,}")
    return header


def find_weight_file(folder: Path, name: str) -> Path:
    """Returns the file that holds a tensor, or the directory if it is stored under another name."""
    for file in expected_names(folder):
        if name in read_header(folder / file):
            return folder / file
    return folder
