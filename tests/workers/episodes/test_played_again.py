"""An episode that is played again, in a real process, and goes another way: only what its last play has seen is trained."""

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loop_rollout import LoopRollout
from simulated_episodes import quiet_watchdog
from test_runner import runner, settings

from rlsys.algorithms.turns import turn_rows
from rlsys.episodes.settings import EpisodeSettings
from rlsys.types import Prompt, Request, Sample, join_partial
from workers.episodes.runner import EpisodeRunner
from workers.turns.pool import EpisodePool, Life

GAMES = """
import asyncio, os, random, time
luck = random.SystemRandom()

async def changes(row, ask):
    again = os.path.exists(row["mark"])
    open(row["mark"], "w").close()
    for turn in range(row["turns"] if again else 4):
        number = 9 if again and turn == row["differs"] else turn
        reply = await ask(f"{number}>")
        reply.score(len(reply.tokens) + turn / 4)
    if not again:
        os._exit(1)
    if row["raises"]:
        raise ValueError("bad luck")
    return 1.0

async def gambles(row, ask):
    reply = await ask("1>")
    reply.score(0.5)
    if row["blocks"]:
        await asyncio.sleep(0.5)
        time.sleep(1000)
    while luck.random() < 0.7:
        reply = await ask(f"{luck.randrange(3)}>")
        reply.score(luck.random())
        await asyncio.sleep(0.2)
    return 1.0
"""


class RunnerPool(EpisodePool):
    """The pool's own book-keeping, around a runner in this process."""

    def __init__(self, episodes: EpisodeRunner):
        self.episodes = episodes
        episodes.begin_line("rollout-0", 0)
        super().__init__("rollout-0", 0, {"episode-0": Life(0, SimpleNamespace(inbox=[]))}, quiet_watchdog())

    def flush(self) -> None:
        self.episodes.send(pickle.loads(pickle.dumps(self.outbox["episode-0"])))
        self.outbox["episode-0"] = []

    def poll(self) -> list[Any]:
        events: list[Any] = []
        while not self.episodes.events_of[0].empty():
            events.append(self.episodes.events_of[0].get())
        return [event for event in events if self.note_event("episode-0", event)]


class Engines:
    """Write `5 6 1` as each turn, and take their time for turn `held`: with it `stop_early` finds half-written turns.

    Single answers are finished when all episodes have asked for that turn.
    """

    def __init__(self, held: int = -1, episodes: int = 0):
        self.held, self.episodes = held, episodes

    def begin(self, requests: list[Request], more: Callable[[], float]) -> "Engines":
        self.answers, self.more, self.stopping = requests, more, False
        self.running: list[Request] = []
        self.asked: Counter[tuple[str, int]] = Counter()
        return self

    def run(self) -> Iterator[list[Sample]]:
        while self.running or self.answers or self.more():
            time.sleep(0.005)
            ready = [r for r in self.running if self.stopping or self.asked[r.uid, r.index] != self.held + 1]
            held = len(self.running) - len(ready) == self.episodes > 0
            done = {r.key for r in ready}
            self.running = [r for r in self.running if r.key not in done]
            answers = self.answers if held or not self.more() else []
            self.answers = [] if answers else self.answers
            yield [self.write(r) for r in (*ready, *answers)]

    def write(self, request: Request) -> Sample:
        cut = self.stopping and self.asked[request.uid, request.index] == self.held + 1
        begun = request.partial
        new = [5, 6, 1][len(begun.tokens) if begun else 0 : 2 if cut else 3]
        tokens, logprobs = np.array(new, dtype=np.int32), np.zeros(len(new), dtype=np.float32)
        rest = Sample(request.uid, request.index, "", tokens, logprobs, "cut" if cut else "stop", 0, turn=request.turn)
        return join_partial(begun, rest) if begun else rest

    def add(self, request: Request) -> None:
        self.asked[request.uid, request.index] += 1
        self.running.append(request)

    def stop_early(self) -> None:
        self.stopping = True


def game(folder: Path, model: str, name: str, **changes: Any) -> EpisodeSettings:
    file = folder / "played_again.py"
    file.write_text(GAMES)
    return replace(settings(folder, model, **changes), plays=(f"{file}:{name}",))


def require_one_play(sample: Sample) -> None:
    """The tokens, the transcript and the scores of turns are those of one play."""
    episode = sample.episode
    assert episode
    turns = [(observation.tolist(), own.tolist()) for observation, own in sample.turns] if len(sample.tokens) else []
    words = [message["content"] for message in episode.messages if message["role"] == "user"]
    assert [len(observation) for observation, _ in turns] == list(map(len, words))
    assert len(episode.turn_scores) == len(turns)
    if episode.verdict and episode.verdict.score is not None:
        rows = turn_rows(torch.tensor([episode.verdict.score]), torch.tensor([0]), [sample])
        assert rows.lengths.tolist() == [len(own) for _, own in turns]


PLAYED_AGAIN = {  # what the second play does: its turns, and the turns of which it asks for something else
    "ends before its first ask": {"turns": 0},
    "ends earlier": {"turns": 1},
    "ends where the first had come": {"turns": 3},
    "ends later": {"turns": 6},
    "asks for something else": {"turns": 4, "differs": 1},
    "asks for something else, and ends": {"turns": 2, "differs": 1},
    "asks for something else where a turn is half-written": {"turns": 5, "differs": 3},
    "fails before its first ask": {"turns": 0, "raises": True},
    "fails after a turn": {"turns": 1, "raises": True},
    "fails later": {"turns": 5, "raises": True},
}


def row_of(second: dict[str, Any], mark: Path) -> dict[str, Any]:
    return {"mark": str(mark), "turns": 0, "differs": -1, "raises": False} | second


def require_second_play(sample: Sample) -> None:
    require_one_play(sample)
    row = row_of(PLAYED_AGAIN[sample.uid], Path())
    assert sample.tokens.tolist() == [5, 6, 1] * row["turns"]
    assert sample.episode
    assert sample.episode.verdict
    assert sample.episode.verdict.failure == ("exception" if row["raises"] else "" if row["turns"] else "invalid")


@pytest.mark.parametrize(
    "kind", ["ends before its first ask", "asks for something else, and ends", "fails after a turn"]
)
def test_an_episode_whose_process_died_has_the_turns_of_its_second_play(
    tmp_path: Path, tiny_model: str, kind: str
) -> None:
    """The first play had four."""
    s = game(tmp_path, tiny_model, "changes", max_turns=8)
    row = row_of(PLAYED_AGAIN[kind], tmp_path / "mark")
    with runner(s) as episodes:
        rollout = LoopRollout(Engines(), RunnerPool(episodes))
        request = Request(kind, 0, [], 1, 1.0, 8, prompt=Prompt(kind, "x", "", [], row, play=s.plays[0]))
        [sample] = [sample for some in rollout.generate([request]) for sample in some]
    require_second_play(sample)


def test_episodes_that_were_stopped_early_have_the_turns_of_their_second_play(tmp_path: Path, tiny_model: str) -> None:
    """The first plays had three, and a half-written fourth. An evaluation in between loses none of them."""
    s = game(tmp_path, tiny_model, "changes", max_turns=8)
    answer = Request("answer", 0, [3], 1, 1.0, 8)
    requests = []
    for i, (kind, second) in enumerate(PLAYED_AGAIN.items()):
        prompt = Prompt(kind, "x", "", [], row_of(second, tmp_path / f"mark{i}"), play=s.plays[0])
        requests.append(Request(kind, 0, [], 1, 1.0, 8, prompt=prompt))
    with runner(s) as episodes:
        rollout = LoopRollout(Engines(3, len(requests)), RunnerPool(episodes))
        stopped: dict[str, Sample] = {}
        for some in rollout.generate([answer, *requests]):
            stopped |= {sample.uid: sample for sample in some}
            rollout.stop_early()
        rollout.writer = engines = Engines()
        assert len(list(rollout.generate([answer]))) == 1
        for request in requests:
            assert stopped[request.uid].finish == "cut"
            assert stopped[request.uid].tokens.tolist() == [5, 6, 1] * 3 + [5, 6]
        again = [replace(request, partial=stopped[request.uid]) for request in requests]
        for sample in [sample for some in rollout.generate(again) for sample in some]:
            require_second_play(sample)
            row = row_of(PLAYED_AGAIN[sample.uid], tmp_path)
            kept = row["differs"] if row["differs"] >= 0 else 3
            assert engines.asked[sample.uid, 0] == max(0, row["turns"] - kept)


def test_one_that_blocks_its_process_mixes_no_plays_of_the_others(tmp_path: Path, tiny_model: str) -> None:
    s = game(tmp_path, tiny_model, "gambles", step_timeout_s=1.0, concurrency=64, max_turns=8)
    prompts = [Prompt(f"p{i}", "x", "", [], {"blocks": i == 0}, play=s.plays[0]) for i in range(40)]
    requests = [Request(p.uid, 0, [], 1, 1.0, 8, prompt=p) for p in prompts]
    with runner(s) as episodes:
        rollout = LoopRollout(Engines(), RunnerPool(episodes))
        samples = {sample.uid: sample for some in rollout.generate(requests) for sample in some}
    blocked = samples.pop("p0")
    assert blocked.episode
    assert blocked.episode.verdict
    assert (blocked.episode.verdict.failure, blocked.finish, blocked.turn_count) == ("timeout", "time", 1)
    assert len(samples) == 39
    for sample in samples.values():
        require_one_play(sample)
