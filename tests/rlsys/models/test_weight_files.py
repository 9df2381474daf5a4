"""What is wrong with a model's files is said with the file's name, from headers alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlsys.models.weight_files import INDEX, weight_file_problems

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with two files and an index."""
    save_file({"one": torch.ones(2, 3), "two": torch.ones(5)}, tmp_path / A, {"format": "pt"})
    save_file({"three": torch.ones(7)}, tmp_path / B, {"format": "pt"})
    write_index(tmp_path, one=A, two=A, three=B)
    return tmp_path


def write_index(model: Path, **file_by_name: str) -> None:
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_by_name}))


def test_whole_files_have_no_problem(model: Path, tmp_path: Path) -> None:
    assert list(weight_file_problems(model)) == []
    (tmp_path / "empty").mkdir()
    assert list(weight_file_problems(tmp_path / "empty")) == []


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


DAMAGES: dict[str, Callable[[Path], object]] = {
    f"{B} is missing": lambda model: (model / B).unlink(),
    f"{B} is truncated or damaged": lambda model: cut(model / B),
    f"{A} is not a safetensors file": lambda model: (model / A).write_bytes(
        b"version https://git-lfs.github.com/spec/v1"
    ),
    f"{A} is not a safetensors file, or": lambda model: (model / A).write_bytes(b""),
    f"{B} does not hold two and 1 more": lambda model: write_index(model, one=A, two=B, three=B, four=B),
    f"{INDEX} is not an index": lambda model: (model / INDEX).write_text('{"weight_map": [1]}'),
}


@pytest.mark.parametrize("sentence", DAMAGES)
def test_a_damaged_file_is_named(model: Path, sentence: str) -> None:
    DAMAGES[sentence](model)
    [problem] = weight_file_problems(model)
    assert f"{model}/{sentence}" in problem
    assert "again" in problem, "it says what to do"


def test_a_single_file_is_read_without_the_index_beside_it(model: Path) -> None:
    save_file({"one": torch.ones(2)}, model / "model.safetensors", {"format": "pt"})
    (model / A).unlink()
    assert list(weight_file_problems(model)) == []
    cut(model / "model.safetensors")
    assert len(list(weight_file_problems(model))) == 1
