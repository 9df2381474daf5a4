"""Options that are gone: what stands in their place, and how runs that were saved with them are read."""

from pathlib import Path
from typing import Any

OFFLOADED = ("optimizer", "params", "activations")
ANY = None  # the option said nothing of what a run learns, or `upgrade` has it under another name
# By option: what there is in its place, and with which values a saved run learns the same without it.
RETIRED: dict[str, tuple[str, tuple[Any, ...] | None]] = {
    "run.grace_s": ("a step has 25 seconds after SIGTERM", ANY),
    "cluster.dashboard_port": ("the dashboard takes a free port", ANY),
    "trainer.max_skipped": ("4 skipped updates in a row stop the run", ANY),
    "rollout.top_p": ("the trainer's log-probs are over all tokens, so engines sample from all", (1.0,)),
    "rollout.top_k": ("the trainer's log-probs are over all tokens, so engines sample from all", (-1, 0)),
    "rollout.block_size": ("it is 32 on CPU, and vLLM's choice on GPUs", (32,)),
    **{f"policy.offload_{part}": (f"write policy.offload: [{part}]", ANY) for part in OFFLOADED},
    "policy.logprob_chunk": ("it follows from the model's vocabulary", ANY),
    "policy.lora.dropout": ("adapters are merged, and engines have no dropout", (0.0,)),
    "policy.beta1": ("write policy.betas: [0.9, 0.95]", ANY),
    "policy.beta2": ("write policy.betas: [0.9, 0.95]", ANY),
    "policy.port": ("ranks meet at a free port", ANY),
    "reference.zero_stage": ("in place of 3, write reference.place: split", ANY),
    "reference.gpus": ("each rank has one; in place of 0, write reference.place: cpu", ANY),
    "reference.offload": ("write reference.place: offload", ANY),
    "reference.kl_horizon": ("kl_coef changes by about 20 % in 10 steps at most", (10,)),
    "critic.port": ("ranks meet at a free port", ANY),
    "critic.whiten": ("write algorithm.whiten", (True,)),
    "critic.bootstrap_truncated": ("the value behind a truncated completion is 0", (False,)),
    "reward.batch": ("a batched function gets at most 32 samples at once", ANY),
    "reward.concurrency": ("async functions judge up to 64 samples at a time in each of reward.workers", ANY),
    "entropy.low": ("clip_cov acts on covariances from 1 to 5", (1.0,)),
    "entropy.high": ("clip_cov acts on covariances from 1 to 5", (5.0,)),
    "entropy.kl_coef": ("the KL term of kl_cov has weight 1", (1.0,)),
    "sync.what": ("with policy.lora, merged weights are sent", ANY),
    "tracking.ray": ("metrics always go through Ray too", ANY),
    "watchdog.action": ("a stalled worker is replaced, or the run restarts", ANY),
}


def is_run(folder: Path) -> bool:
    """True for the directory of a run that has begun."""
    return (folder / "config.yaml").is_file() and (folder / "metrics.jsonl").is_file()


def upgrade(saved: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The options of a saved run under their present names, without those that are gone and make no difference."""
    before = dict(saved)
    now = {key: value for key, value in saved if not _makes_no_difference(key, value)}
    if parts := [part for part in OFFLOADED if before.get(f"policy.offload_{part}")]:
        now["policy.offload"] = parts
    if "policy.beta1" in before:
        now["policy.betas"] = [before["policy.beta1"], before.get("policy.beta2", 0.95)]
    for place, option, value in (("cpu", "gpus", 0), ("offload", "offload", True), ("split", "zero_stage", 3)):
        if before.get(f"reference.{option}") == value:
            now["reference.place"] = place
    return list(now.items())


def _makes_no_difference(key: str, value: Any) -> bool:
    _, harmless = RETIRED.get(key, ("", ()))
    return harmless is ANY or value in harmless
