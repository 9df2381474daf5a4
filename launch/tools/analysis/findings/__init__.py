"""What in a run's metrics and events needs a look, in words. Each check is a function of `RunData`.

Checks that compare the first quarter of the steps with the last one report nothing for a run shorter than `MIN_STEPS`.
Thresholds are the constants next to the checks. The docstring of a check says what it looks for; the report shows it.
"""

from collections.abc import Callable
from dataclasses import replace

from launch.tools.analysis.findings.episodes import cut_episodes, slow_environments, unreadable_calls, unused_tools
from launch.tools.analysis.findings.faults import (
    ended_badly,
    failed_rewards,
    idle_engine,
    lost_workers,
    lower_throughput,
    skipped_updates,
    stalled_workers,
    wrong_weights,
)
from launch.tools.analysis.findings.learning import (
    accuracy_drop,
    dead_component,
    entropy_collapse,
    explosion,
    heavy_clipping,
    mismatch_grows,
    no_spread,
    nothing_learned,
    only_training_improves,
    truncation,
)
from launch.tools.analysis.findings.run_data import Finding, Findings, RunData

__all__ = ["CHECKS", "Finding", "RunData", "check_descriptions", "run_checks"]

CHECKS: tuple[Callable[[RunData], Findings], ...] = (
    ended_badly,
    skipped_updates,
    stalled_workers,
    lost_workers,
    wrong_weights,
    failed_rewards,
    only_training_improves,
    accuracy_drop,
    nothing_learned,
    entropy_collapse,
    explosion,
    no_spread,
    dead_component,
    truncation,
    cut_episodes,
    slow_environments,
    unreadable_calls,
    unused_tools,
    mismatch_grows,
    heavy_clipping,
    idle_engine,
    lower_throughput,
)


def run_checks(run: RunData) -> list[Finding]:
    """Returns the findings of all checks; problems first."""
    reported = [replace(finding, check=check.__name__) for check in CHECKS for finding in check(run)]
    return sorted(reported, key=lambda f: ("problem", "warning", "note").index(f.tone))


def check_descriptions() -> list[str]:
    """Returns what each check looks for, a sentence each."""
    return [" ".join((check.__doc__ or "").split()) for check in CHECKS]
