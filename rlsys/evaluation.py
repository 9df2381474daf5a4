"""Accuracy on held-out prompts: one greedy completion each, judged like any other sample."""

from dataclasses import dataclass, replace

import numpy as np

from rlsys.data import Dataset
from rlsys.pipeline import Collector
from rlsys.types import Batch


@dataclass(frozen=True)
class Evaluation:
    """`accuracy` per source is the mean score of its prompts; a failed verdict counts as 0 here, and is told."""

    batch: Batch
    accuracy: dict[str, float]
    counts: dict[str, int]
    failures: dict[str, int]

    def metrics(self) -> dict[str, float]:
        return {f"eval/{source}/accuracy": value for source, value in self.accuracy.items()} | {
            f"eval/failure/{reason}": float(n) for reason, n in self.failures.items()
        }


def evaluate(collector: Collector, datasets: list[Dataset], *, step: int, max_new_tokens: int) -> Evaluation:
    # Two files may share a source, and then their lines share uids.
    prompts = [replace(p, uid=f"{p.uid}@{i}") for i, d in enumerate(datasets) for p in d.prompts]
    name = f"eval {step}"
    batch = collector.collect(name, prompts, samples=1, temperature=0.0, max_new_tokens=max_new_tokens)
    collector.checked(name, batch)
    source_of = np.array([p.source for p in prompts])
    scores = np.zeros(len(prompts))
    scores[batch.groups] = batch.rewards
    sources = sorted(set(source_of))
    return Evaluation(
        batch,
        accuracy={s: float(scores[source_of == s].mean()) for s in sources},
        counts={s: int((source_of == s).sum()) for s in sources},
        failures=batch.failures,
    )
