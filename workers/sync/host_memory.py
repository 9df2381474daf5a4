"""Flat anonymous memory for weights, which other processes of the same user can map without a file on disk.

The memory is a memfd. Other processes open `/proc/<pid>/fd/<n>`. The kernel frees it when the last process that holds
it ends, however that process ends.
"""

import os
import warnings
from typing import Any


class HostMemory:
    """The owner's end of the memory. It lives as long as the owner's process."""

    def __init__(self, size: int):
        self.fd = os.memfd_create("rlsys-weights")
        os.ftruncate(self.fd, max(size, 1))
        self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        self.bytes = map_file(self.path)


class CachedMapping:
    """The reader's end of the memory. It stays mapped, because the first access to each page is slow."""

    def __init__(self) -> None:
        self.file_id: tuple[int, int] | None = None

    def open(self, path: str) -> Any:
        """Returns the memory at `path` as a tensor of bytes. Maps it only if it is not the memory of the last call."""
        status = os.stat(path)
        if self.file_id != (status.st_dev, status.st_ino):
            self.memory, self.file_id = map_file(path), (status.st_dev, status.st_ino)
        return self.memory


def map_file(path: str) -> Any:
    """Maps a file as a tensor of bytes."""
    import torch

    return torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)


def readonly_tensor(array: Any) -> Any:
    """Returns a tensor that shares an array's bytes. The array may be read-only, as arrays from Ray's store are."""
    import torch

    with warnings.catch_warnings(action="ignore"):  # torch warns that such a tensor must not be written to
        return torch.from_numpy(array)
