"""What a sample says of itself."""

import numpy as np
import pytest

from rlsys.types import Sample


@pytest.mark.parametrize(
    ("finish", "truncated"),
    [("stop", False), ("cut", False), ("length", True), ("turns", True), ("tokens", True), ("window", True)],
)
def test_a_sample_that_ended_at_a_limit_is_truncated(finish, truncated):
    assert Sample("p", 0, "", np.ones(1, np.int32), np.zeros(1, np.float32), finish, 0).truncated is truncated
