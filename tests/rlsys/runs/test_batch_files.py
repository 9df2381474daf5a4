"""Batches on disk."""

from dataclasses import replace

import numpy as np
from fakes import make_batch, make_prompt, make_sample

from rlsys.runs.batch_files import read_batch, write_batch
from rlsys.runs.samples import read_saved_samples, write_samples
from rlsys.types import Batch, Episode, Observation, Sample, Verdict, join_partial, join_turns


def same(a: Batch, b: Batch) -> None:
    for name, value in vars(a).items():
        other = getattr(b, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype
            np.testing.assert_array_equal(value, other)
        elif name not in ("samples", "failed"):
            assert value == other, name
    for x, y in zip([*a.samples, *(s for s, _ in a.failed)], [*b.samples, *(s for s, _ in b.failed)], strict=True):
        np.testing.assert_array_equal(x.tokens, y.tokens)
        np.testing.assert_array_equal(x.logprobs, y.logprobs)
        assert (x.tokens.dtype, x.logprobs.dtype) == (y.tokens.dtype, y.logprobs.dtype)
        assert replace(x, tokens=0, logprobs=0) == replace(y, tokens=0, logprobs=0)
    assert [v for _, v in a.failed] == [v for _, v in b.failed]


def test_a_batch_is_read_back_as_it_was(tmp_path):
    batch = make_batch([1.0, 0.1, 0.5], [0, 0, 1], lengths=[3, 1, 4])
    write_batch(tmp_path / "000", batch)
    same(batch, read_batch(tmp_path / "000"))


def test_failures_answers_messages_and_odd_texts_too(tmp_path):
    prompt = make_prompt("p", answer="42", nested={"a": [1, 2.5, None]})
    prompt = replace(
        prompt, messages=[{"role": "user", "content": "\ud800 half a pair"}], rewards="own", max_new_tokens=5
    )
    lost = make_sample(index=1, text="135246"), Verdict(None, {"a": 0.1}, "timeout", "no answer after 10 s")
    batch = Batch(
        prompts=[prompt],
        samples=[make_sample()],
        groups=np.array([0]),
        rewards=np.array([1 / 3], dtype=np.float32),
        components=[{"zigzag": 1 / 3}],
        answers=[None],
        failed=[lost],
        requested=2,
        failures={"timeout": 1},
        first_failure="timeout: no answer",
        reward_s=0.1,
        greedy=np.array([np.nan], dtype=np.float32),
        dropped_groups=3,
        position=12,
    )
    write_batch(tmp_path / "000", batch)
    again = read_batch(tmp_path / "000")
    same(replace(batch, answers=[None]), again)
    write_samples(tmp_path / "a.parquet", batch)
    write_samples(tmp_path / "b.parquet", again)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_a_sample_keeps_its_versions_and_a_batch_its_deferred_positions(tmp_path):
    batch = make_batch([1.0, 0.0], [0, 0], lengths=[5, 4])
    mixed = replace(batch.samples[0], version=4, changes=((2, 6), (4, 7)))
    batch = replace(batch, samples=[mixed, batch.samples[1]], position=9, deferred=(2, 7))
    write_batch(tmp_path / "000", batch)
    again = read_batch(tmp_path / "000")
    same(batch, again)
    assert again.samples[0].versions.tolist() == [4, 4, 6, 6, 7]
    assert again.samples[1].versions.tolist() == [1] * 4
    write_samples(tmp_path / "a.parquet", again)
    assert [saved.sample.changes for saved in read_saved_samples(tmp_path / "a.parquet")] == [((2, 6), (4, 7)), ()]


def test_a_sample_keeps_what_an_environment_answered(tmp_path):
    answers = tuple(Observation(at, np.array(tokens, dtype=np.int32)) for at, tokens in ((0, [5]), (3, [7, 8])))
    batch = make_batch([1.0, 0.0], [0, 0], lengths=[5, 4])
    episode = Episode(Verdict(0.5), [{"role": "user", "content": "hi"}], [0.0, 0.5])
    batch = replace(batch, samples=[replace(batch.samples[0], observations=answers, episode=episode), batch.samples[1]])
    write_batch(tmp_path / "000", batch)
    first, second = read_batch(tmp_path / "000").samples
    write_samples(tmp_path / "a.parquet", batch)
    saved = [saved.sample for saved in read_saved_samples(tmp_path / "a.parquet")]
    for read in (first, saved[0]):
        assert [(o.at, o.tokens.tolist()) for o in read.observations] == [(0, [5]), (3, [7, 8])]
        assert (read.episode.messages, read.episode.turn_scores) == (episode.messages, [0.0, 0.5])
    assert second.episode is saved[1].episode is None
    a, b, c, d, e = first.tokens.tolist()
    assert first.sequence.tolist() == [5, a, b, c, 7, 8, d, e]
    assert second.sequence.tolist() == second.tokens.tolist()
    assert second.observations == ()


def test_what_goes_on_is_one_sample_of_both_parts():
    def part(length: int, version: int, *changes: tuple[int, int], finish: str = "stop") -> Sample:
        return Sample(
            "p", 0, "", *(np.arange(length, dtype=t) for t in (np.int32, np.float32)), finish, version, changes
        )

    assert join_partial(part(3, 4, finish="cut"), part(2, 4)).changes == ()
    assert join_partial(part(3, 4), part(2, 6, (1, 7))).changes == ((3, 6), (4, 7))
    assert join_partial(part(3, 4, (1, 5)), part(2, 5, (1, 7))).changes == ((1, 5), (4, 7))
    whole = join_partial(part(3, 4, (1, 5)), part(2, 6, finish="length"))
    assert whole.tokens.tolist() == whole.logprobs.tolist() == [0, 1, 2, 0, 1]
    assert (whole.versions.tolist(), whole.finish) == ([4, 5, 5, 6, 6], "length")
    assert join_partial(part(3, 4), part(0, 6, finish="cut")).finish == "cut"


def test_a_batch_without_samples_is_a_batch(tmp_path):
    batch = replace(make_batch([1.0], [0]), samples=[], groups=np.zeros(0, np.int64), rewards=np.zeros(0, np.float32))
    write_batch(tmp_path / "000", replace(batch, components=[]))
    assert read_batch(tmp_path / "000").samples == []


def test_the_turns_of_an_episode_become_one_sample_that_knows_every_tokens_version():
    def turn(tokens: list[int], version: int, *changes: tuple[int, int], text: str = "") -> Sample:
        numbers = np.array(tokens, dtype=np.int32)
        return Sample("p", 1, text, numbers, -numbers.astype(np.float32), "stop", version, changes)

    empty = turn([], 0)
    parts = [([7, 8], -1, turn([1, 2], 3, text="a")), ([9], 0, turn([4], 3))]
    parts += [([5], 0, turn([6, 6, 3], 3, (1, 5), text="b")), ([], 2, turn([2], 6))]
    whole = join_turns(parts, empty)
    assert whole.continued_turns == [-1, 0, 0, 2]
    assert whole.tokens.tolist() == [1, 2, 4, 6, 6, 3, 2]
    assert whole.sequence.tolist() == [7, 8, 1, 2, 9, 4, 5, 6, 6, 3, 2]
    assert whole.versions.tolist() == [3, 3, 3, 3, 5, 5, 6]
    assert whole.logprobs.tolist() == [-float(t) for t in whole.tokens]
    assert whole.text == "ab"
    assert join_turns([], empty) is empty
