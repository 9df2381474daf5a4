"""A batch that is scored as its groups finish has the same numbers as one that is scored as a whole."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fakes import make_batch, make_config
from machines import Machines, killed_while, learned

from rlsys.batching.packing import pack
from rlsys.sampling.early_scoring import BatchScorer, EarlyScoring
from rlsys.types import Batch, Verdict


class Scorer:
    """Whose numbers depend on the company of a sample, as those of real kernels do in their last bits."""

    def __init__(self, ranks: int = 1):
        self.ranks, self.calls = ranks, list[list[list[str]]]()

    def score(self, packs):
        self.calls.append([[f"{len(p.samples)} of {len(p.tokens)}" for p in own] for own in packs])
        return [[p.rollout + np.float32(len(p.tokens)) + np.float32(p.tokens.sum()) / 64 for p in own] for own in packs]


def batch_scorer(scorer: Scorer, thread: ThreadPoolExecutor) -> BatchScorer:
    """Chunks of 24 tokens per rank, two samples per prompt."""
    pack_batch = partial(pack, tokens_per_pack=24)
    return BatchScorer(scorer, thread, pack_batch, samples_per_prompt=2, chunk_tokens=24 * scorer.ranks)


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as thread:
        yield thread


def batch_of_six() -> Batch:
    """Groups of two; with a prompt of four tokens, computed once, they take 6, 10, 4, 16, 6, 8 tokens."""
    lengths = [2, 2, 4, 4, 1, 1, 9, 5, 3, 1, 3, 3]
    return make_batch([0.0] * 12, [g for g in range(6) for _ in range(2)], lengths)


def column(batch: Batch, thread, order=None, ranks: int = 1) -> tuple[list[float], Scorer]:
    """Its numbers, its samples having finished in this order; None: they are shown all at once."""
    scorer = Scorer(ranks)
    scores = batch_scorer(scorer, thread)
    for i in order or []:
        scores.add_samples(batch.prompts, [batch.samples[i]])
    scores.finish(batch)
    return scores.column(batch).tolist(), scorer


def named() -> Batch:
    batch = batch_of_six()
    return replace(batch, samples=[replace(s, index=i % 2) for i, s in enumerate(batch.samples)])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_order_in_which_samples_finish_changes_no_number(thread, ranks):
    batch, rng = named(), np.random.default_rng(0)
    whole, at_once = column(batch, thread, ranks=ranks)
    for _ in range(5):
        early, scorer = column(batch, thread, rng.permutation(12).tolist(), ranks=ranks)
        assert early == whole
        assert scorer.calls == at_once.calls


def test_chunks_are_consecutive_groups_that_fill_a_pack(thread):
    _, scorer = column(named(), thread)
    assert scorer.calls == [[["6 of 20"]], [["4 of 22"]], [["2 of 8"]]]


def test_a_chunk_is_scored_as_soon_as_it_and_the_next_group_are_finished(thread):
    batch, scorer = named(), Scorer()
    scores = batch_scorer(scorer, thread)
    scores.add_samples(batch.prompts, batch.samples[2:8])
    assert not scores.scored, "the first group is missing"
    scores.add_samples(batch.prompts, batch.samples[:2])
    [chunk] = scores.scored
    chunk.result()
    assert scorer.calls == [[["6 of 20"]]]


def test_the_last_chunk_is_scored_as_soon_as_the_batch_is_finished(thread):
    batch, scorer = named(), Scorer()
    scores = batch_scorer(scorer, thread)
    scores.add_samples(batch.prompts, batch.samples)
    assert len(scores.scored) == 3
    scores.finish(batch)
    assert len(scores.scored) == 3


def test_samples_without_a_verdict_have_their_place_in_a_chunk_and_not_in_the_column(thread):
    batch = named()
    keep = [i for i in range(12) if i not in (1, 6, 7)]
    lost = replace(
        batch,
        samples=[batch.samples[i] for i in keep],
        groups=batch.groups[keep],
        failed=[(batch.samples[i], Verdict(None, failure="timeout")) for i in (1, 6, 7)],
    )
    whole, _ = column(batch, thread)
    parts = np.split(np.array(whole), np.cumsum(batch.lengths))[:-1]
    expected = np.concatenate([parts[i] for i in keep]).tolist()
    assert column(lost, thread)[0] == expected, "as it comes from a checkpoint"
    scores = batch_scorer(Scorer(), thread)
    scores.add_samples(batch.prompts, batch.samples)
    scores.finish(lost)
    assert scores.column(lost).tolist() == expected


def test_who_may_score_while_engines_sample(tmp_path):
    def early(*options: str) -> list[str]:
        return EarlyScoring(make_config(tmp_path, *options), Scorer(2), Scorer(), None, pack).early

    assert early() == ["old", "ref"]
    assert early("trainer.updates_per_step=1") == ["ref"], "the update has the old ones itself"
    assert early("pipeline.max_lag=1") == ["ref"], "the policy's weights will be others"
    assert early("dynamic_sampling.enabled=true") == [], "who is in the batch is not known before its end"
    assert early("rollout.oversample=0.5", "pipeline.max_lag=1") == []


def test_what_a_scorer_raises_ends_the_step(tmp_path):
    machines = Machines(tmp_path, reference=True)

    def score(packs):
        raise FloatingPointError("no")

    machines.reference.score = score
    with pytest.raises(FloatingPointError, match="no"):
        machines.run()
    assert machines.policy.updates == []


def test_a_batch_from_a_checkpoint_is_scored_as_it_would_have_been(tmp_path):
    runs = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        options = ["trainer.steps=4", "pipeline.max_lag=1", "reward.max_failure_share=1"]

        def machines(folder=tmp_path / name, options=options):
            made = Machines(folder, *options, reference=True, evals=0)
            made.reference.score = Scorer().score
            made.rewards.broken = {(p.uid, 1) for p in made.trainer.batches.take(0, 16)}
            return made

        if name == "killed":
            killed_while(machines(), "update", 6)
        runs.append(machines().run())
    assert learned(runs[0].lines) == learned(runs[1].lines)
