"""Statistics over groups or sequences of a flat tensor, identified by labels in any order, without Python loops."""

import torch
from torch import Tensor


class Segments:
    """Members [N] of M segments: all members with the same integer label form one segment.

    labels 7 3 7    ids 1 0 1    sizes 1 2    sum([10, 20, 30]) = 20 40    mean(…) = 20 20    broadcast([1, 2]) = 2 1 2
    """

    def __init__(self, labels: Tensor):
        values, self.ids = torch.unique(labels, return_inverse=True)  # ids [N]
        self.segment_count = len(values)  # M
        self.sizes = torch.bincount(self.ids, minlength=self.segment_count)  # [M]

    @classmethod
    def single(cls, size: int, device: torch.device | str = "cpu") -> "Segments":
        """Returns one segment with all members."""
        segments = cls.__new__(cls)
        segments.ids, segments.segment_count = torch.zeros(size, dtype=torch.long, device=device), 1
        segments.sizes = torch.tensor([size], device=device)
        return segments

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over each segment.  [N] -> [M]"""
        return values.new_zeros(self.segment_count).index_add(0, self.ids, values)

    def mean(self, values: Tensor) -> Tensor:
        """Returns the mean over each segment.  [N] -> [M]"""
        return self.sum(values) / self.sizes

    def any_member(self, values: Tensor) -> Tensor:
        """Returns the value of one member of each segment; which one is not specified.  [N] -> [M]"""
        return values.new_zeros(self.segment_count).scatter(0, self.ids, values)

    def max(self, values: Tensor) -> Tensor:
        """Returns the largest value of each segment.  [N] -> [M]"""
        return values.new_full((self.segment_count,), -torch.inf).scatter_reduce(0, self.ids, values, "amax")

    def broadcast(self, values: Tensor) -> Tensor:
        """Gives each member the value of its segment.  [M] -> [N]"""
        return values[self.ids]
