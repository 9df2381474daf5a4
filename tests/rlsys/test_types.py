"""What a sample says of itself."""

import numpy as np
import pytest

from rlsys.batching.turn_tree import TurnTree
from rlsys.types import Observation, Sample


@pytest.mark.parametrize(
    ("finish", "truncated"),
    [
        ("stop", False),
        ("cut", False),
        ("length", True),
        ("turns", True),
        ("tokens", True),
        ("window", True),
        ("time", True),
    ],
)
def test_a_sample_that_ended_at_a_limit_is_truncated(finish, truncated):
    assert Sample("p", 0, "", np.ones(1, np.int32), np.zeros(1, np.float32), finish, 0).truncated is truncated


@pytest.mark.parametrize(
    ("places", "turns", "sequence", "inputs"),
    [
        ([], 1, "abc", "ab"),
        ([0], 1, "xyabc", "xyab"),
        ([1], 2, "axybc", "axyb"),
        ([0, 1], 2, "xyaxybc", "xyaxyb"),
        ([0, 3], 1, "xyabcxy", "xyab"),  # the last word of the environment has no turn
        ([0, 1, 1], 3, "xyaxyxybc", "xyaxyxyb"),  # between both there is an empty turn
        ([0, 0, 3, 3], 2, "xyxyabcxyxy", "xyxyab"),
    ],
)
def test_turns_sequence_and_inputs_of_three_own_tokens_and_what_an_environment_said(places, turns, sequence, inputs):
    """`abc` are the model's own tokens; at each of the places the environment said `xy` before."""
    own, observed = (np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in ("abc", "xy"))
    observations = tuple(Observation(at, observed) for at in places)
    sample = Sample("p", 0, "", own, np.zeros(3, np.float32), "stop", 0, observations=observations)
    assert (sample.turn_count, len(sample.turns)) == (turns, turns)
    assert "".join(map(chr, sample.sequence)) == sequence
    assert sample.continued_turns == list(range(-1, turns - 1))
    tree = TurnTree()
    tree.add(0, sample, group=0, prompt=0)
    assert (
        "".join(map(chr, np.concatenate([part for node in tree.paths[0] for part in tree.nodes[node].parts]))) == inputs
    )
