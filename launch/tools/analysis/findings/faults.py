"""Checks for trouble with the machines: errors, faults, failures, and lost time."""

from collections.abc import Iterable

from launch.tools.analysis.findings.run_data import Finding, Findings, RunData, as_percent, describe_steps
from launch.tools.analysis.run_events import RunEvent, last_ending

MAX_FAILED = 0.01  # share of verdicts that fail
IDLE = 1 / 3  # an engine's busy time, relative to the busiest one
LOWER = 0.7  # tokens per second at the end, relative to the start


def ended_badly(run: RunData) -> Findings:
    """The run ended with an error."""
    ending = last_ending(run.events)
    if ending and ending.kind == "stop" and ending.tone == "problem":
        yield Finding(
            "problem",
            "The run ended with an error",
            str(ending.facts.get("cause", "Its cause is not recorded.")),
            steps=(ending.step, ending.step),
        )


def skipped_updates(run: RunData) -> Findings:
    """An update was skipped because a loss or gradient was not finite."""
    skipped = [(step, count) for step, count in run.series("update/skipped") if count]
    if not skipped:
        return
    total = sum(count for _, count in skipped)
    samples = [e.facts["sample"] for e in run.events if e.kind == "skipped update" and e.facts.get("sample")]
    origin = f" The first came from sample {samples[0]}." if samples else ""
    yield Finding(
        "problem",
        f"{total:.0f} update{'s were' if total > 1 else ' was'} skipped",
        f"In {describe_steps(s for s, _ in skipped)} a loss or gradient was not finite; the weights stayed as they "
        f"were.{origin} A smaller policy.lr, or policy.clip_grad, may help. Also look for very large rewards.",
        figures=("update/skipped", "grad_norm"),
        steps=(skipped[0][0], skipped[-1][0]),
        samples={"step": skipped[0][0], "set": "step"},
    )


def stalled_workers(run: RunData) -> Findings:
    """A worker gave no answer for watchdog.stall_s."""
    for event in (e for e in run.events if e.kind == "stall"):
        names = event.facts.get("waiting_for") or []
        workers = ", ".join(map(str, names)) if isinstance(names, list) else str(names)
        yield Finding(
            "problem",
            f"{workers or 'A worker'} stalled",
            f"During {event.facts.get('doing', 'an unknown phase')} in step {event.step}, it gave no answer for "
            f"{event.facts.get('seconds', '?')} s. Its stacks at that time are in the event, and in logs/.",
            figures=("time/step",),
            steps=(event.step, event.step),
        )


def lost_workers(run: RunData) -> Findings:
    """Workers were replaced, or the run restarted itself."""
    replaced = [e for e in run.events if e.kind == "replaced"]
    restarts = [e for e in run.events if e.kind == "restart"]
    for events, title, consequence in (
        (restarts, "The run restarted itself", "from its last checkpoint; steps since then were repeated"),
        (replaced, "Workers were replaced", "while the run continued; their work was given to others"),
    ):
        if events:
            causes = dict.fromkeys(_first_line(event) for event in events)
            yield Finding(
                "warning",
                f"{title} {len(events)} time{'s' * (len(events) > 1)}",
                f"In {describe_steps(e.step for e in events)}, {consequence}. " + " · ".join(list(causes)[:3]),
                figures=("time/step",),
                steps=(events[0].step, events[-1].step),
            )


def wrong_weights(run: RunData) -> Findings:
    """Engines had other weights than those they were sent, and were replaced."""
    events = [e for e in run.events if e.kind == "wrong weights"]
    if events:
        yield Finding(
            "warning",
            f"Engines had wrong weights {len(events)} time{'s' * (len(events) > 1)}",
            f"In {describe_steps(e.step for e in events)} an engine's fingerprint differed from the policy's. Its "
            "samples were discarded, and another engine took its place. If this happens again, check memory and "
            "network of that host.",
            steps=(events[0].step, events[-1].step),
        )


def failed_rewards(run: RunData) -> Findings:
    """Reward verdicts failed, on training or held-out samples: a note for any, a warning from 1 % on."""
    requested = sum(n for _, n in run.series("reward/requested"))
    scored = run.config is not None and run.config.reward.failure_score is not None
    exclusion = "" if scored else "A failed sample is excluded from its group. "
    yield from _failed_verdicts(
        run,
        "reward",
        ["reward/failed"],
        "failure/",
        requested,
        f"{exclusion}A reward that fails on some kinds of completions teaches nothing about them.",
    )
    held_out = run.held_out_names("failed")
    requested = sum(n for name in held_out for _, n in run.series(f"{name.removesuffix('failed')}samples"))
    yield from _failed_verdicts(
        run,
        "held-out",
        held_out,
        "eval/failure/",
        requested,
        "Failed samples are excluded from every held-out metric.",
    )


def _failed_verdicts(
    run: RunData, which: str, names: list[str], reason_prefix: str, requested: float, advice: str
) -> Findings:
    """Reports the sum of the metrics `names`, out of `requested` verdicts, by the reasons that other metrics count."""
    counts = [(step, n) for name in names for step, n in run.series(name) if n]
    failed = sum(n for _, n in counts)
    if not failed:
        return
    steps = sorted({step for step, _ in counts})
    reasons = {n.removeprefix(reason_prefix) for line in run.metrics for n in line if n.startswith(reason_prefix)}
    by_reason = {reason: sum(n for _, n in run.series(f"{reason_prefix}{reason}")) for reason in sorted(reasons)}
    share = failed / requested if requested else None
    share_text = f"{as_percent(share)} of all, " if share is not None else ""
    yield Finding(
        "warning" if share is None or share >= MAX_FAILED else "note",
        f"{failed:,.0f} {which} verdict{'s' * (failed > 1)} failed",
        f"That is {share_text}in {describe_steps(steps)}{_in_brackets(by_reason.items())}. {advice}",
        figures=(*names, *(f"{reason_prefix}{reason}" for reason in by_reason)),
        steps=(steps[0], steps[-1]),
        samples={
            "failure": max(by_reason, key=lambda r: by_reason[r], default="any"),
            "set": "eval" if which == "held-out" else "step",
        },
    )


def _in_brackets(counts: Iterable[tuple[str, float]]) -> str:
    """[("timeout", 3), ("crash", 5)] -> " (crash 5, timeout 3)" """
    text = ", ".join(f"{reason} {count:.0f}" for reason, count in sorted(counts, key=lambda item: -item[1]))
    return f" ({text})" if text else ""


def idle_engine(run: RunData) -> Findings:
    """An engine was busy for less than a third of the time of the busiest one, in the last six steps."""
    engines = {name: share for name, share in run.busy_share.items() if name.startswith("rollout-")}
    if len(engines) < 2:
        return
    busiest = max(engines, key=lambda name: engines[name])
    for name, share in engines.items():
        if engines[busiest] >= 0.1 and share < IDLE * engines[busiest]:
            yield Finding(
                "warning",
                f"{name} is mostly idle",
                f"It was busy for {as_percent(share)} of the last steps, {busiest} for {as_percent(engines[busiest])}. "
                "It may have been replaced, run on a slower machine, or there may be too few prompts per step for all "
                "engines. The lanes below show which.",
                figures=("time/rollout",),
            )


def lower_throughput(run: RunData) -> Findings:
    """Tokens per second at the end are 70 % of those at the start, or less."""
    speed = run.trend("tokens_per_second")
    if speed and speed.after <= LOWER * speed.before:
        yield Finding(
            "note",
            "Throughput has dropped",
            f"Tokens per second went from {speed.before:,.0f} to {speed.after:,.0f}. Shorter completions alone have "
            "this effect. So has a slower machine, or one long completion that all others wait for. The phases below "
            "show which part grew.",
            figures=("tokens_per_second", "length/mean", "length/max", "time/step"),
            steps=speed.steps,
        )


def _first_line(event: RunEvent) -> str:
    worker = f"{event.facts['worker']}: " if event.facts.get("worker") else ""
    return (worker + str(event.facts.get("cause", ""))).strip().partition("\n")[0][:200]
