"""The figures of a step, each from its definition. Names are `metrics.jsonl`'s."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rlsys.types import Batch, Floats

Metrics = dict[str, float]


class Clock:
    """Seconds per phase. `with clock("update"): ...` then `clock.metrics()["time/update"]`."""

    def __init__(self) -> None:
        self.start, self.phases = (
            time.perf_counter(),
            dict.fromkeys(("rollout", "reward", "score", "update", "sync"), 0.0),
        )

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.phases[phase] += time.perf_counter() - began

    def split(self, phase: str, other: str, seconds: float) -> None:
        """Books up to `seconds` of a phase under another name."""
        moved = min(seconds, self.phases[phase])
        self.phases[phase] -= moved
        self.phases[other] += moved

    def metrics(self) -> Metrics:
        return {"time/step": time.perf_counter() - self.start} | {
            f"time/{name}": seconds for name, seconds in self.phases.items()
        }


def of_batch(batch: Batch, advantages: Floats, asked: int) -> Metrics:
    """Rewards, lengths and what the groups can teach. `asked` is how many samples were requested."""
    rewards, lengths = batch.rewards, batch.lengths
    sizes = np.bincount(batch.groups, minlength=len(batch.prompts))
    flat = [np.ptp(rewards[batch.groups == g]) == 0 for g in np.flatnonzero(sizes > 1)]
    names = sorted({name for c in batch.components for name in c})
    found: Metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "reward/failed": float(asked - len(batch.samples)),
        "groups/alone": float((sizes == 1).sum()),
        "groups/lost": float((sizes == 0).sum()),
        "groups/equal": float(sum(flat)),
        "advantage/max_abs": float(np.abs(advantages).max(initial=0.0)),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated": float(np.mean([s.finish == "length" for s in batch.samples])),
        "tokens": float(lengths.sum()),
    }
    found |= {f"failure/{reason}": float(n) for reason, n in batch.failures.items()}
    if len(names) > 1:
        found |= {f"reward/component/{n}": float(np.mean([c[n] for c in batch.components if n in c])) for n in names}
    return found


def of_updates(updates: list[Metrics]) -> Metrics:
    """From the policy's per-update sums to means: per update for loss and gradient, per token for the rest.

    An update has `loss`, `grad_norm`, `lr`, the sums over its `tokens` of `kl`, `entropy`, `clipped` and `mismatch`, which is
    |old - rollout|, and its largest, `mismatch_max`.
    """
    tokens = sum(u["tokens"] for u in updates) or 1.0
    return {
        "loss": sum(u["loss"] for u in updates) / len(updates),
        "grad_norm": sum(u["grad_norm"] for u in updates) / len(updates),
        "lr": updates[-1]["lr"],
        "kl": sum(u["kl"] for u in updates) / tokens,
        "entropy": sum(u["entropy"] for u in updates) / tokens,
        "clip_fraction": sum(u["clipped"] for u in updates) / tokens,
        "mismatch/mean_abs": sum(u["mismatch"] for u in updates) / tokens,
        "mismatch/max_abs": max(u["mismatch_max"] for u in updates),
    }
