"""Tensors in files, and the thread that writes checkpoints."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workers.learner.files.checkpoint_writer import CheckpointWriter, merge_results
from workers.learner.files.tensor_files import TensorFiles, verify_hash, write_tensors

TENSORS = {"step": torch.tensor(3.0), "a": torch.tensor([[-0.0, 1.5], [2.0, 1e-40]]), "none": torch.zeros(0, 4)}
SHAPES = {"step": [], "a": [2, 2], "none": [0, 4]}


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = TENSORS | {"half": torch.tensor([1.0, 2.5], dtype=torch.bfloat16)}
    write_tensors(tmp_path / "file", tensors)
    loaded = load_file(tmp_path / "file")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), "bit for bit"


def test_a_file_that_differs_from_what_was_written_is_refused(tmp_path: Path) -> None:
    digest = write_tensors(tmp_path / "file", TENSORS)
    data = bytearray((tmp_path / "file").read_bytes())
    data[-1] ^= 1
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(OSError, match="not what was written"):
        verify_hash(tmp_path / "file", digest)


def test_missing_surplus_or_misshapen_tensors_are_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", TENSORS)
    files = TensorFiles([tmp_path / "file"])
    files.require(SHAPES)
    with pytest.raises(ValueError, match=r"file does not hold 1 of 4 tensors, such as b\."):
        files.require(SHAPES | {"b": [1]})
    with pytest.raises(ValueError, match=r"file holds, and the model does not have, 1 of 2 tensors, such as a\."):
        files.require({"step": [], "none": [0, 4]})
    with pytest.raises(ValueError, match=r"a is F32 \[2, 2\]; the model needs F32 \[4\]"):
        files.require(SHAPES | {"a": [4]})
    with pytest.raises(ValueError, match="an empty list of files does not hold 3 of 3"):
        TensorFiles([]).require(SHAPES)


def test_a_state_in_half_precision_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "file")
    with pytest.raises(ValueError, match="a is BF16"):
        TensorFiles([tmp_path / "file"]).require({"a": [2]})


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_tensors(tmp_path / name, TENSORS)
    with pytest.raises(ValueError, match=r"two holds (step|a|none), and so does another"):
        TensorFiles([tmp_path / "one", tmp_path / "two"])


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", TENSORS)
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-1])
    with pytest.raises(ValueError, match="file cannot be read"):
        TensorFiles([tmp_path / "file"])


def test_a_second_checkpoint_waits_for_the_first(tmp_path: Path) -> None:
    writer, go = CheckpointWriter(), threading.Event()
    writer.start(tmp_path / "first", {"a/file": TENSORS}, {"b": lambda folder: (go.wait(), None)[1]})
    assert writer.result(wait=False) is None
    threading.Timer(0.2, go.set).start()
    writer.start(tmp_path / "second", {"a/file": TENSORS})
    assert (tmp_path / "first" / "a" / "file").is_file()
    second = writer.result(wait=True)
    assert isinstance(second, dict)
    assert second.keys() == {"a/file"}


def test_an_error_that_is_not_the_disks_is_raised_unchanged() -> None:
    writer = CheckpointWriter()

    def fill(folder: Path) -> None:
        raise KeyError("tokenizer")

    writer.start(Path("/proc/self/fd"), {}, {".": fill})
    with pytest.raises(KeyError, match="tokenizer"):
        writer.result(wait=True)


def test_results_are_merged_once_all_ranks_have_written() -> None:
    assert merge_results([{"a": "1"}, None]) is None
    assert merge_results([{"a": "1"}, {"b": "2"}]) == {"a": "1", "b": "2"}
