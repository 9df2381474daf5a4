"""Samples whole episodes: the engines write turns, the episode workers what stands between them.

requests ──▶ EpisodePool ──asks──▶ EpisodeRollout ──turns to sample──▶ Generation ──▶ engines
                         ◀─turns──                ◀─────────turns────
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from rlsys.config.schema import Config
from rlsys.episodes.asking import Turn
from rlsys.seeds import derive_seed
from rlsys.types import NO_TOKENS, Observation, Request, Sample, first_turns
from workers.episodes.messages import Answer, Asked, Ended, Event, Start
from workers.episodes.pool import EpisodePool
from workers.rollout.generation import Generation
from workers.rollout.rollout_group import RolloutGroup

Key = tuple[str, int]  # uid and index of a sample
NO_LOGPROBS = np.zeros(0, dtype=np.float32)


@dataclass(eq=False)
class OpenEpisode:
    """An episode that is being played."""

    number: int
    request: Request
    sample: Sample  # its turns so far
    turns: list[Turn] = field(default_factory=list)
    asked: Asked | None = None  # the turn that engines sample
    next_ask: Asked | None = None  # replaces `asked`, whose turn is void

    @property
    def key(self) -> Key:
        return self.request.uid, self.request.index


class EpisodeRollout:
    """Implements `rlsys.interfaces.Rollout` for requests with and without episodes."""

    def __init__(self, config: Config, engines: RolloutGroup, pool: EpisodePool):
        self.config, self.engines, self.pool = config, engines, pool
        self.by_number: dict[int, OpenEpisode] = {}
        self.by_key: dict[Key, OpenEpisode] = {}
        self.cut_turns: dict[Key, list[Turn]] = {}  # turns of episodes that were stopped early, for those that go on
        self.last_number = 0
        self.finished: list[Sample] = []
        self.stopping = False

    def wake(self) -> None:
        self.engines.wake()

    def sleep(self) -> None:
        self.engines.sleep()

    def stop_early(self) -> None:
        self.stopping = True
        self.engines.stop_early()

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        """Yields samples as they finish. An episode begins before a single answer would: its engine is not needed yet."""
        self.stopping, self.finished = False, []
        generation = self.engines.begin([r for r in requests if r.prompt is None], more=lambda: bool(self.by_number))
        self.pool.wake = generation.wake
        try:
            for r in requests:
                if r.prompt is not None:
                    self.begin(r)
            self.cut_turns.clear()
            self.pool.flush()
            for samples in generation.run():
                self.accept(samples, generation)
                for event in self.pool.poll():
                    self.on_event(event, generation)
                self.pool.flush()
                finished, self.finished = self.finished, []
                yield finished
                if self.stopping:
                    self.cut_idle(generation)
            yield self.finished
        finally:
            for episode in list(self.by_number.values()):
                self.drop(episode)
            self.pool.flush()

    def begin(self, request: Request) -> None:
        assert request.prompt is not None
        self.last_number += 1
        prompt, begun = request.prompt, request.partial
        turns = self.cut_turns.get((request.uid, request.index), []) if begun else []
        empty = Sample(request.uid, request.index, "", NO_TOKENS, NO_LOGPROBS, "stop", 0)
        episode = OpenEpisode(self.last_number, request, begun or empty, list(turns))
        self.by_number[episode.number] = self.by_key[episode.key] = episode
        row = prompt.row | ({"prompt": prompt.messages} if prompt.messages else {})
        self.pool.begin(Start(episode.number, prompt.play, row, request.max_new_tokens, list(turns)))

    def close(self, episode: OpenEpisode) -> None:
        del self.by_number[episode.number], self.by_key[episode.key]

    def drop(self, episode: OpenEpisode) -> None:
        self.close(episode)
        self.pool.drop(episode.number)

    def cut(self, episode: OpenEpisode, sample: Sample) -> None:
        """Stops an episode early. It goes on later: then it is played again with the turns it has had."""
        self.drop(episode)
        self.cut_turns[episode.key] = episode.turns
        if len(sample.tokens):
            self.finished.append(replace(sample, finish="cut"))

    def cut_idle(self, generation: Generation) -> None:
        """Cuts the episodes that no engine samples a turn for."""
        waiting = generation.cancel_waiting()
        for episode in list(self.by_number.values()):
            if not episode.asked or episode.key in waiting:
                self.cut(episode, first_turns(episode.sample, len(episode.turns)))

    # --- what episodes ask -------------------------------------------------------------------------------------------

    def on_event(self, event: Event, generation: Generation) -> None:
        episode = self.by_number[event.number]
        if isinstance(event, Ended):
            self.close(episode)
            turns = first_turns(episode.sample, len(episode.turns))
            self.finished.append(replace(turns, finish=event.finish, episode=event.episode))
        elif episode.asked:
            episode.next_ask = event
        else:
            self.ask(episode, event, generation)

    def ask(self, episode: OpenEpisode, asked: Asked, generation: Generation) -> None:
        """Has the engines sample a turn, or the rest of it, behind the turns before it."""
        del episode.turns[asked.turn :]
        before = first_turns(episode.sample, asked.turn)
        at, request = len(before.tokens), episode.request
        observation = Observation(at, np.array(asked.observation, dtype=np.int32))
        begun = replace(before, observations=(*before.observations, observation))
        if is_continued(episode.sample, observation, asked.turn):
            begun = episode.sample
        episode.asked, episode.sample = asked, begun
        generation.add(
            replace(
                request,
                prompt=None,
                seed=derive_seed(request.seed, asked.turn) if asked.turn else request.seed,
                max_new_tokens=at + asked.max_tokens,
                partial=begun,
            )
        )

    # --- what engines have sampled -----------------------------------------------------------------------------------

    def accept(self, samples: list[Sample], generation: Generation) -> None:
        for sample in samples:
            if not sample.observations:
                self.finished.append(sample)
            elif episode := self.by_key.get((sample.uid, sample.index)):
                self.accept_turn(episode, sample, generation)

    def accept_turn(self, episode: OpenEpisode, sample: Sample, generation: Generation) -> None:
        assert episode.asked is not None
        if sample.finish == "cut":
            return self.cut(episode, sample)
        asked, episode.asked = episode.asked, None
        if next_ask := episode.next_ask:
            episode.next_ask = None
            return self.ask(episode, next_ask, generation)
        at = sample.observations[-1].at
        tokens, logprobs = sample.tokens[at:].tolist(), sample.logprobs[at:].tolist()
        turn = Turn(asked.observation, tokens, logprobs, sample.finish)
        episode.sample = sample
        episode.turns.append(turn)
        self.pool.answer(Answer(episode.number, turn))


def is_continued(sample: Sample, observation: Observation, turn: int) -> bool:
    """True if the sample has begun to answer this observation."""
    if len(sample.observations) != turn + 1 or len(sample.tokens) <= observation.at:
        return False
    return sample.observations[turn].at == observation.at and np.array_equal(
        sample.observations[turn].tokens, observation.tokens
    )
