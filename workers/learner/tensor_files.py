"""Tensors on disk: safetensors files, written so that what is said to be there is there, and read tensor by tensor."""

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

_CODES = {"float32": "F32", "bfloat16": "BF16"}
_CHUNK = 1 << 24


def write_tensors(file: Path, tensors: dict[str, Any]) -> str:
    """Writes a safetensors file, proves it, and returns its SHA-256.

    The hash is of what is in memory, before it has been anywhere else: what the library's own writer wrote can only be hashed
    as it came back.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        code = _CODES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    digest = hashlib.sha256()
    with file.open("wb") as out:
        parts: list[bytes | memoryview] = [
            len(words).to_bytes(8, "little") + words,
            *map(tensor_bytes, tensors.values()),
        ]
        for data in parts:
            for i in range(0, len(data), _CHUNK):
                out.write(data[i : i + _CHUNK])
                digest.update(data[i : i + _CHUNK])
        out.flush()
        sync_to_disk(out.fileno())
    verify_hash(file, digest.hexdigest())
    return digest.hexdigest()


def tensor_bytes(tensor: Any) -> memoryview:
    """A tensor's bytes, not copied."""
    import torch

    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def sha256(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def sync_and_hash(file: Path) -> str:
    """Does the same with a small file that somebody else wrote."""
    digest = sha256(file)
    with file.open("rb") as written:
        sync_to_disk(written.fileno())
    verify_hash(file, digest)
    return digest


def sync_to_disk(descriptor: int) -> None:
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # what is read back comes from the disk too


def verify_hash(file: Path, expected: str) -> None:
    if sha256(file) != expected:
        raise OSError(errno.EIO, "what is read back is not what was written", str(file))


class TensorFiles:
    """Several safetensors files as one. A tensor is read when it is asked for."""

    def __init__(self, files: list[Path]):
        from safetensors import SafetensorError, safe_open

        self.files, self.file_by_tensor = files, dict[str, Any]()
        for file in files:
            try:
                opened = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file} cannot be read: {error}. Use another checkpoint.") from error
            for name in opened.keys():  # noqa: SIM118
                if name in self.file_by_tensor:
                    raise ValueError(
                        f"{file} holds {name}, and so does another file beside it. Use another checkpoint."
                    )
                self.file_by_tensor[name] = opened

    def require(self, shapes: dict[str, list[int]]) -> None:
        """Refuses files that do not hold just these tensors, in single precision."""
        where = ", ".join(map(str, self.files)) or "an empty list of files"
        missing, surplus = (
            sorted(shapes.keys() - self.file_by_tensor.keys()),
            sorted(self.file_by_tensor.keys() - shapes.keys()),
        )
        for what, names in (("does not hold", missing), ("holds, and the model does not have,", surplus)):
            if names:
                raise ValueError(
                    f"{where} {what} {len(names)} of {len(shapes)} tensors, such as {names[0]}. It is another model's "
                    "checkpoint, or not whole. Use another."
                )
        for name, shape in shapes.items():
            found = self.file_by_tensor[name].get_slice(name)
            if found.get_shape() != shape or found.get_dtype() != "F32":
                raise ValueError(
                    f"{where}: {name} is {found.get_dtype()} {found.get_shape()}; the model needs F32 {shape}. "
                    "It is another model's checkpoint. Use another."
                )

    def read(self, name: str) -> Any:
        return self.file_by_tensor[name].get_tensor(name)
