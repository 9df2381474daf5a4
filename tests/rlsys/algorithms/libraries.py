"""Other libraries, as `make published` installs them, and the tests' batch in their shape: rows with a mask."""

import ast
import importlib.metadata
import inspect
import os
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import test_published_losses as published
import torch
from torch import Tensor

FOLDER = os.environ.get("RLSYS_PUBLISHED", "")
needed = pytest.mark.skipif(not FOLDER, reason="RLSYS_PUBLISHED names no folder with them; `make published` makes one")
MASK = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]).float()


def import_from(library: str, module: str, version: str) -> Any:
    """A module of theirs."""
    if FOLDER not in sys.path:
        sys.path.append(FOLDER)
    assert importlib.metadata.version(library) == version
    return importlib.import_module(module)


def without_inits(*packages: str, **stand_ins: Any) -> None:
    """Lets modules of packages be imported without what the packages themselves import, such as flash_attn."""
    for name in packages:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(Path(FOLDER, *name.split(".")))]
    for name, value in stand_ins.items():
        module, _, attribute = name.replace("__", ".").rpartition(".")
        sys.modules[module] = ModuleType(module)
        setattr(sys.modules[module], attribute, value)


def run_statement(method: Any, condition: str, wanted: str, names: dict[str, Any]) -> Any:
    """Runs the one `if` of their method that has a condition and assigns a name, and returns its value."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    (statement,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == condition
        and f"\n    {wanted} = " in ast.unparse(node)
    )
    scope = dict(inspect.unwrap(method).__globals__) | names
    exec(compile(ast.Module([statement], []), inspect.getfile(method), "exec"), scope)
    return scope[wanted]


def spread(column: list[float]) -> Tensor:
    """In four rows, with zeros where there is no token of the model."""
    return fill(torch.tensor(column))


def fill(values: Tensor) -> Tensor:
    return torch.zeros(MASK.shape).masked_scatter(MASK.bool(), values)


def options_of(name: str) -> dict[str, float]:
    return {key: float(value) for key, value in re.findall(r"(\w+)=(-?[\d.]+)(?= |$)", name)}


def at(name: str) -> list[float]:
    return published.FAR if name.endswith("FAR") else published.LOGPROBS


def advantages_of(name: str) -> Tensor:
    return spread(published.SHARED if "SHARED" in name else published.MIXED)
