"""What flows between the stages.

Log-probs belong to the sampled token, are natural logarithms, and include the temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Metrics = dict[str, float]  # by name
NO_TOKENS: Ints = np.zeros(0, dtype=np.int32)
TRUNCATIONS = (
    "length",
    "turns",
    "tokens",
    "window",
    "time",
)  # a `finish` at a limit: of the last turn, or of an episode


@dataclass(frozen=True)
class Observation:
    """What an environment answered: tokens that stand in a sample before the model's own token `at`.

    The turn that follows continues the turn before it, or with `after` that turn of the sample: what came between is not
    seen from there. -1: the prompt.
    """

    at: int
    tokens: Ints
    after: int | None = None


@dataclass(frozen=True)
class Demonstration:
    """What a row shows the model to write, in supervised training. `Demonstration("481625", tokens=[6, 10, 3, 8, 4, 7, 1])`

    In a conversation, `observations` are what the others say between the assistant's turns.
    """

    text: str
    tokens: Ints  # [C] those that are learned, with the end of each turn
    observations: tuple[Observation, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One row of data, ready to be sent to an engine.

    Prompt(uid="zigzag:17#0", source="zigzag", text="864152>", tokens=[10, 8, 6, 3, 7, 4, 12], row={"answer": ...})
    """

    uid: str  # unique for every use of a row: the row and the epoch
    source: str  # the data set, for metrics per source
    text: str
    tokens: list[int]  # [P]
    row: dict[str, Any]  # all other fields of the row, for reward functions
    messages: list[dict[str, Any]] | None = None  # the chat from which `text` was rendered
    rewards: str = ""  # the data set whose reward functions judge it; "": reward.functions
    max_new_tokens: int = 0  # the longest completion in training; 0: rollout.max_new_tokens
    play: str = ""  # the function that plays an episode on this row; then `tokens` is empty. "": a single answer
    demonstration: Demonstration | None = None  # what it shows the model to write; None: nothing, the model samples


@dataclass(frozen=True)
class Request:
    """One completion to sample. `Request("zigzag:17#0", 3, [10, 8, …], seed=…, temperature=1.0, max_new_tokens=10)`"""

    uid: str
    index: int  # which sample of its group
    tokens: Sequence[int] | Ints  # [P]; of a turn of an episode, all that is before it
    seed: int
    temperature: float  # 0: greedy
    max_new_tokens: int  # of the whole completion, `partial` included; of a turn, in an episode
    top_p: float = 1.0  # sampled from the likeliest tokens of this probability
    top_k: int = -1  # sampled from this many of the likeliest tokens; -1: from all
    partial: "Sample | None" = None  # its tokens so far, to be continued
    ignore_end: bool = False  # for benchmarks: always sample max_new_tokens
    prompt: Prompt | None = None  # the row that an episode is played on; None: a single answer
    turn: int = 0  # of an episode, whose turns may be sampled side by side
    stop: tuple[str, ...] = ()  # strings that end it, besides rollout.stop

    @property
    def key(self) -> tuple[str, int, int]:
        """Names it among all that are sampled at a time."""
        return self.uid, self.index, self.turn


@dataclass(frozen=True)
class Verdict:
    """A reward function's answer: a finite score, or a failure with its reason.

    Verdict(0.75, components={"exact": 0.5, "length": 0.25})
    Verdict(None, failure="timeout", detail="no answer after 10 s")
    """

    score: float | None
    components: dict[str, float] = field(default_factory=dict)
    failure: str = ""  # timeout | crash | memory | exception | invalid
    detail: str = ""  # traceback or sentence
    answer: str | None = None  # the final answer that the function read in the completion, if it says so


@dataclass(frozen=True)
class Episode:
    """The result of an episode besides its tokens."""

    verdict: Verdict | None  # of the function that played it; None: it leaves the score to the reward functions
    messages: list[dict[str, Any]]  # the transcript
    turn_scores: list[float]  # of the model's turns


@dataclass(frozen=True)
class Sample:
    """A completion: the tokens that the model sampled. `observations` holds what an environment answered in between.

    Sample("zigzag:17#0", 3, "481625", tokens=[6, 10, 3, 8, 4, 7, 1], logprobs=[…], "stop", version=4)

    With `changes=((5, 6), (6, 7))` version 4 sampled the first five tokens, version 6 the sixth, version 7 the last.
    With `observations=(Observation(5, [12, 3]),)` the sequence is five tokens, 12 3, and the other two.
    """

    uid: str
    index: int
    text: str  # without special tokens
    tokens: Ints  # [C], with the end-of-sequence token, or those of the stop string
    logprobs: Floats  # [C] rollout log-probs: the engine's
    finish: str  # stop | length | cut: unfinished, see `Rollout.stop_early` | in episodes also turns | tokens | window | time
    version: int  # of the weights that sampled it; the oldest if they changed meanwhile
    changes: tuple[tuple[int, int], ...] = ()  # (token, version): from that token on, newer weights sampled it
    observations: tuple[Observation, ...] = ()  # by `at`; equal ones have an empty turn between them
    episode: Episode | None = None
    turn: int = 0  # the request's; in a whole episode 0

    @property
    def key(self) -> tuple[str, int, int]:
        """Names the request that it answers."""
        return self.uid, self.index, self.turn

    @property
    def versions(self) -> NDArray[np.int64]:
        """The weight version of each token.  [C]"""
        starts, versions = zip((0, self.version), *self.changes, strict=True)
        return np.repeat(versions, np.diff([*starts, len(self.tokens)]))

    @property
    def truncated(self) -> bool:
        """True if a limit ended it, and not the model or what it played with."""
        return self.finish in TRUNCATIONS

    @property
    def observed_tokens(self) -> int:
        return sum(len(o.tokens) for o in self.observations)

    @property
    def turns(self) -> list[tuple[Ints, Ints]]:
        """What the environment said before each turn of the model, and the turn. What it said last has no turn."""
        if not self.observations:
            return [(NO_TOKENS, self.tokens)]
        answers = [NO_TOKENS, *(o.tokens for o in self.observations)]
        turns = list(zip(answers, self._split_at_observations(), strict=True))
        first = int(self.observations[0].at == 0)
        return turns[first : first + self.turn_count]

    @property
    def continued_turns(self) -> list[int]:
        """The turn that each of `turns` continues; -1: the prompt."""
        continued = list(range(-1, self.turn_count - 1))
        first = not self.observations or self.observations[0].at > 0  # turns without an observation
        for turn, observation in zip(range(first, len(continued)), self.observations, strict=False):
            if observation.after is not None:
                continued[turn] = observation.after
        return continued

    @property
    def turn_count(self) -> int:
        """The number of `turns`."""
        if not self.observations:
            return 1
        return int(self.observations[0].at > 0) + sum(o.at < len(self.tokens) for o in self.observations)

    def _split_at_observations(self) -> list[Ints]:
        places = [0, *(o.at for o in self.observations), len(self.tokens)]
        return [self.tokens[start:end] for start, end in pairwise(places)]

    @property
    def sequence(self) -> Ints:
        """The model's tokens and those of the environment, in their order."""
        if not self.observations:
            return self.tokens
        parts = self._split_at_observations()
        answers = [o.tokens for o in self.observations]
        return np.concatenate([parts[0], *(x for pair in zip(answers, parts[1:], strict=True) for x in pair)])


def join_partial(begun: Sample, rest: Sample) -> Sample:
    """Joins the earlier part of a completion with the rest that was sampled later."""
    if not len(rest.tokens):
        return replace(begun, finish=rest.finish)
    at = len(begun.tokens)
    changes = [*begun.changes, (at, rest.version), *((at + token, version) for token, version in rest.changes)]
    before = begun.changes[-1][1] if begun.changes else begun.version
    if rest.version == before:
        changes.remove((at, rest.version))
    tokens, logprobs = (np.concatenate([getattr(begun, n), getattr(rest, n)]) for n in ("tokens", "logprobs"))
    return replace(
        rest,
        tokens=tokens,
        logprobs=logprobs,
        version=begun.version,
        changes=tuple(changes),
        observations=begun.observations,
    )


def join_turns(turns: Sequence[tuple[Sequence[int] | Ints, int, Sample]], empty: Sample) -> Sample:
    """Returns the turns of an episode as one sample, each with what the environment said, and the turn that it continues."""
    if not turns:
        return empty
    observations, changes, at, version = [], list[tuple[int, int]](), 0, turns[0][2].version
    for i, (observed, after, turn) in enumerate(turns):
        continued = None if after == i - 1 else after
        observations.append(Observation(at, np.array(observed, dtype=np.int32), continued))
        for token, newer in ((0, turn.version), *turn.changes):
            if newer != version:
                changes.append((at + token, newer))
                version = newer
        at += len(turn.tokens)
    parts = [turn for _, _, turn in turns]
    return replace(
        empty,
        text="".join(turn.text for turn in parts),
        tokens=np.concatenate([turn.tokens for turn in parts]),
        logprobs=np.concatenate([turn.logprobs for turn in parts]),
        version=parts[0].version,
        changes=tuple(changes),
        observations=tuple(observations),
    )


def stop_at(sample: Sample, length: int) -> Sample:
    """Ends a completion after its first `length` tokens."""
    changes = tuple((token, version) for token, version in sample.changes if token < length)
    observations = tuple(o for o in sample.observations if o.at < length)
    tokens, logprobs = sample.tokens[:length], sample.logprobs[:length]
    return replace(sample, tokens=tokens, logprobs=logprobs, changes=changes, observations=observations, finish="stop")


@dataclass(frozen=True)
class Batch:
    """What one step trains on: every sample with a finite score, sorted by group, and the prompts."""

    prompts: list[Prompt]  # [groups], in data order
    samples: list[Sample]  # [N]
    groups: NDArray[np.int64]  # [N] which prompt
    rewards: Floats  # [N]
    components: list[dict[str, float]]  # [N]
    answers: list[str | None] = field(default_factory=list)  # [N] final answers, if the reward names them
    failed: list[tuple[Sample, Verdict]] = field(
        default_factory=list
    )  # also of dropped groups; with reward.on_failure `score: x` they are among `samples` too
    requested: int = 0  # verdicts requested
    failures: dict[str, int] = field(default_factory=dict)  # reason → number of failed verdicts
    first_failure: str = ""  # as a sentence
    reward_s: float = 0.0  # seconds from the last sample to the last verdict
    greedy: Floats | None = None  # [groups] reward of the greedy completion, NaN if its verdict failed
    dropped_groups: int = 0  # sampled groups that dynamic sampling replaced
    position: int = 0  # in the training data, after this batch
    deferred: tuple[int, ...] = ()  # earlier positions whose prompts come in a later batch
    is_shown: bool = False  # data showed the samples, in supervised training: nobody sampled or judged them

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(s.tokens) for s in self.samples], dtype=np.int64)  # [N]

    @property
    def first_tokens(self) -> list[int]:
        """The first token of each completion, -1 for an empty one.  [N]"""
        return [int(s.tokens[0]) if len(s.tokens) else -1 for s in self.samples]

    def split(self, column: NDArray[Any]) -> list[NDArray[Any]]:
        """A per-token column, one array per sample.  [T] -> [N]"""
        if len(column) != self.lengths.sum():
            raise ValueError(
                f"Batch.split: the column has {len(column)} numbers; the batch has {self.lengths.sum()} tokens."
            )
        return split_column(column, self.lengths.tolist())


def split_column(column: NDArray[Any], lengths: list[int]) -> list[NDArray[Any]]:
    """Cuts a column into pieces of these lengths, as views. `np.split` takes ten times as long.  [T], [N] -> [N]"""
    return [column[end - n : end] for n, end in zip(lengths, accumulate(lengths), strict=True)]


@dataclass(frozen=True)
class Columns:
    """Per-token numbers of a batch, its samples laid end to end, each [T]. A method's unused columns are None."""

    advantages: Floats | None = None
    old: Floats | None = None  # log-probs before the step; None: those of the update's own forward pass
    ref: Floats | None = None  # log-probs of the reference, for the KL term of the loss
    old_kl_coef: Floats | None = None  # weight of a term that keeps the token near `old`
    term_weights: Floats | None = None  # weights of all terms but the policy loss; None: those of the policy loss
    values: Floats | None = None  # the critic's values before the step
    returns: Floats | None = None  # the critic's targets


@dataclass(frozen=True)
class Pack:
    """Pieces of sequences laid end to end for one forward and backward pass: T input tokens predict K targets.

    Prompt "ab" with completions "cd." and "e.": both continue the prompt, which is computed once. The last token of a
    completion is never an input. The last token of the prompt predicts the first of each completion.

    tokens  a b c d e    lengths 2 2 1       parent -1 0 0         positions 0 1 2 3 2    sequences 0 0 0 1 1
    targets c d . e .    target_counts 3 2   first_logit 1 1       next_logits 2 4        logit_positions 1 2 3 1 4

    If an environment said "x" after "c", its token is an input and no target, and there are three turns:

    tokens  a b c x d e  targets c d . e .   turn_counts 1 2 2     first_logit 1 3 1      logit_positions 1 3 4 1 5

    Episodes that share turns share the pieces of these too: pieces are a tree, each followed by those that continue it.
    """

    tokens: Ints  # [T]
    lengths: list[int]  # [P] tokens of each piece, sum T
    parent: list[int]  # [P] the piece that each continues; -1: it starts a sequence
    targets: Ints  # [K]
    samples: list[int]  # [S] index of each sequence in the batch
    target_counts: list[int]  # [S] targets of each sequence, sum K
    turn_counts: list[int]  # [R] targets of each turn of the sequences, sum K
    first_logit: list[int]  # [R] position whose output predicts the turn's first target
    next_logits: list[int]  # [R] position for the second target; later targets follow on
    rollout: Floats  # [K] rollout log-probs
    weights: Floats  # [K] normalized over the mini-batch on all ranks; [0] for scoring only
    columns: Columns  # each [K]

    @property
    def sequences(self) -> Ints:
        """The sequence of each target, 0..S-1.  [K]"""
        return np.repeat(np.arange(len(self.target_counts), dtype=np.int32), self.target_counts)

    @property
    def logit_positions(self) -> Ints:
        """The position in the pack whose output predicts each target.  [K]"""
        counts, next_logits = (np.array(column, dtype=np.int32) for column in (self.turn_counts, self.next_logits))
        starts = counts.cumsum(dtype=np.int32) - counts
        positions = np.arange(len(self.targets), dtype=np.int32) + np.repeat(next_logits - 1 - starts, counts)
        has_targets = counts > 0
        positions[starts[has_targets]] = np.array(self.first_logit, dtype=np.int32)[has_targets]
        return positions

    @property
    def places(self) -> Ints:
        """The place of each target in its turn, from 0.  [K]"""
        counts = np.array(self.turn_counts, dtype=np.int32)
        starts = counts.cumsum(dtype=np.int32) - counts
        return np.arange(len(self.targets), dtype=np.int32) - np.repeat(starts, counts)

    @property
    def positions(self) -> NDArray[np.int64]:
        """The position of each token in its sequence.  [T]"""
        firsts = prefixes(self.lengths, self.parent)
        return np.concatenate([np.arange(first, first + n) for first, n in zip(firsts, self.lengths, strict=True)])

    @property
    def pairs(self) -> float:
        """Pairs of query and key that attention computes, as `rlsys.batching.balance.pack_cost` counts them."""
        before = prefixes(self.lengths, self.parent)
        return sum(n * (b + n / 2) for b, n in zip(before, self.lengths, strict=True))


def prefixes(lengths: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Returns how many tokens each piece of a pack continues.  [P], [P] -> [P]"""
    before: list[int] = []
    for parent in parents:
        before.append(before[parent] + lengths[parent] if parent >= 0 else 0)
    return before


def path_to(parents: Sequence[int], piece: int) -> list[int]:
    """Returns the pieces that a piece continues, the first one first."""
    path: list[int] = []
    while (piece := parents[piece]) >= 0:
        path.append(piece)
    return path[::-1]
