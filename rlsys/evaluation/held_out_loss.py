"""The loss on held-out rows: the mean over their tokens of minus the policy's log-prob, per source and over all."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from rlsys.batching.packing import PackBatch, unpack
from rlsys.evaluation.held_out import ALL, HeldOutSet, metric_names
from rlsys.interfaces import Scorer
from rlsys.sampling.demonstrations import demonstration_batch
from rlsys.types import Floats, Metrics


def held_out_losses(policy: Scorer, pack: PackBatch, held_out: Sequence[HeldOutSet], step: int) -> Metrics:
    """Returns `eval/<source>/loss` of sets whose rows show what to write."""
    names = [name for name, _ in metric_names(held_out)]
    batch = demonstration_batch([prompt for h in held_out for prompt in h.prompts], step)
    packs = pack(batch, range(len(names)), ranks=policy.ranks)
    logprobs = batch.split(unpack(packs, policy.score(packs), len(names)))
    by_name: defaultdict[str, list[Floats]] = defaultdict(list)
    for name, of_row in zip(names, logprobs, strict=True):
        by_name[name].append(of_row)
    if len(by_name) > 1:
        by_name[ALL] = logprobs
    return {
        f"eval/{name}/loss": -float(np.concatenate(rows).mean(dtype=np.float64))
        for name, rows in sorted(by_name.items())
    }
