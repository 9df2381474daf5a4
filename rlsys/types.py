"""What flows between the stages. Log-probs are of the sampled token, natural logarithm, at the sampling temperature."""

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Metrics = dict[str, float]  # by name


@dataclass(frozen=True)
class Prompt:
    """One row of data, ready to be sent to an engine.

    Prompt(uid="zigzag:17#0", source="zigzag", text="864152>", tokens=[10, 8, 6, 3, 7, 4, 12], row={"answer": ...})
    """

    uid: str  # distinct for every use of a row: the row and the epoch
    source: str  # the data set, for per-source figures
    text: str
    tokens: list[int]  # [P]
    row: dict[str, Any]  # everything else in the row; reward functions may ask for it
    messages: list[dict[str, Any]] | None = None  # the chat that `text` was rendered from
    rewards: str = ""  # whose reward functions judge it: those of this data set, or "" for reward.functions


@dataclass(frozen=True)
class Request:
    """One completion to be sampled. `Request("zigzag:17#0", 3, [10, 8, …], seed=…, temperature=1.0, max_new_tokens=10)`"""

    uid: str
    index: int  # which sample of its group
    tokens: list[int]  # [P]
    seed: int
    temperature: float  # 0: greedy
    max_new_tokens: int  # of the whole completion
    partial: "Sample | None" = None  # what there is of it already; it is to be continued
    ignore_end: bool = False  # go on to max_new_tokens whatever is sampled, as a benchmark asks for


@dataclass(frozen=True)
class Sample:
    """A completion. `Sample("zigzag:17#0", 3, "481625", tokens=[6, 10, 3, 8, 4, 7, 1], logprobs=[…], "stop", version=4)`

    With `changes=((5, 6), (6, 7))` the first five tokens are of weights 4, the sixth of weights 6, and the last of weights 7.
    """

    uid: str
    index: int
    text: str  # special tokens left out
    tokens: Ints  # [C], the end-of-sequence token included
    logprobs: Floats  # [C], `rollout`: the engine's
    finish: str  # stop | length | cut: half-written, see `Rollout.cut`
    version: int  # of the weights it was sampled from; its oldest, where they changed under it
    changes: tuple[tuple[int, int], ...] = ()  # (token, version): from that token on it is of newer weights

    @property
    def versions(self) -> NDArray[np.int64]:
        """The weights each token was sampled from.  [C]"""
        starts, versions = zip((0, self.version), *self.changes, strict=True)
        return np.repeat(versions, np.diff([*starts, len(self.tokens)]))


def join_partial(begun: Sample, rest: Sample) -> Sample:
    """A completion of which `begun` was there before, and `rest` came later."""
    if not len(rest.tokens):
        return replace(begun, finish=rest.finish)
    at = len(begun.tokens)
    changes = [*begun.changes, (at, rest.version), *((at + token, version) for token, version in rest.changes)]
    before = begun.changes[-1][1] if begun.changes else begun.version
    if rest.version == before:
        changes.remove((at, rest.version))
    tokens, logprobs = (np.concatenate([getattr(begun, n), getattr(rest, n)]) for n in ("tokens", "logprobs"))
    return replace(rest, tokens=tokens, logprobs=logprobs, version=begun.version, changes=tuple(changes))


@dataclass(frozen=True)
class Verdict:
    """What a reward function said: a finite score, or a failure with its reason.

    Verdict(0.75, components={"exact": 0.5, "length": 0.25})    Verdict(None, failure="timeout", detail="no answer after 10 s")
    """

    score: float | None
    components: dict[str, float] = field(default_factory=dict)
    failure: str = ""  # timeout | crash | memory | exception | invalid
    detail: str = ""  # traceback or sentence
    answer: str | None = None  # what the completion's final answer was taken to be, if the function says so


@dataclass(frozen=True)
class Batch:
    """What one step trains on: every sample that has a finite score, groups standing together, with their prompts."""

    prompts: list[Prompt]  # [groups], in data order
    samples: list[Sample]  # [N]
    groups: NDArray[np.int64]  # [N] which prompt
    rewards: Floats  # [N]
    components: list[dict[str, float]]  # [N]
    answers: list[str | None] = field(default_factory=list)  # [N] final answers, where the reward says them
    failed: list[tuple[Sample, Verdict]] = field(
        default_factory=list
    )  # what failed, of dropped groups too; with reward.on_failure score: x it is among `samples` too
    requested: int = 0  # verdicts asked for
    failures: dict[str, int] = field(default_factory=dict)  # reason → samples that left the batch
    first_failure: str = ""  # in words
    reward_s: float = 0.0  # last sample to last verdict
    greedy: Floats | None = None  # [groups] reward of a greedy completion, NaN where its verdict failed
    dropped_groups: int = 0  # groups that were sampled and taught nothing
    position: int = 0  # in the training data, after this batch
    deferred: tuple[int, ...] = ()  # positions before it whose prompts were asked for and come in a later batch

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(s.tokens) for s in self.samples], dtype=np.int64)  # [N]

    def split(self, column: NDArray[Any]) -> list[NDArray[Any]]:
        """A per-token column, one array per sample.  [T] -> [N]"""
        if len(column) != self.lengths.sum():
            raise ValueError(
                f"Batch.split: the column has {len(column)} numbers; the batch has {self.lengths.sum()} tokens."
            )
        return split_column(column, self.lengths.tolist())


def split_column(column: NDArray[Any], lengths: list[int]) -> list[NDArray[Any]]:
    """So many numbers for each, as views. `np.split` takes ten times as long.  [T], [N] -> [N]"""
    return [column[end - n : end] for n, end in zip(lengths, accumulate(lengths), strict=True)]


@dataclass(frozen=True)
class Columns:
    """Per-token numbers of a batch, its samples end to end, each [T]. What a method does not use is None."""

    advantages: Floats | None = None
    old: Floats | None = None  # log-probs before the step; None: the policy is the one that is about to be updated
    ref: Floats | None = None  # log-probs of the reference, for a KL term in the loss
    anchor: Floats | None = None  # weight of a term that holds the token near `old`
    values: Floats | None = None  # the critic's before the step
    returns: Floats | None = None  # what the critic is to learn


@dataclass(frozen=True)
class Pack:
    """Pieces of sequences laid end to end for one forward and backward: T input tokens, K targets that they predict.

    Prompt "ab" and its completions "cd." and "e.": the prompt is a piece that both continue, computed once. The last token of a
    completion is never an input, and the last of the prompt predicts the first of each completion.
    tokens a b c d e    lengths 2 2 1    after -1 0 0    positions 0 1 2 3 2    targets c d . e .    counts 3 2    first 1 1
    rest 2 4    predict 1 2 3 1 4    sequences 0 0 0 1 1
    """

    tokens: Ints  # [T]
    lengths: list[int]  # [P] of the pieces, sum T
    parent: list[int]  # [P] the piece that each continues; -1: it begins a sequence
    targets: Ints  # [K]
    samples: list[int]  # [S] index of each sequence in the batch
    target_counts: list[int]  # [S] targets of each, sum K
    first_logit: list[int]  # [S] place whose output predicts the first target of each
    next_logits: list[int]  # [S] place for the second; for those behind it, the places behind
    rollout: Floats  # [K]
    weights: Floats  # [K] token weight, normalised over the whole mini-batch on all ranks; [0] where it is only scored
    columns: Columns  # each [K]

    @property
    def sequences(self) -> Ints:
        """The sequence of each target, 0..S-1.  [K]"""
        return np.repeat(np.arange(len(self.target_counts), dtype=np.int32), self.target_counts)

    @property
    def logit_positions(self) -> Ints:
        """The place in the pack whose output predicts each target.  [K]"""
        counts, rest = np.array(self.target_counts, dtype=np.int32), np.array(self.next_logits, dtype=np.int32)
        starts = counts.cumsum(dtype=np.int32) - counts
        places = np.arange(len(self.targets), dtype=np.int32) + np.repeat(rest - 1 - starts, counts)
        some = counts > 0
        places[starts[some]] = np.array(self.first_logit, dtype=np.int32)[some]
        return places

    @property
    def positions(self) -> NDArray[np.int64]:
        """The place of each token in its own sequence.  [T]"""
        firsts = [0 if a < 0 else self.lengths[a] for a in self.parent]
        return np.concatenate([np.arange(first, first + n) for first, n in zip(firsts, self.lengths, strict=True)])

    @property
    def pairs(self) -> float:
        """Of query and key that attention looks at, as `rlsys.packs.balance.cost` counts them."""
        before = [0 if a < 0 else self.lengths[a] for a in self.parent]
        return sum(n * (b + n / 2) for b, n in zip(before, self.lengths, strict=True))
