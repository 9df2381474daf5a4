"""The turn loop of an engine: the engine writes the turns, episode workers write what stands between them.

    begin(requests) ──▶ TurnLoop ──▶ take_turns()    for the engine, with all that precedes each
    accept(turns)   ──▶          ──▶ take_finished() whole episodes
                         ▲  │
               asks, ends│  │starts, turns
                        EpisodePool ◀──▶ episode workers

It waits for nothing and has no clock: `exchange` is called when there may be news.
"""

from collections.abc import Iterable
from dataclasses import replace

from rlsys.errors import WorkerFailed
from rlsys.seeds import derive_seed
from rlsys.types import Request, Sample
from workers.turns.messages import Answer, Asked, Ended, Event, Lost, Start
from workers.turns.open_episode import OpenEpisode, StoppedEpisode, crashed
from workers.turns.pool import EpisodePool

Key = tuple[str, int, int]  # of a request for a turn


class TurnLoop:
    """`first_number` is that of the first play; no other turn loop may use it or those that follow."""

    def __init__(self, pool: EpisodePool, first_number: int = 0):
        self.pool, self.last_number = pool, first_number
        self.by_number: dict[int, OpenEpisode] = {}
        self.by_key: dict[tuple[str, int], OpenEpisode] = {}
        self.sampled: set[Key] = set()  # turns that the engine samples
        self.stale: set[Key] = set()  # of these, those of episodes that are closed
        self.to_sample: list[Request] = []  # turns that it does not sample yet
        self.stopping: set[tuple[str, int]] = set()  # episodes that end as soon as none of their turns is sampled
        self.finished: list[Sample] = []

    @property
    def between_turns(self) -> int:
        """The number of episodes for which the engine has nothing to do."""
        return len(self.by_key) - len({key[:2] for key in self.sampled} & self.by_key.keys())

    def begin(self, requests: list[Request]) -> None:
        self.drop((r.uid, r.index) for r in requests)  # of a caller that has gone
        for request in requests:
            episode = OpenEpisode(request)
            if isinstance(request.partial, StoppedEpisode):
                episode.sampled = list(request.partial.turns_so_far)
                episode.turn_of = dict(request.partial.turn_of)
            self.by_key[episode.key] = episode
            self.play(episode)
        self.pool.flush()

    def stop_early(self) -> None:
        """Stops all episodes: each comes with the turns that it has when no turn of it is sampled any more."""
        self.stopping |= self.by_key.keys()
        self.stop_idle()

    def drop(self, keys: Iterable[tuple[str, int]]) -> None:
        """Ends episodes for which nobody waits any more."""
        for key in keys:
            if episode := self.by_key.get(key):
                self.close(episode)
                self.pool.drop(episode.number)
        self.pool.flush()

    def exchange(self) -> None:
        """Handles what episode workers have sent, and sends them what they get."""
        for event in self.pool.poll():
            if event.number in self.by_number:  # else it was dropped before its loss was noticed
                self.on_event(event)
        self.stop_idle()
        self.pool.flush()
        self.require_debtor()

    def take_turns(self) -> list[Request]:
        """Returns the turns that the engine samples from now on."""
        ready = [r for r in self.to_sample if r.key not in self.sampled]  # else a dropped episode had the same
        self.to_sample = [r for r in self.to_sample if r.key in self.sampled]
        self.sampled |= {r.key for r in ready}
        return ready

    def take_finished(self) -> list[Sample]:
        finished, self.finished = self.finished, []
        return finished

    def require_debtor(self) -> None:
        """Raises an error where this would never end: every episode waits for a turn that nobody samples."""
        idle = self.by_number and not self.sampled and not self.to_sample
        if idle and all(episode.waits for episode in self.by_number.values()):
            uids = ", ".join(list(dict.fromkeys(episode.request.uid for episode in self.by_number.values()))[:3])
            raise WorkerFailed(
                f"generating: {len(self.by_number)} episodes ({uids}, …) wait for turns that the engine does not sample. "
                "This is a defect of rlsys, please report it; the same command resumes the run."
            )

    # --- plays -------------------------------------------------------------------------------------------------------

    def play(self, episode: OpenEpisode) -> None:
        """Starts a play, the first or one in place of a lost one."""
        self.by_number.pop(episode.number, None)
        self.last_number += 1
        episode.number, episode.asked, episode.waits = self.last_number, [], {}
        self.by_number[episode.number] = episode
        request, prompt = episode.request, episode.request.prompt
        assert prompt is not None
        row = prompt.row | ({"prompt": prompt.messages} if prompt.messages else {})
        sampling = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        self.pool.begin(Start(episode.number, prompt.play, row, request.max_new_tokens, sampling))

    def close(self, episode: OpenEpisode) -> None:
        del self.by_number[episode.number], self.by_key[episode.key]
        self.stopping.discard(episode.key)
        self.stale |= {key for turn in range(len(episode.sampled)) if (key := (*episode.key, turn)) in self.sampled}
        self.to_sample = [r for r in self.to_sample if r.key[:2] != episode.key]

    def stop_idle(self) -> None:
        """Stops the episodes that are to stop, and of which no turn is sampled. Later they go on with their turns."""
        if not self.stopping:
            return
        for key in sorted(self.stopping - {key[:2] for key in self.sampled}):
            episode = self.by_key[key]
            self.close(episode)
            self.pool.drop(episode.number)
            self.finished.append(episode.stopped())

    # --- what episodes ask -------------------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        episode = self.by_number[event.number]
        if isinstance(event, Ended):
            self.finish(episode, event)
        elif isinstance(event, Lost):
            if episode.is_cause(event):
                self.finish(episode, crashed(event))
            else:
                self.play(episode)
        else:
            assert event.turn == len(episode.asked), "asks come in order"
            turn = episode.add(event)
            if episode.sampled[turn].is_whole:
                self.answer(episode, event.turn)
            elif not episode.sampled[turn].runs:
                self.ask(episode, event, turn)

    def finish(self, episode: OpenEpisode, ended: Ended) -> None:
        self.close(episode)
        asks = episode.answered() if ended.turns is None else ended.turns
        assert episode.waits.keys().isdisjoint(asks), "the play got them from here"
        self.finished.append(replace(episode.sample(ended.finish, asks), episode=ended.episode))

    def answer(self, episode: OpenEpisode, ask: int) -> None:
        asked, sample = episode.waits.pop(ask), episode.sampled[episode.asked[ask]].sample
        assert sample
        logprobs = sample.logprobs if asked.logprobs else None
        self.pool.answer(Answer(episode.number, ask, sample.tokens, logprobs, sample.finish))

    def ask(self, episode: OpenEpisode, asked: Asked, turn: int) -> None:
        """Has the turn sampled, after all that it continues. A half-written turn is continued."""
        if episode.key in self.stopping:
            return
        sampled, request, salt = episode.sampled[turn], episode.request, asked.prefix or asked.turn
        sampled.runs = True
        self.to_sample.append(
            Request(
                request.uid,
                request.index,
                episode.tokens_before(sampled),
                derive_seed(request.seed, salt) if salt else request.seed,
                request.temperature,
                asked.max_tokens,
                request.top_p,
                request.top_k,
                sampled.sample,
                request.ignore_end,
                turn=turn,
                stop=asked.stop,
            )
        )

    # --- what the engine has sampled ---------------------------------------------------------------------------------

    def accept(self, turns: Iterable[Sample]) -> None:
        for sample in turns:
            self.sampled.discard(sample.key)
            if sample.key in self.stale:
                self.stale.discard(sample.key)
            else:
                self.accept_turn(self.by_key[sample.key[:2]], sample)

    def accept_turn(self, episode: OpenEpisode, sample: Sample) -> None:
        turn = episode.sampled[sample.turn]
        turn.runs, turn.sample = False, sample if sample.finish != "cut" or len(sample.tokens) else None
        if not turn.is_whole:
            self.stopping.add(episode.key)
        for ask in [ask for ask in episode.waits if turn.is_whole and episode.asked[ask] == sample.turn]:
            self.answer(episode, ask)
