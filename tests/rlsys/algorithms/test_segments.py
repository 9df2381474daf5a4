import plain
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.segments import Segments

# Eighths add up exactly in single precision, in any order.
MEMBERS = st.lists(st.tuples(st.integers(-9, 9), st.integers(-40, 40).map(lambda n: n / 8)), max_size=20)


def test_the_example_in_the_docstring():
    segments = Segments(torch.tensor([7, 3, 7]))
    assert segments.ids.tolist() == [1, 0, 1]
    assert segments.sizes.tolist() == [1, 2]
    assert segments.sum(torch.tensor([10.0, 20.0, 30.0])).tolist() == [20, 40]
    assert segments.mean(torch.tensor([10.0, 20.0, 30.0])).tolist() == [20, 20]
    assert segments.max(torch.tensor([10.0, 20.0, 30.0])).tolist() == [20, 30]
    assert segments.broadcast(torch.tensor([1.0, 2.0])).tolist() == [2, 1, 2]


@given(MEMBERS)
def test_statistics_equal_a_plain_loop_over_segments(members):
    labels, values = [label for label, _ in members], [value for _, value in members]
    segments, tensor = Segments(torch.tensor(labels, dtype=torch.long)), torch.tensor(values)
    for function, result in (
        (sum, segments.sum(tensor)),
        (lambda values: sum(values) / len(values), segments.mean(tensor)),
        (max, segments.max(tensor)),
        (len, segments.sizes),
    ):
        expected = [0.0] * len(values)
        for positions in plain.members(labels):
            for i in positions:
                expected[i] = function([values[j] for j in positions])
        assert segments.broadcast(result).tolist() == pytest.approx(expected, rel=1e-6)
    assert segments.segment_count == len(set(labels))


def test_labels_may_be_far_apart_and_negative():
    segments = Segments(torch.tensor([2**60, -(2**60), 2**60]))
    assert segments.segment_count == 2
    assert segments.sum(torch.tensor([1.0, 2.0, 3.0])).tolist() == [2, 4]


def test_without_members_there_are_no_segments():
    segments = Segments(torch.zeros(0, dtype=torch.long))
    assert segments.segment_count == 0
    assert segments.mean(torch.zeros(0)).tolist() == []
    assert segments.broadcast(segments.max(torch.zeros(0))).tolist() == []


@given(MEMBERS)
def test_any_member_is_a_value_of_the_segment_and_single_is_one_segment(members):
    labels, values = [label for label, _ in members], [value for _, value in members]
    segments, tensor = Segments(torch.tensor(labels, dtype=torch.long)), torch.tensor(values)
    for i, result in enumerate(segments.broadcast(segments.any_member(tensor)).tolist()):
        assert result in [v for label, v in members if label == labels[i]]
    whole = Segments.single(len(values))
    assert whole.broadcast(whole.sum(tensor)).tolist() == [sum(values)] * len(values)


def test_negative_values_have_a_negative_maximum():
    assert Segments(torch.tensor([0, 0, 1])).max(torch.tensor([-3.0, -2.0, -1.0])).tolist() == [-2, -1]


def test_gradients_pass_through_sums_and_back_to_each_member():
    values = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    segments = Segments(torch.tensor([5, 1, 5]))
    (segments.broadcast(segments.mean(values)) * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert values.grad.tolist() == [50.5, 10.0, 50.5]  # each of the two counts half in both means
