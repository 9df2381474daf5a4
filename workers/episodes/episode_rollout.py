"""Samples whole episodes: engines write the turns, episode workers write what stands between them.

    requests ──▶ EpisodePool ──asks──▶ EpisodeRollout ──turns to sample──▶ Generation ──▶ engines
                             ◀─turns──                ◀─────────turns────

For an engine, a turn is a completion, and all that precedes it is the prompt.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from rlsys.episodes.asking import Turn
from rlsys.errors import WorkerFailed
from rlsys.seeds import derive_seed
from rlsys.threads import REAL, Threads
from rlsys.types import NO_TOKENS, Episode, Request, Sample, Verdict, join_turns
from workers.episodes.messages import Answer, Asked, Ended, Event, Lost, Start, batching_s
from workers.episodes.pool import EpisodePool
from workers.processes.handle import KILLED
from workers.rollout.generation import Generation
from workers.rollout.rollout_group import RolloutGroup

Key = tuple[str, int]  # uid and index of a sample
NO_LOGPROBS = np.zeros(0, dtype=np.float32)
MAX_CRASHES = 2  # processes that end while an episode's code runs, and it gets no further; then the episode has failed
MAX_KILLED = 5  # of them, if all were killed: mostly by others than the episode


SampledTurn = tuple[list[int], Sample]  # observation, and what the engine wrote


@dataclass(frozen=True)
class StoppedEpisode(Sample):
    """An episode that was stopped early. It goes on if it is the `partial` of a later request."""

    played: tuple[SampledTurn, ...] = ()
    begun: SampledTurn | None = None  # a half-written turn


@dataclass(eq=False)
class OpenEpisode:
    """An episode that is being played. Its turns are kept here and nowhere else.

    A play that is lost is followed by another, which gets the same turns until it asks for something else, as with a
    random environment.
    """

    request: Request
    number: int = 0  # of the present play
    tokens: list[int] = field(default_factory=list)  # of its turns, and of the observations before them
    turns: list[SampledTurn] = field(default_factory=list)
    asked: Asked | None = None  # what the play waits for
    sampling: list[int] | None = (
        None  # the observation before the turn that engines sample, which is the one after `turns`
    )
    begun: SampledTurn | None = None  # a half-written turn
    crashes: int = 0  # of plays, since one got further than ever before
    killed: int = 0  # of these
    furthest: int = 0  # turns that a play had asked for at a crash

    @property
    def key(self) -> Key:
        return self.request.uid, self.request.index

    def has_turn(self, asked: Asked) -> bool:
        return asked.turn < len(self.turns) and self.turns[asked.turn][0] == asked.observation

    def rewind(self, turn: int) -> None:
        """Forgets the turns from this one on, and the half-written one behind them."""
        if turn < len(self.turns):
            del self.turns[turn:]
            self.begun = None
            self.tokens = tokens_of(self.turns)

    def is_cause(self, lost: Lost) -> bool:
        """Whether it is taken for the cause of the crash of its process: not at once, as the first may be a coincidence."""
        if not lost.suspect:
            return False
        if lost.turns > self.furthest:
            self.furthest, self.crashes, self.killed = lost.turns, 0, 0
        self.crashes += 1
        self.killed += lost.exit_status == KILLED
        return self.crashes >= (MAX_KILLED if self.killed == self.crashes else MAX_CRASHES)

    def sample(self, finish: str) -> Sample:
        return join_turns(self.turns, Sample(*self.key, "", NO_TOKENS, NO_LOGPROBS, finish, 0))

    def stopped(self) -> Sample:
        turns = [*self.turns, self.begun] if self.begun else self.turns
        empty = StoppedEpisode(
            *self.key, "", NO_TOKENS, NO_LOGPROBS, "cut", 0, played=tuple(self.turns), begun=self.begun
        )
        return join_turns(turns, empty)


class EpisodeRollout:
    """Implements `rlsys.interfaces.Rollout` for requests with and without episodes."""

    def __init__(self, engines: RolloutGroup, pool: EpisodePool, threads: Threads = REAL):
        self.engines, self.pool, self.now = engines, pool, threads.now
        self.by_number: dict[int, OpenEpisode] = {}
        self.by_key: dict[Key, OpenEpisode] = {}
        self.sampled: set[Key] = set()  # turns that engines sample; those of a closed episode may still come
        self.last_number = 0
        self.finished: list[Sample] = []
        self.stopping = False
        self.next_exchange = 0.0  # of messages with the pool, by `now`

    def wake(self) -> None:
        self.engines.wake()

    def sleep(self) -> None:
        self.engines.sleep()

    def stop_early(self) -> None:
        self.stopping = True
        self.engines.stop_early()

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        """Yields samples as they finish. All episodes begin at once; engines take their turns as they have room."""
        self.stopping, self.finished, self.sampled = False, [], set()
        generation = self.engines.begin([r for r in requests if r.prompt is None], self.wait_s)
        self.pool.on_arrival(generation.wake)
        self.next_exchange = 0.0
        try:
            for r in requests:
                if r.prompt is not None:
                    self.begin(r)
            self.pool.flush()
            for samples in generation.run():
                self.accept(samples, generation)
                if self.now() < self.next_exchange and not self.finished:
                    continue
                events = self.pool.poll()
                for event in events:
                    self.on_event(event, generation)
                if events or self.next_exchange:  # the first asks do not wait: no engine has work yet
                    self.next_exchange = self.now() + batching_s(len(self.by_number))
                self.pool.flush()
                if self.finished:
                    finished, self.finished = self.finished, []
                    yield finished
                if self.stopping:
                    self.stop_idle(generation)
                self.require_debtor(generation)
            if self.finished:
                yield self.finished
        finally:
            for episode in list(self.by_number.values()):
                self.drop(episode)
            self.pool.flush()

    def wait_s(self) -> float:
        """Seconds to the next exchange of messages. 0: no episode is open, so engines get no further requests."""
        return max(self.next_exchange - self.now(), 1e-3) if self.by_number else 0.0

    def begin(self, request: Request) -> None:
        episode = OpenEpisode(request)
        if isinstance(request.partial, StoppedEpisode):
            episode.turns, episode.begun = list(request.partial.played), request.partial.begun
            episode.tokens = tokens_of(episode.turns)
        self.by_key[episode.key] = episode
        self.play(episode)

    def play(self, episode: OpenEpisode) -> None:
        """Starts a play, the first or one in place of a lost one."""
        self.by_number.pop(episode.number, None)
        self.last_number += 1
        episode.number, episode.asked = self.last_number, None
        self.by_number[episode.number] = episode
        request, prompt = episode.request, episode.request.prompt
        assert prompt is not None
        row = prompt.row | ({"prompt": prompt.messages} if prompt.messages else {})
        self.pool.begin(Start(episode.number, prompt.play, row, request.max_new_tokens))

    def close(self, episode: OpenEpisode) -> None:
        del self.by_number[episode.number], self.by_key[episode.key]

    def drop(self, episode: OpenEpisode) -> None:
        self.close(episode)
        self.pool.drop(episode.number)

    def stop(self, episode: OpenEpisode) -> None:
        """Stops an episode early. Later it is played again, with the turns sampled so far."""
        self.drop(episode)
        sample = episode.stopped()
        if len(sample.tokens):
            self.finished.append(sample)

    def stop_idle(self, generation: Generation) -> None:
        """Stops the episodes for which no engine is sampling a turn, such as those whose engine was lost meanwhile."""
        generation.cancel_waiting()
        pending = generation.pending_samples()
        self.sampled &= pending
        for episode in list(self.by_number.values()):
            if episode.sampling is None or episode.key not in pending:
                self.stop(episode)

    def require_debtor(self, generation: Generation) -> None:
        """Raises an error where this would wait for ever: every episode waits for a turn that nobody samples."""
        waits = self.by_number and not generation.waiting_count and not generation.pending_samples()
        if waits and all(episode.sampling is not None for episode in self.by_number.values()):
            uids = ", ".join(list(dict.fromkeys(episode.request.uid for episode in self.by_number.values()))[:3])
            raise WorkerFailed(
                f"generating: {len(self.by_number)} episodes ({uids}, …) wait for turns that no engine samples and no "
                "request asks for. This is a defect of rlsys, please report it; the same command resumes the run."
            )

    # --- what episodes ask -------------------------------------------------------------------------------------------

    def on_event(self, event: Event, generation: Generation) -> None:
        episode = self.by_number[event.number]
        if isinstance(event, Ended):
            assert event.turns <= len(episode.turns), "the play got them from here"
            self.finish(episode, event)
        elif isinstance(event, Lost):
            if episode.is_cause(event):
                self.finish(episode, crashed(event))
            else:
                self.play(episode)
        elif episode.has_turn(event):
            self.answer(episode, event)
        else:
            episode.asked = event
            if episode.sampling is None:
                self.ask(episode, event, generation)

    def finish(self, episode: OpenEpisode, ended: Ended) -> None:
        self.close(episode)
        episode.rewind(ended.turns)  # this play may have ended earlier than the one before
        self.finished.append(replace(episode.sample(ended.finish), episode=ended.episode))

    def answer(self, episode: OpenEpisode, asked: Asked) -> None:
        episode.asked = None
        self.pool.answer(Answer(episode.number, asked.turn, make_turn(*episode.turns[asked.turn])))

    def ask(self, episode: OpenEpisode, asked: Asked, generation: Generation) -> None:
        """Requests the turn from the engines, after all earlier turns. A half-written turn is continued."""
        assert asked.turn <= len(episode.turns), "the turns before were answered"
        episode.rewind(asked.turn)
        if episode.begun and episode.begun[0] != asked.observation:
            episode.begun = None
        episode.sampling = asked.observation
        self.sampled.add(episode.key)
        request = episode.request
        generation.add(
            Request(
                request.uid,
                request.index,
                [*request.tokens, *episode.tokens, *asked.observation],
                derive_seed(request.seed, asked.turn) if asked.turn else request.seed,
                request.temperature,
                asked.max_tokens,
                request.top_p,
                request.top_k,
                episode.begun[1] if episode.begun else None,
                request.ignore_end,
            )
        )

    # --- what engines have sampled -----------------------------------------------------------------------------------

    def accept(self, samples: list[Sample], generation: Generation) -> None:
        for sample in samples:
            key = sample.uid, sample.index
            if key not in self.sampled:
                self.finished.append(sample)
                continue
            self.sampled.discard(key)
            if episode := self.by_key.get(key):
                self.accept_turn(episode, sample, generation)

    def accept_turn(self, episode: OpenEpisode, sample: Sample, generation: Generation) -> None:
        assert episode.sampling is not None
        observation, asked = episode.sampling, episode.asked
        episode.sampling, episode.begun = None, None
        if asked and (asked.turn, asked.observation) != (len(episode.turns), observation):
            self.ask(episode, asked, generation)  # another play, which asks for something else
        elif sample.finish == "cut":
            episode.begun = (observation, sample) if len(sample.tokens) else None
            self.stop(episode)
        else:
            episode.turns.append((observation, sample))
            episode.tokens += [*observation, *sample.tokens.tolist()]
            if asked:
                self.answer(episode, asked)


def crashed(lost: Lost) -> Ended:
    after = f", after turn {lost.turns}" if lost.turns else ""
    verdict = Verdict(None, failure="crash", detail=f"the episode process ended: {lost.exit_status}{after}")
    return Ended(lost.number, "stop", Episode(verdict, [], []), lost.turns)


def tokens_of(turns: list[SampledTurn]) -> list[int]:
    return [token for observation, sample in turns for token in (*observation, *sample.tokens.tolist())]


def make_turn(observation: list[int], sample: Sample) -> Turn:
    return Turn(observation, sample.tokens.tolist(), sample.logprobs.tolist(), sample.finish)
