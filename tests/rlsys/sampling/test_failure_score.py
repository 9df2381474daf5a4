"""The score that `reward.on_failure` gives to failed samples."""

from concurrent.futures import Future
from dataclasses import replace

from fakes import FakeRewards, make_config, make_prompt, make_sample

from rlsys.sampling.collector import Collector
from rlsys.types import Episode, Verdict


def test_the_score_of_a_failed_episode_has_no_scores_of_turns_in_it(tmp_path):
    """With algorithm.credit: turn they would be subtracted from it."""
    verdicts: Future = Future()
    verdicts.set_result([Verdict(None, failure="timeout"), Verdict(2.0)])
    samples = [
        replace(make_sample(), uid="p", index=i, episode=Episode(verdict, [], [0.5, 0.25]))
        for i, verdict in enumerate(verdicts.result())
    ]
    collector = Collector(None, FakeRewards(), seed=0, reward=make_config(tmp_path).reward)
    judged = [(sample, verdicts, i) for i, sample in enumerate(samples)]
    batch = collector.build_batch([replace(make_prompt("p"), uid="p")], judged, failure_score=-1.0)
    assert batch.rewards.tolist() == [-1.0, 2.0]
    assert [s.episode.turn_scores for s in batch.samples] == [[0.0, 0.0], [0.5, 0.25]]
