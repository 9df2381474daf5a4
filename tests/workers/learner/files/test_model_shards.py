"""Files of a model are no larger than a limit, and the index lists what they hold."""

import torch
from torch import nn

from workers.learner.files.model_shards import file_index, split_into_files


class Model(nn.Module):
    """Parameters p0, p1, … of these sizes."""

    def __init__(self, *sizes: int):
        super().__init__()
        for i, size in enumerate(sizes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.zeros(size)))


def test_no_file_is_larger_than_the_limit_but_for_one_tensor() -> None:
    lm = Model(5, 5, 1, 12, 3, 7)
    tensors = dict(lm.named_parameters())
    files = split_into_files(tensors, 40)  # ten numbers
    assert list(files.values()) == [["p0", "p1"], ["p2"], ["p3"], ["p4", "p5"]]
    assert next(iter(files)) == "model-00001-of-00004.safetensors"
    index = file_index(lm, tensors, files)
    assert index["metadata"] == {"total_size": 4 * 33}
    assert index["weight_map"]["p3"] == "model-00003-of-00004.safetensors"
