"""What is trained is what the play has seen, in any order of messages, kills, losses and stops."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from loop_rollout import LoopRollout
from simulated_episodes import World, seen_of, seen_turns

from rlsys.algorithms.turns import turn_rows
from rlsys.types import Prompt, Request, Sample
from workers.episodes import runner

LATE_ANSWERS = (1341, 2289)  # to what an episode had asked, and asks again after it had asked for something else


@pytest.mark.parametrize("seeds", [range(100), range(100, 200), range(200, 300), LATE_ANSWERS], ids="abcd")
def test_a_sample_has_the_turns_that_its_last_play_got_and_no_others(
    seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_WORKING", 2, raising=False)
    for seed in seeds:
        try:
            simulate(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def simulate(seed: int) -> None:
    """Four steps, of which some stop early and leave episodes to the next, with an evaluation between them."""
    world = World(seed)
    rng = world.rng
    rollout = LoopRollout(world.engines, world.pool)
    deferred: list[Request] = []
    for step in range(4):
        plays = [rng.choice(["same", "moody", "moody", "program"]) for _ in range(rng.randint(1, 6))]
        requests = deferred + [request(f"p{step}.{i}", play) for i, play in enumerate(plays)]
        stop_after = rng.randrange(len(requests)) if step < 3 and rng.random() < 0.7 else len(requests)
        final, cut = play(world, rollout, requests, stop_after)
        by_key = {(r.uid, r.index): r for r in requests}
        assert final.keys() | cut.keys() <= by_key.keys()
        assert stop_after < len(requests) or final.keys() == by_key.keys()
        # A run that goes on from a checkpoint has no half-played episodes.
        forgets = rng.random() < 0.2
        deferred = [
            replace(r, partial=None if forgets else cut.get(key, r.partial))
            for key, r in by_key.items()
            if key not in final
        ]
        evaluation = [request(f"e{i}", "moody") for i in range(2)] + [Request("p", 0, [1], 0, 0.0, 8)]
        evaluated, _ = play(world, rollout, evaluation, len(evaluation))
        assert len(evaluated) == len(evaluation)
        world.settle()
        for worker in world.workers.values():
            assert not worker.runner.playing
            assert not worker.runner.waiting


def request(uid: str, play: str) -> Request:
    row = {"play": play, "seed": uid}
    return Request(uid, 0, [], 0, 1.0, 8, prompt=Prompt(uid, "s", "", [], row, play="f"))


def play(
    world: World, rollout: LoopRollout, requests: list[Request], stop_after: int
) -> tuple[dict[tuple[str, int], Sample], dict[tuple[str, int], Sample]]:
    """Returns the finished and the stopped samples."""
    final: dict[tuple[str, int], Sample] = {}
    cut: dict[tuple[str, int], Sample] = {}
    number_of = {}
    stopped = False
    for samples in rollout.generate(requests):
        number_of |= {key: episode.number for key, episode in rollout.loop.by_key.items()}
        for sample in samples:
            key = sample.uid, sample.index
            assert key not in final
            assert key not in cut
            require_sampled(world, sample)
            (cut if sample.finish == "cut" else final)[key] = sample
        if len(final) > stop_after and not stopped:
            stopped = True
            rollout.stop_early()
    for sample in final.values():
        if sample.episode:
            require_seen(sample, world)
    return final, cut


def require_sampled(world: World, sample: Sample) -> None:
    """An engine wrote each turn, behind all that is before it."""
    ends: list[list[int]] = [[] if sample.episode or sample.observations else [1]]
    for observation, after, own in seen_turns(sample):
        before = ends[after + 1] + observation
        assert (tuple(before), tuple(own)) in world.sampled
        ends.append(before + own)


def require_seen(sample: Sample, world: World) -> None:
    """The turns are those of the transcript, which has a score for each."""
    assert sample.episode
    assert sample.episode.verdict
    turns = seen_turns(sample)
    if sample.episode.verdict.failure in ("timeout", "crash"):  # there is no transcript
        assert not sample.episode.messages
        assert not turns or turns in map(seen_of, world.last_turns.values())
        return
    assert turns == [tuple(turn) for turn in sample.episode.messages]
    assert sample.episode.turn_scores == [float(sum(own)) for *_, own in turns]
    if turns:
        rows = turn_rows(torch.tensor([1.0]), torch.tensor([0]), [sample])
        assert len(rows.returns) == len(rows.lengths) == len(turns)
