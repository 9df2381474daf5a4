"""What the figures and events of a run give cause to look at, in words. Each check is a function of what was `Seen`.

A check says nothing of a run that is shorter than `FEWEST` steps, where it compares the start with the end: the first quarter of
the steps with the last one. Thresholds are the constants beside the checks; `CHECKS` says what each check looks for.
"""

from collections.abc import Callable
from dataclasses import replace

from rlsys.analysis.findings.faults import (
    ended_badly,
    failed_rewards,
    idle_engine,
    lost_workers,
    skipped_updates,
    slower,
    stalled_workers,
    wrong_weights,
)
from rlsys.analysis.findings.learning import (
    clip_holds_much,
    dead_component,
    entropy_collapse,
    explosion,
    mismatch_grows,
    no_spread,
    nothing_learned,
    only_training_improves,
    past_its_best,
    truncation,
)
from rlsys.analysis.findings.run_data import Finding, Findings, RunData

__all__ = ["CHECKS", "Finding", "RunData", "check_descriptions", "run_checks"]

CHECKS: tuple[Callable[[RunData], Findings], ...] = (
    ended_badly,
    skipped_updates,
    stalled_workers,
    lost_workers,
    wrong_weights,
    failed_rewards,
    only_training_improves,
    past_its_best,
    nothing_learned,
    entropy_collapse,
    explosion,
    no_spread,
    dead_component,
    truncation,
    mismatch_grows,
    clip_holds_much,
    idle_engine,
    slower,
)


def run_checks(seen: RunData) -> list[Finding]:
    """Of all checks; problems first."""
    found = [replace(f, check=check.__name__) for check in CHECKS for f in check(seen)]
    return sorted(found, key=lambda f: ("problem", "warning", "note").index(f.tone))


def check_descriptions() -> list[str]:
    """What each check looks for, in one sentence."""
    return [(check.__doc__ or "").strip() for check in CHECKS]
