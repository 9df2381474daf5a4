"""Scores a batch while the rest of it is sampled: each chunk as soon as all its groups are finished.

    groups     0 1 2 3 4 5 6 7        a chunk is the groups, in the order of the batch, that fill a pack on each rank
    finished   x x x . x . x .        the first chunk, 0 1, is being scored; 2 is finished, and 3 belongs to its chunk

The lengths alone decide which groups make a chunk, and each chunk is packed by itself. So every number is the same bit
for bit in any order of finishing, and also where a batch comes from a checkpoint and is scored as a whole.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from functools import partial

import numpy as np

from rlsys.batching.packing import PackBatch, unpack
from rlsys.config.derived import scores_old
from rlsys.config.schema import Config
from rlsys.interfaces import Scorer
from rlsys.sampling.collector import OnSamples
from rlsys.threads import REAL, Threads
from rlsys.types import Batch, Columns, Floats, Prompt, Sample

ScoresBySample = dict[tuple[str, int], Floats]  # by uid and index


class BatchScorer:
    """One scorer's numbers for one batch. `add_samples` as they finish, or not at all; then `finish` and `column`."""

    def __init__(
        self,
        scorer: Scorer,
        thread: Executor,
        pack: PackBatch,
        *,
        samples_per_prompt: int,
        chunk_tokens: float = math.inf,
    ):
        self.scorer, self.thread, self.pack = scorer, thread, partial(pack, ranks=scorer.ranks)
        self.samples_per_prompt, self.chunk_tokens = samples_per_prompt, chunk_tokens
        self.samples_by_uid: defaultdict[str, list[Sample]] = defaultdict(list)
        self.chunk: list[Prompt] = []
        self.tokens = 0  # of the chunk
        self.groups = 0  # that are in this or an earlier chunk
        self.scored: list[Future[ScoresBySample]] = []

    def add_samples(self, prompts: list[Prompt], samples: Iterable[Sample]) -> None:
        """Adds some samples of the batch that these prompts make."""
        for s in samples:
            if s.index < self.samples_per_prompt:  # an additional greedy sample is only judged
                self.samples_by_uid[s.uid].append(s)
        while self.groups < len(prompts) and self.is_complete(prompts[self.groups]):
            self.add_group(prompts[self.groups])
        if self.groups == len(prompts):
            self.close_chunk()

    def is_complete(self, prompt: Prompt) -> bool:
        return len(self.samples_by_uid[prompt.uid]) == self.samples_per_prompt

    def add_group(self, prompt: Prompt) -> None:
        samples = self.samples_by_uid[prompt.uid]
        completions = sum(len(s.tokens) - 1 + s.observed_tokens for s in samples)
        tokens = len(prompt.tokens) + completions  # the prompt is shared
        if self.tokens + tokens > self.chunk_tokens:
            self.close_chunk()
        self.chunk.append(prompt)
        self.tokens += tokens
        self.groups += 1

    def close_chunk(self) -> None:
        if self.chunk:
            self.scored.append(self.thread.submit(self.score, self.chunk))
        self.chunk, self.tokens = [], 0

    def score(self, prompts: list[Prompt]) -> ScoresBySample:
        groups = [sorted(self.samples_by_uid[p.uid], key=lambda s: s.index) for p in prompts]
        samples = [s for group in groups for s in group]
        if not samples:
            return {}
        numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        batch = Batch(prompts, samples, numbers, np.zeros(len(samples), dtype=np.float32), [{} for _ in samples])
        packs = self.pack(batch, range(len(samples)))
        scores = batch.split(unpack(packs, self.scorer.score(packs), len(samples)))
        return {(s.uid, s.index): column for s, column in zip(samples, scores, strict=True)}

    def finish(self, batch: Batch) -> None:
        """Scores what is left once the batch is complete."""
        if not self.groups:  # nothing was added while it was sampled
            failed = {(s.uid, s.index): s for s, _ in batch.failed}
            for s in (failed | {(s.uid, s.index): s for s in batch.samples}).values():
                self.samples_by_uid[s.uid].append(s)
        for prompt in batch.prompts[self.groups :]:
            self.add_group(prompt)
        self.close_chunk()

    def column(self, batch: Batch) -> Floats:
        """Returns one number for each token of the batch.  [T]"""
        scores: ScoresBySample = {}
        for chunk in self.scored:
            scores |= chunk.result()
        return np.concatenate([scores[s.uid, s.index] for s in batch.samples])


class EarlyScoring:
    """Old and reference log-probs of every batch, and the critic's values. One thread per scorer waits for it."""

    def __init__(
        self,
        config: Config,
        policy: Scorer,
        reference: Scorer | None,
        critic: Scorer | None,
        pack: PackBatch,
        threads: Threads = REAL,
    ):
        self.scorers: dict[str, Scorer] = {"old": policy} if scores_old(config) else {}
        if reference:
            self.scorers["ref"] = reference
        self.has_reference, self.critic, self.pack = reference is not None, critic, pack
        # These have their weights and nothing else to do while engines sample, and all samples end up in the batch.
        on_policy, separate = config.pipeline.max_lag == 0, config.cluster.placement == "separate"
        keeps_all = not config.dynamic_sampling.enabled and not config.rollout.oversample
        frozen = [] if config.reference.refresh_every else ["ref"]
        self.early = [name for name in self.scorers if separate and keeps_all and (name in frozen or on_policy)]
        self.threads = {name: threads.executor(f"score {name}") for name in self.scorers}
        self.tokens_per_pack = config.policy.tokens_per_pack
        self.samples_per_prompt = config.trainer.samples_per_prompt
        self.started: dict[int, dict[str, BatchScorer]] = {}  # by step

    def start_batch(self, step: int) -> OnSamples:
        """Returns the function to call with the samples of this step as they finish."""
        self.started[step] = scorers = {name: self.batch_scorer(name) for name in self.early}

        def on_samples(prompts: list[Prompt], samples: list[Sample]) -> None:
            for scorer in scorers.values():
                scorer.add_samples(prompts, samples)

        return on_samples

    def batch_scorer(self, name: str) -> BatchScorer:
        scorer = self.scorers[name]
        return BatchScorer(
            scorer,
            self.threads[name],
            self.pack,
            samples_per_prompt=self.samples_per_prompt,
            chunk_tokens=self.tokens_per_pack * scorer.ranks if name in self.early else math.inf,
        )

    def columns(self, step: int, batch: Batch) -> Columns:
        """Returns `old`, `ref` and `values` of a batch, [T] each, as far as this configuration needs them."""
        started = self.started.pop(step, {})
        scorers = {name: started.get(name) or self.batch_scorer(name) for name in self.scorers}
        for scorer in scorers.values():
            scorer.finish(batch)
        scores = {name: scorer.column(batch) for name, scorer in scorers.items()}
        return Columns(**scores, values=self.critic_values(batch) if self.critic else None)

    def critic_values(self, batch: Batch) -> Floats:
        assert self.critic is not None
        packs = self.pack(batch, range(len(batch.samples)), ranks=self.critic.ranks)
        return unpack(packs, self.critic.score(packs), len(batch.samples))

    def close(self, wait: bool = False) -> None:
        """Starts no more scoring; with `wait`, also waits for what is running."""
        for thread in self.threads.values():
            thread.shutdown(wait=wait, cancel_futures=True)
