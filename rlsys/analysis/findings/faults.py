"""What went wrong with the machines: errors, faults, failures, and time that was lost."""

from rlsys.analysis.findings.run_data import Finding, Findings, RunData, as_percent, describe_steps
from rlsys.analysis.run_events import RunEvent, last_ending

FAILED = 0.01  # share of verdicts that fail
SLACK = 1 / 3  # an engine's time at work, over that of the busiest one
SLOWER = 0.7  # tokens per second at the end, over those at the start


def ended_badly(seen: RunData) -> Findings:
    """The run ended with an error."""
    last = last_ending(seen.events)
    if last and last.kind == "stop" and last.tone == "problem":
        yield Finding(
            "problem",
            "The run ended with an error",
            f"{last.facts.get('cause', 'It does not say which.')}",
            steps=(last.step, last.step),
        )


def skipped_updates(seen: RunData) -> Findings:
    """An update was left out because a loss or gradient was not finite."""
    bad = [(step, count) for step, count in seen.series("update/skipped") if count]
    if not bad:
        return
    total = sum(count for _, count in bad)
    samples = [h.facts["sample"] for h in seen.events if h.kind == "skipped update" and h.facts.get("sample")]
    whose = f" The first came from sample {samples[0]}." if samples else ""
    yield Finding(
        "problem",
        f"{total:.0f} update{'s were' if total > 1 else ' was'} skipped",
        f"In {describe_steps(s for s, _ in bad)} a loss or gradient was not finite; the weights stayed as they were.{whose} "
        "A smaller policy.lr, or policy.clip_grad, may help; so does a look at rewards that are very large.",
        figures=("update/skipped", "grad_norm"),
        steps=(bad[0][0], bad[-1][0]),
        samples={"step": bad[0][0], "set": "step"},
    )


def stalled_workers(seen: RunData) -> Findings:
    """A worker was waited for, and nothing was heard of it for watchdog.stall_s."""
    for h in (h for h in seen.events if h.kind == "stall"):
        names = h.facts.get("waiting_for") or []
        who = ", ".join(map(str, names)) if isinstance(names, list) else str(names)
        yield Finding(
            "problem",
            f"{who or 'A worker'} stalled",
            f"While {h.facts.get('doing', 'something')} was going on in step {h.step}, nothing was heard of it for "
            f"{h.facts.get('seconds', '?')} s. Its stacks at that time are in the event, and in logs/.",
            figures=("time/step",),
            steps=(h.step, h.step),
        )


def lost_workers(seen: RunData) -> Findings:
    """Workers were replaced, or the run started itself again."""
    lost = [h for h in seen.events if h.kind == "replaced"]
    again = [h for h in seen.events if h.kind == "restart"]
    for events, title, what in (
        (again, "The run started itself again", "from its last checkpoint; steps since then were done a second time"),
        (lost, "Workers were replaced", "while the run went on; what they were at was given to others"),
    ):
        if events:
            causes = dict.fromkeys(_first_line(h) for h in events)
            yield Finding(
                "warning",
                f"{title} {len(events)} time{'s' * (len(events) > 1)}",
                f"In {describe_steps(h.step for h in events)}, {what}. " + " · ".join(list(causes)[:3]),
                figures=("time/step",),
                steps=(events[0].step, events[-1].step),
            )


def wrong_weights(seen: RunData) -> Findings:
    """Engines could not prove the weights they were sent, and were replaced."""
    wrong = [h for h in seen.events if h.kind == "weights did not arrive"]
    if wrong:
        yield Finding(
            "warning",
            f"Weights did not arrive whole {len(wrong)} time{'s' * (len(wrong) > 1)}",
            f"In {describe_steps(h.step for h in wrong)} an engine's proof differed from the policy's. What it had sampled was dropped, and "
            "another one took its place. Once is a curiosity; repeated, look at memory and network of that host.",
            steps=(wrong[0].step, wrong[-1].step),
        )


def failed_rewards(seen: RunData) -> Findings:
    """Reward verdicts failed, of training samples or of held-out ones: any are told, 1 % or more are a warning."""
    asked = sum(n for _, n in seen.series("reward/asked"))  # which runs of earlier versions do not say
    asked = asked or (_samples_per_step(seen) or 0) * len(seen.series("reward/failed"))
    scored = seen.config is not None and seen.config.reward.failure_score is not None
    leaves = "" if scored else "A failed sample leaves its group. "
    teaches = "A reward that fails on some kinds of completions teaches nothing about them."
    yield from _failed(seen, "reward", ["reward/failed"], "failure/", asked, f"{leaves}{teaches}")
    held_out = seen.held_out_names("failed")
    asked = sum(n for name in held_out for _, n in seen.series(f"{name.removesuffix('failed')}samples"))
    left = "A failed sample leaves every figure: accuracies are of the others alone."
    yield from _failed(seen, "held-out", held_out, "eval/failure/", asked, left)


def _failed(seen: RunData, which: str, names: list[str], by_reason: str, asked: float, why: str) -> Findings:
    """The sum of the figures `names`, of so many that were `asked`; those that begin with `by_reason` are its parts."""
    counts = [(step, n) for name in names for step, n in seen.series(name) if n]
    failed = sum(n for _, n in counts)
    if not failed:
        return
    bad = sorted({step for step, _ in counts})
    reasons = {n.removeprefix(by_reason) for line in seen.metrics for n in line if n.startswith(by_reason)}
    parts = {reason: sum(n for _, n in seen.series(f"{by_reason}{reason}")) for reason in sorted(reasons)}
    said = ", ".join(f"{reason} {count:.0f}" for reason, count in sorted(parts.items(), key=lambda x: -x[1]))
    part = failed / asked if asked else None
    yield Finding(
        "warning" if part is None or part >= FAILED else "note",
        f"{failed:,.0f} {which} verdict{'s' * (failed > 1)} failed",
        f"That is {f'{as_percent(part)} of all, ' if part is not None else ''}in {describe_steps(bad)}{f' ({said})' if said else ''}. {why}",
        figures=(*names, *(f"{by_reason}{reason}" for reason in parts)),
        steps=(bad[0], bad[-1]),
        samples={
            "failure": max(parts, key=lambda r: parts[r], default="any"),
            "set": "eval" if which == "held-out" else "step",
        },
    )


def idle_engine(seen: RunData) -> Findings:
    """An engine was at work for less than a third of the time that the busiest one was, in the last six steps."""
    engines = {name: share for name, share in seen.busy_share.items() if name.startswith("rollout-")}
    if len(engines) < 2:
        return
    best = max(engines, key=lambda name: engines[name])
    for name, part in engines.items():
        if engines[best] >= 0.1 and part < SLACK * engines[best]:
            yield Finding(
                "warning",
                f"{name} has little to do",
                f"It was at work for {as_percent(part)} of the last steps, {best} for {as_percent(engines[best])}. It may have been replaced, be on a "
                "slower machine, or there may be too few prompts per step to go round; the lanes below show which.",
                figures=("time/rollout",),
            )


def slower(seen: RunData) -> Findings:
    """Tokens per second at the end are 70 % of those at the start, or less."""
    speed = seen.trend("tokens_per_second")
    if speed and speed.after <= SLOWER * speed.before:
        yield Finding(
            "note",
            "Steps make fewer tokens per second",
            f"{speed.before:,.0f} at the start, {speed.after:,.0f} at the end. Shorter completions alone have this effect; so have a slower machine beside, or "
            "one long completion that all wait for. The phases below show which part grew.",
            figures=("tokens_per_second", "length/mean", "length/max", "time/step"),
            steps=speed.steps,
        )


def _samples_per_step(seen: RunData) -> int:
    return seen.config.trainer.prompts_per_step * seen.config.trainer.samples_per_prompt if seen.config else 0


def _first_line(h: RunEvent) -> str:
    worker = f"{h.facts['worker']}: " if h.facts.get("worker") else ""
    return (worker + str(h.facts.get("cause", ""))).strip().partition("\n")[0][:200]
