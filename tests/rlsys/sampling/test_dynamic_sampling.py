from dataclasses import replace

import numpy as np
import pytest
from fakes import make_batch

from rlsys.errors import NothingToLearn
from rlsys.sampling.dynamic_sampling import concat_batches, fill_batch, informative_groups, select_groups
from rlsys.types import Batch, Verdict


class Stream:
    """Hands out groups of two whose rewards are given, and remembers how many were asked for."""

    def __init__(self, rewards: list[tuple[float, float]]):
        self.rewards, self.asked = rewards, list[int]()

    def __call__(self, count: int) -> Batch:
        first = sum(self.asked)
        self.asked.append(count)
        pairs = self.rewards[first : first + count]
        batch = make_batch([r for pair in pairs for r in pair], [g for g in range(count) for _ in range(2)])
        named = [replace(p, uid=f"u{first + i}") for i, p in enumerate(batch.prompts)]
        samples = [replace(s, uid=named[g].uid) for s, g in zip(batch.samples, batch.groups, strict=True)]
        return replace(batch, prompts=named, samples=samples, reward_s=0.5, position=first + count)


GOOD, RIGHT, WRONG = (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)


def test_a_batch_that_is_full_at_once_is_taken_as_it_is():
    stream = Stream([GOOD] * 3)
    batch = fill_batch(stream, 3, max_rounds=1, step=1)
    assert stream.asked == [3]
    assert [p.uid for p in batch.prompts] == ["u0", "u1", "u2"]
    assert (batch.dropped_groups, batch.position) == (0, 3)


def test_groups_that_teach_nothing_make_room_for_others():
    stream = Stream([GOOD, RIGHT, WRONG, GOOD, WRONG, GOOD, GOOD, GOOD])
    batch = fill_batch(stream, 3, max_rounds=5, step=1)
    assert stream.asked == [3, 3], "one in three is good and two are missing: six, but not more than a batch"
    assert [p.uid for p in batch.prompts] == ["u0", "u3", "u5"]
    assert [s.uid for s in batch.samples] == ["u0", "u0", "u3", "u3", "u5", "u5"]
    assert batch.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.rewards.tolist() == [1, 0] * 3
    assert (batch.dropped_groups, batch.position, batch.reward_s) == (3, 6, 1.0)


def test_what_was_asked_for_too_much_goes_back_into_the_stream():
    stream = Stream([GOOD, GOOD, WRONG, WRONG, GOOD, GOOD, WRONG, GOOD])
    batch = fill_batch(stream, 4, max_rounds=5, step=1)
    assert stream.asked == [4, 4], "half are good and two are missing"
    assert [p.uid for p in batch.prompts] == ["u0", "u1", "u4", "u5"]
    assert (batch.dropped_groups, batch.position) == (2, 6), "u6 and u7 were not needed"


def test_rounds_grow_smaller_with_what_is_missing():
    stream = Stream([GOOD, GOOD, GOOD, WRONG, WRONG, GOOD])
    batch = fill_batch(stream, 4, max_rounds=5, step=1)
    assert stream.asked == [4, 2], "three of four are good and one is missing"
    assert batch.position == 6


def test_after_so_many_rounds_it_stops_and_says_what_it_got():
    stream = Stream([GOOD, RIGHT, WRONG, RIGHT, RIGHT, WRONG, RIGHT])
    with pytest.raises(NothingToLearn) as error:
        fill_batch(stream, 3, max_rounds=2, step=7)
    for part in ("step 7", "1 of 3 groups", "2 rounds", "6 prompts", "from 0 to 1", "max_rounds", "enabled=false"):
        assert part in str(error.value), part


def test_a_group_teaches_where_at_least_two_rewards_differ():
    batch = make_batch([1, 1, 0, 1, 1, 0.1], [0, 0, 1, 1, 2, 4], prompt_lengths=[4] * 5)
    assert informative_groups(batch).tolist() == [False, True, False, False, False], "equal, good, alone, lost, alone"


def test_parts_of_a_reward_may_differ_where_their_sum_does_not():
    batch = replace(make_batch([1, 1], [0, 0]), components=[{"a": 1.0, "b": 0.0}, {"b": 1.0, "a": 0.0}])
    assert informative_groups(batch).tolist() == [False]
    assert informative_groups(batch, by_component=True).tolist() == [True]
    same = replace(batch, components=[{"a": 1.0, "b": 0.0}, {"b": 0.0, "a": 1.0}])
    assert informative_groups(same, by_component=True).tolist() == [False]


def test_a_round_without_verdicts_is_a_round_without_groups():
    empty = replace(
        make_batch([], [], prompt_lengths=[4]), failures={"timeout": 2}, requested=2, first_failure="timeout: x"
    )
    stream = Stream([GOOD, GOOD])
    batches = iter([lambda n: empty, lambda n: stream(n)])
    batch = fill_batch(lambda n: next(batches)(n), 2, max_rounds=2, step=1)
    assert [p.uid for p in batch.prompts] == ["u0", "u1"]
    assert (batch.failures, batch.requested, batch.first_failure) == ({"timeout": 2}, 2, "timeout: x")


def test_after_each_round_that_was_not_enough_all_that_is_there_is_looked_at():
    checked: list[tuple[int, int]] = []
    fill_batch(
        Stream([WRONG, GOOD, WRONG, GOOD]),
        2,
        max_rounds=5,
        step=1,
        check=lambda b: checked.append((len(b.prompts), b.requested)),
    )
    assert [prompts for prompts, _ in checked] == [2]


def test_who_gives_up_says_how_many_verdicts_failed_and_why_the_first_did():
    lost = replace(
        make_batch([], [], prompt_lengths=[4]), failures={"crash": 2}, requested=2, first_failure="crash: it fell"
    )
    with pytest.raises(NothingToLearn, match=r"4 of 4 verdicts failed, the first: crash: it fell\. This run can"):
        fill_batch(lambda count: lost, 1, max_rounds=2, step=1)


def test_what_failed_stays_known_where_its_group_is_dropped():
    batch = make_batch([1, 0], [0, 0], prompt_lengths=[4, 4])
    lost = (replace(batch.samples[0], uid=batch.prompts[1].uid), Verdict(None, failure="crash", detail="it fell"))
    selected = select_groups(replace(batch, failed=[lost]), np.array([True, False]))
    assert selected.failed == [lost]
    assert [p.uid for p in selected.prompts] == ["p0"]


def test_some_groups_of_a_batch_keep_their_own_samples():
    batch = make_batch([1, 2, 3, 4, 5], [0, 1, 1, 2, 2], lengths=[1, 2, 3, 4, 5])
    batch = replace(batch, greedy=np.array([7, 8, 9], dtype=np.float32), components=[{"a": i} for i in range(5)])
    selected = select_groups(batch, np.array([True, False, True]))
    assert [p.uid for p in selected.prompts] == ["p0", "p2"]
    assert selected.groups.tolist() == [0, 1, 1]
    assert selected.rewards.tolist() == [1, 4, 5]
    assert selected.lengths.tolist() == [1, 4, 5]
    assert selected.components == [{"a": 0}, {"a": 3}, {"a": 4}]
    assert selected.greedy.tolist() == [7, 9]
    assert selected.dropped_groups == 1


def test_joined_batches_keep_their_groups_and_add_up_their_counts():
    one = replace(make_batch([1, 0], [0, 1]), failures={"timeout": 1, "crash": 2}, dropped_groups=1, position=4)
    two = replace(make_batch([0.5], [0]), failures={"timeout": 3}, position=6, greedy=None)
    joined = concat_batches([one, two])
    assert joined.groups.tolist() == [0, 1, 2]
    assert joined.rewards.tolist() == [1, 0, 0.5]
    assert joined.failures == {"timeout": 4, "crash": 2}
    assert (joined.dropped_groups, joined.position) == (1, 6)
