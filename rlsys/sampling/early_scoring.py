"""A batch is scored while the rest of it is still being sampled: chunk by chunk, as soon as the groups of a chunk are finished.

    groups     0 1 2 3 4 5 6 7        a chunk is as many groups, in the order of the batch, as fill a pack on each rank
    finished   x x x . x . x .        the first chunk, 0 1, is being scored; 2 is finished, and 3 still belongs to its chunk

Which groups make a chunk follows from their lengths alone, and each chunk is packed by itself. So every number is the same bit for bit,
whatever was finished when, and also where a batch comes from a checkpoint and is scored as a whole.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from rlsys.config.derived import scores_old
from rlsys.config.schema import Config
from rlsys.interfaces import Scorer
from rlsys.models.lookup import pairs_per_token
from rlsys.packs.balance import DEFAULT_PAIRS_PER_TOKEN
from rlsys.packs.packing import pack, unpack
from rlsys.sampling.collector import OnSamples
from rlsys.types import Batch, Floats, Prompt, Sample

ScoresBySample = dict[tuple[str, int], Floats]  # by uid and index


class BatchScorer:
    """What one scorer says of one batch: `seen` as samples come, or not at all, then `rest` and `column`."""

    def __init__(
        self,
        scorer: Scorer,
        thread: ThreadPoolExecutor,
        *,
        tokens_per_pack: int,
        samples: int,
        pairs_per_token: float = DEFAULT_PAIRS_PER_TOKEN,
        chunked: bool = True,
    ):
        self.scorer, self.thread = scorer, thread
        self.pack = partial(pack, ranks=scorer.ranks, tokens_per_pack=tokens_per_pack, pairs_per_token=pairs_per_token)
        self.most = tokens_per_pack * scorer.ranks if chunked else math.inf  # tokens of a chunk
        self.samples = samples  # of a group
        self.samples_by_uid: defaultdict[str, list[Sample]] = defaultdict(list)
        self.chunk: list[Prompt] = []
        self.tokens = 0  # of the chunk
        self.groups = 0  # that have been put into chunks
        self.scored: list[Future[ScoresBySample]] = []

    def add_samples(self, prompts: list[Prompt], samples: Iterable[Sample]) -> None:
        """Some samples of the batch that these prompts make."""
        for s in samples:
            if s.index < self.samples:  # a greedy one more is judged only
                self.samples_by_uid[s.uid].append(s)
        while self.groups < len(prompts) and len(self.samples_by_uid[prompts[self.groups].uid]) == self.samples:
            self.add(prompts[self.groups])
        if self.groups == len(prompts):
            self.close()

    def add(self, prompt: Prompt) -> None:
        tokens = len(prompt.tokens) + sum(
            len(s.tokens) - 1 for s in self.samples_by_uid[prompt.uid]
        )  # the prompt is shared
        if self.tokens + tokens > self.most:
            self.close()
        self.chunk.append(prompt)
        self.tokens += tokens
        self.groups += 1

    def close(self) -> None:
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
        found = batch.split(unpack(packs, self.scorer.score(packs), len(samples)))
        return {(s.uid, s.index): own for s, own in zip(samples, found, strict=True)}

    def finish(self, batch: Batch) -> None:
        """The batch is whole."""
        if not self.groups:  # nobody has shown it before
            failed = {(s.uid, s.index): s for s, _ in batch.failed}
            for s in (failed | {(s.uid, s.index): s for s in batch.samples}).values():
                self.samples_by_uid[s.uid].append(s)
        for prompt in batch.prompts[self.groups :]:
            self.add(prompt)
        self.close()

    def column(self, batch: Batch) -> Floats:
        """[T] One number for each token of the batch."""
        found: ScoresBySample = {}
        for chunk in self.scored:
            found |= chunk.result()
        return np.concatenate([found[s.uid, s.index] for s in batch.samples])


class EarlyScoring:
    """Old and reference log-probs of every batch; a thread for each scorer waits for it."""

    def __init__(self, config: Config, policy: Scorer, reference: Scorer | None):
        self.scorers: dict[str, Scorer] = {"old": policy} if scores_old(config) else {}
        if reference:
            self.scorers["ref"] = reference
        # Who has the weights and nothing else to do while engines sample, where all that is sampled is in the batch.
        on_policy, separate = config.pipeline.max_lag == 0, config.cluster.placement == "separate"
        known = not config.dynamic_sampling.enabled and not config.rollout.oversample
        self.early = [name for name in self.scorers if separate and known and (name == "ref" or on_policy)]
        self.threads = {name: ThreadPoolExecutor(1, thread_name_prefix=f"score {name}") for name in self.scorers}
        self.tokens_per_pack, self.samples = config.policy.tokens_per_pack, config.trainer.samples_per_prompt
        self.pairs_per_token = pairs_per_token(config.model.path)
        self.started: dict[int, dict[str, BatchScorer]] = {}  # by step

    def start_batch(self, step: int) -> OnSamples:
        """What is to be told of the samples of this step, as they come."""
        self.started[step] = begun = {name: self.scores(name) for name in self.early}

        def seen(prompts: list[Prompt], samples: list[Sample]) -> None:
            for scores in begun.values():
                scores.add_samples(prompts, samples)

        return seen

    def scores(self, name: str) -> BatchScorer:
        return BatchScorer(
            self.scorers[name],
            self.threads[name],
            tokens_per_pack=self.tokens_per_pack,
            samples=self.samples,
            pairs_per_token=self.pairs_per_token,
            chunked=name in self.early,
        )

    def columns(self, step: int, batch: Batch) -> dict[str, Floats]:
        """`old` and `ref` of a batch, [T] each, as far as they are needed."""
        begun = self.started.pop(step, {})
        found = {name: begun.get(name) or self.scores(name) for name in self.scorers}
        for scores in found.values():
            scores.finish(batch)
        return {name: scores.column(batch) for name, scores in found.items()}

    def close(self, wait: bool = False) -> None:
        """No more is scored; with `wait`, nothing is being scored either."""
        for thread in self.threads.values():
            thread.shutdown(wait=wait, cancel_futures=True)
