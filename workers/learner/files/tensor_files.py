"""Tensors in safetensors files: read back after they are written, and loaded tensor by tensor."""

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

_DTYPE_CODES = {"float32": "F32", "bfloat16": "BF16"}
_CHUNK = 1 << 24  # bytes


def write_tensors(file: Path, tensors: Mapping[str, Any]) -> str:
    """Writes a safetensors file, reads it back, and returns its SHA-256."""
    return stream_tensors(file, tensors, tensors.values())


def stream_tensors(file: Path, described: Mapping[str, Any], tensors: Iterable[Any]) -> str:
    """`write_tensors` for tensors that are made one at a time, in the order of `described`, which may have no values.

    The hash is of the bytes in memory, before anything can damage them. The library's own writer does not offer that:
    only the file could be hashed.
    """
    digest = hashlib.sha256()
    with file.open("wb") as out:
        blocks: Iterable[bytes | memoryview] = chain([file_header(described)], map(tensor_bytes, tensors))
        for block in blocks:
            for i in range(0, len(block), _CHUNK):
                out.write(block[i : i + _CHUNK])
                digest.update(block[i : i + _CHUNK])
        out.flush()
        sync_to_disk(out.fileno())
    verify_hash(file, digest.hexdigest())
    return digest.hexdigest()


def file_header(tensors: Mapping[str, Any]) -> bytes:
    """Returns the header of a safetensors file: its length in 8 bytes, then JSON, padded to a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        code = _DTYPE_CODES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: Any) -> memoryview:
    """Returns a tensor's bytes without a copy."""
    import torch

    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def sha256(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def sync_and_hash(file: Path) -> str:
    """Brings a small file that was already written to the disk, reads it back, and returns its SHA-256."""
    digest = sha256(file)
    with file.open("rb") as written:
        sync_to_disk(written.fileno())
    verify_hash(file, digest)
    return digest


def sync_to_disk(descriptor: int) -> None:
    os.fsync(descriptor)
    os.posix_fadvise(
        descriptor, 0, 0, os.POSIX_FADV_DONTNEED
    )  # so that reading back reads the disk, not the page cache


def verify_hash(file: Path, expected: str) -> None:
    if sha256(file) != expected:
        raise OSError(errno.EIO, "what is read back is not what was written", str(file))


class TensorFiles:
    """Several safetensors files as one. Only those bytes of a tensor are read that are used."""

    def __init__(self, files: list[Path]):
        from safetensors import SafetensorError, safe_open

        self.files, self.file_by_tensor = files, dict[str, Path]()
        self.formats: dict[str, tuple[str, list[int]]] = {}  # dtype and shape by name
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                    formats = {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file} cannot be read: {error}. Use another checkpoint.") from error
            for name in formats:
                if name in self.file_by_tensor:
                    raise ValueError(
                        f"{file} holds {name}, and so does another file beside it. Use another checkpoint."
                    )
                self.file_by_tensor[name] = file
            self.formats |= formats

    def require(self, shapes: dict[str, list[int]]) -> None:
        """Raises unless the files hold exactly these tensors, in single precision."""
        paths = ", ".join(map(str, self.files)) or "an empty list of files"
        missing = sorted(shapes.keys() - self.file_by_tensor.keys())
        surplus = sorted(self.file_by_tensor.keys() - shapes.keys())
        for problem, names in (("does not hold", missing), ("holds, and the model does not have,", surplus)):
            if names:
                raise ValueError(
                    f"{paths} {problem} {len(names)} of {len(shapes)} tensors, such as {names[0]}. "
                    "It is another model's checkpoint, or not whole. Use another."
                )
        for name, shape in shapes.items():
            dtype, stored = self.formats[name]
            if (dtype, stored) != ("F32", shape):
                raise ValueError(
                    f"{paths}: {name} is {dtype} {stored}; the model needs F32 {shape}. "
                    "It is another model's checkpoint. Use another."
                )

    def read(self, name: str) -> Any:
        """Returns a tensor whose bytes are read when they are used. Once it is dropped, this process holds none of them."""
        from safetensors import safe_open

        with safe_open(self.file_by_tensor[name], framework="pt") as opened:
            return opened.get_tensor(name)
