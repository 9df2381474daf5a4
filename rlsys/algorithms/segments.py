"""Statistics over groups or sequences of a flat tensor, found by id, in any order and of any size. No Python loops."""

import torch
from torch import Tensor


class Segments:
    """`Segments(labels)` for integer labels [N]; M of them are distinct.

    labels 7 3 7    ids 1 0 1    count 1 2    sum([10, 20, 30]) = 20 40    mean(...) = 20 20    spread([1, 2]) = 2 1 2
    """

    def __init__(self, labels: Tensor):
        values, self.ids = torch.unique(labels, return_inverse=True)  # ids [N]
        self.segment_count = len(values)  # M
        self.sizes = torch.bincount(self.ids, minlength=self.segment_count)  # [M]

    @classmethod
    def single(cls, size: int, device: torch.device | str = "cpu") -> "Segments":
        """All members in one segment."""
        whole = cls.__new__(cls)
        whole.ids, whole.segment_count = torch.zeros(size, dtype=torch.long, device=device), 1
        whole.sizes = torch.tensor([size], device=device)
        return whole

    def sum(self, values: Tensor) -> Tensor:
        """[N] -> [M]"""
        return values.new_zeros(self.segment_count).index_add(0, self.ids, values)

    def mean(self, values: Tensor) -> Tensor:
        """[N] -> [M]"""
        return self.sum(values) / self.sizes

    def any_member(self, values: Tensor) -> Tensor:
        """The value of one member, whichever.  [N] -> [M]"""
        return values.new_zeros(self.segment_count).scatter(0, self.ids, values)

    def max(self, values: Tensor) -> Tensor:
        """[N] -> [M]"""
        return values.new_full((self.segment_count,), -torch.inf).scatter_reduce(0, self.ids, values, "amax")

    def broadcast(self, values: Tensor) -> Tensor:
        """What each segment has, to each of its members.  [M] -> [N]"""
        return values[self.ids]
