"""What the figures and events of a run give cause to look at, in words. Each check is a function of what was `Seen`.

A check says nothing of a run that is shorter than `FEWEST` steps, where it compares the start with the end: the first quarter of
the steps with the last one. Thresholds are the constants below; `CHECKS` says what each check looks for.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rlsys import agreement
from rlsys.config import Config
from rlsys.config_check import COMPARE_WITHIN_A_GROUP
from rlsys.history import Happening, ending, happenings

FEWEST = 8  # steps, before begin and end are compared
RECENT = 10  # steps that "of late" means
EQUAL = 0.5  # share of groups whose rewards are equal
CUT_RISE, CUT = 0.1, 0.1  # share of completions cut at the limit: how much it rises, and to what
NEARLY_ALL = 0.9  # of the completions are cut, whether that has risen or not
COLLAPSED = 0.1  # entropy at the end, over that at the start
EXPLODED = {"kl": 0.5, "grad_norm": 5.0}  # what they are at least where they explode, kl in nats per token
GROWTH = 5.0  # and at least so many times what they were: a straight line from 0 is 7 times
SOLVED = 0.95  # mean reward, of 1 at most, above which there is little left to learn
RISE = 0.05  # of the mean reward, or of an accuracy: what counts as one
MISMATCH_GROWTH, MISMATCH_SHARE = 3.0, 0.1  # end over begin; and of the limit that stops a run
HELD = 0.3  # share of tokens that the clip holds
FAILED = 0.01  # share of verdicts that fail
SLACK = 1 / 3  # an engine's time at work, over that of the busiest one
SLOWER = 0.7  # tokens per second at the end, over those at the start

Filter = dict[str, Any]  # of the report's samples: {"failure": "timeout"}


@dataclass(frozen=True)
class Finding:
    """Finding("warning", "Completions are cut more often", "…", figures=("length/truncated",), steps=(61, 80))"""

    tone: str  # problem | warning | note
    title: str
    text: str  # what was seen, why it matters, what may help
    figures: tuple[str, ...] = ()  # names in metrics.jsonl that show it
    steps: tuple[int, int] | None = None  # where to look
    samples: Filter | None = None  # which samples show it
    check: str = ""  # which of CHECKS found it


@dataclass(frozen=True)
class Seen:
    """What a run has left behind. `busy` is the share of the last steps in which a worker was at work."""

    lines: list[dict[str, float]]  # metrics.jsonl
    happened: list[Happening] = field(default_factory=list)
    config: Config | None = None  # None: of a version that this one cannot read
    busy: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: list[dict[str, float]], events: list[dict[str, Any]], config: Config | None) -> "Seen":
        return cls(lines, happenings(events), config)

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever a line has a finite one."""
        return [(int(x["step"]), v) for x in self.lines if (v := finite(x, name)) is not None]

    def ends(self, name: str) -> "Ends | None":
        """Its begin and its end, where there are enough steps to tell them apart."""
        found = self.series(name)
        if len(found) < FEWEST:
            return None
        size = max(len(found) // 4, 2)
        return Ends(found[:size], found[-size:])

    def recent(self, name: str) -> float | None:
        values = [v for _, v in self.series(name)[-RECENT:]]
        return sum(values) / len(values) if values else None

    def held_out(self, figure: str) -> list[str]:
        """Its name for each source: ["eval/easy/accuracy", "eval/hard/accuracy"]"""
        names = sorted({n for line in self.lines for n in line if n.startswith("eval/") and n.endswith(f"/{figure}")})
        return [n for n in names if n != f"eval/all/{figure}"] if len(names) > 1 else names

    def accuracies(self) -> dict[str, list[dict[str, float]]]:
        """By source, the lines in which it was evaluated."""
        return {n: [line for line in self.lines if finite(line, n) is not None] for n in self.held_out("accuracy")}


@dataclass(frozen=True)
class Ends:
    """The first and the last quarter of a series."""

    begin: list[tuple[int, float]]
    end: list[tuple[int, float]]

    @property
    def before(self) -> float:
        return sum(v for _, v in self.begin) / len(self.begin)

    @property
    def after(self) -> float:
        return sum(v for _, v in self.end) / len(self.end)

    @property
    def steps(self) -> tuple[int, int]:
        return self.end[0][0], self.end[-1][0]

    @property
    def noise(self) -> float:
        """Standard error of after − before."""
        parts = ((self.begin, self.before), (self.end, self.after))
        return math.sqrt(sum(sum((v - m) ** 2 for _, v in s) / (len(s) - 1) / len(s) for s, m in parts))

    @property
    def rises(self) -> bool:
        """By more than noise, and by enough to speak of."""
        return self.after - self.before > max(RISE, 2 * self.noise)


Found = Iterator[Finding]


def ended_badly(seen: Seen) -> Found:
    """The run ended with an error."""
    last = ending(seen.happened)
    if last and last.kind == "stop" and last.tone == "problem":
        yield Finding(
            "problem",
            "The run ended with an error",
            f"{last.facts.get('cause', 'It does not say which.')}",
            steps=(last.step, last.step),
        )


def skipped_updates(seen: Seen) -> Found:
    """An update was left out because a loss or gradient was not finite."""
    bad = [(step, count) for step, count in seen.series("update/skipped") if count]
    if not bad:
        return
    total = sum(count for _, count in bad)
    samples = [h.facts["sample"] for h in seen.happened if h.kind == "skipped update" and h.facts.get("sample")]
    whose = f" The first came from sample {samples[0]}." if samples else ""
    yield Finding(
        "problem",
        f"{total:.0f} update{'s were' if total > 1 else ' was'} skipped",
        f"In {_steps(s for s, _ in bad)} a loss or gradient was not finite; the weights stayed as they were.{whose} "
        "A smaller policy.lr, or policy.clip_grad, may help; so does a look at rewards that are very large.",
        figures=("update/skipped", "grad_norm"),
        steps=(bad[0][0], bad[-1][0]),
        samples={"step": bad[0][0], "set": "step"},
    )


def stalled_workers(seen: Seen) -> Found:
    """A worker was waited for, and nothing was heard of it for watchdog.stall_s."""
    for h in (h for h in seen.happened if h.kind == "stall"):
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


def idle_engine(seen: Seen) -> Found:
    """An engine was at work for less than a third of the time that the busiest one was, in the last six steps."""
    engines = {name: share for name, share in seen.busy.items() if name.startswith("rollout-")}
    if len(engines) < 2:
        return
    best = max(engines, key=lambda name: engines[name])
    for name, part in engines.items():
        if engines[best] >= 0.1 and part < SLACK * engines[best]:
            yield Finding(
                "warning",
                f"{name} has little to do",
                f"It was at work for {share(part)} of the last steps, {best} for {share(engines[best])}. It may have been replaced, be on a "
                "slower machine, or there may be too few prompts per step to go round; the lanes below show which.",
                figures=("time/rollout",),
            )


def lost_workers(seen: Seen) -> Found:
    """Workers were replaced, or the run started itself again."""
    lost = [h for h in seen.happened if h.kind == "replaced"]
    again = [h for h in seen.happened if h.kind == "restart"]
    for events, title, what in (
        (again, "The run started itself again", "from its last checkpoint; steps since then were done a second time"),
        (lost, "Workers were replaced", "while the run went on; what they were at was given to others"),
    ):
        if events:
            causes = dict.fromkeys(_first_line(h) for h in events)
            yield Finding(
                "warning",
                f"{title} {len(events)} time{'s' * (len(events) > 1)}",
                f"In {_steps(h.step for h in events)}, {what}. " + " · ".join(list(causes)[:3]),
                figures=("time/step",),
                steps=(events[0].step, events[-1].step),
            )


def wrong_weights(seen: Seen) -> Found:
    """Engines could not prove the weights they were sent, and were replaced."""
    wrong = [h for h in seen.happened if h.kind == "weights did not arrive"]
    if wrong:
        yield Finding(
            "warning",
            f"Weights did not arrive whole {len(wrong)} time{'s' * (len(wrong) > 1)}",
            f"In {_steps(h.step for h in wrong)} an engine's proof differed from the policy's. What it had sampled was dropped, and "
            "another one took its place. Once is a curiosity; repeated, look at memory and network of that host.",
            steps=(wrong[0].step, wrong[-1].step),
        )


def failed_rewards(seen: Seen) -> Found:
    """Reward verdicts failed, of training samples or of held-out ones: any are told, 1 % or more are a warning."""
    asked = sum(n for _, n in seen.series("reward/asked"))  # which runs of earlier versions do not say
    asked = asked or (_samples_per_step(seen) or 0) * len(seen.series("reward/failed"))
    scored = seen.config is not None and seen.config.reward.failure_score is not None
    leaves = "" if scored else "A failed sample leaves its group. "
    teaches = "A reward that fails on some kinds of completions teaches nothing about them."
    yield from _failed(seen, "reward", ["reward/failed"], "failure/", asked, f"{leaves}{teaches}")
    held_out = seen.held_out("failed")
    asked = sum(n for name in held_out for _, n in seen.series(f"{name.removesuffix('failed')}samples"))
    left = "A failed sample leaves every figure: accuracies are of the others alone."
    yield from _failed(seen, "held-out", held_out, "eval/failure/", asked, left)


def _failed(seen: Seen, which: str, names: list[str], by_reason: str, asked: float, why: str) -> Found:
    """The sum of the figures `names`, of so many that were `asked`; those that begin with `by_reason` are its parts."""
    counts = [(step, n) for name in names for step, n in seen.series(name) if n]
    failed = sum(n for _, n in counts)
    if not failed:
        return
    bad = sorted({step for step, _ in counts})
    reasons = {n.removeprefix(by_reason) for line in seen.lines for n in line if n.startswith(by_reason)}
    parts = {reason: sum(n for _, n in seen.series(f"{by_reason}{reason}")) for reason in sorted(reasons)}
    said = ", ".join(f"{reason} {count:.0f}" for reason, count in sorted(parts.items(), key=lambda x: -x[1]))
    part = failed / asked if asked else None
    yield Finding(
        "warning" if part is None or part >= FAILED else "note",
        f"{failed:,.0f} {which} verdict{'s' * (failed > 1)} failed",
        f"That is {f'{share(part)} of all, ' if part is not None else ''}in {_steps(bad)}{f' ({said})' if said else ''}. {why}",
        figures=(*names, *(f"{by_reason}{reason}" for reason in parts)),
        steps=(bad[0], bad[-1]),
        samples={
            "failure": max(parts, key=lambda r: parts[r], default="any"),
            "set": "eval" if which == "held-out" else "step",
        },
    )


def no_spread(seen: Seen) -> Found:
    """Half of the groups of late, or more, have equal rewards and teach nothing."""
    equal, groups = seen.recent("groups/equal"), seen.config.trainer.prompts_per_step if seen.config else 0
    if equal is None or not groups or equal / groups < EQUAL:
        return
    if seen.config and seen.config.algorithm.advantage not in COMPARE_WITHIN_A_GROUP:
        return
    reward = seen.recent("reward/mean") or 0.0
    steps = [step for step, _ in seen.series("groups/equal")[-RECENT:]]
    yield Finding(
        "warning",
        f"{share(equal / groups)} of the groups teach nothing",
        f"In the last {len(steps)} steps so many groups had the same reward for all of their samples; the mean reward there is {reward:.3g}. "
        "They cost time and have no gradient. If most are solved, use harder prompts; if none is, easier ones or partial credit; "
        "dynamic_sampling.enabled asks for others in their place.",
        figures=("groups/equal", "reward/mean"),
        steps=(steps[0], steps[-1]),
        samples={"step": steps[-1], "spread": "none", "set": "step"},
    )


def truncation(seen: Seen) -> Found:
    """The share of completions that are cut at rollout.max_new_tokens has risen by a tenth or more, to a tenth or more; or is nine tenths."""
    cut = seen.ends("length/truncated")
    if not cut:
        return
    rises = cut.after - cut.before >= CUT_RISE and cut.after >= CUT
    if not rises and cut.after < NEARLY_ALL:
        return
    limit = f" ({seen.config.rollout.max_new_tokens})" if seen.config else ""
    yield Finding(
        "warning",
        "Completions are cut more often" if rises else "Nearly all completions are cut",
        f"{share(cut.after)} of the completions reach rollout.max_new_tokens{limit} at the end, {share(cut.before)} did at the start. "
        "A cut completion is judged without its answer, so length is punished by chance. Allow more tokens, or shape the end with overlong.buffer.",
        figures=("length/truncated", "length/mean"),
        steps=cut.steps,
        samples={"step": cut.steps[1], "finish": "length", "set": "step"},
    )


def entropy_collapse(seen: Seen) -> Found:
    """Entropy has fallen to a tenth of what it was at the start."""
    entropy = seen.ends("entropy")
    if not entropy or entropy.before <= 0 or entropy.after > COLLAPSED * entropy.before:
        return
    yield Finding(
        "warning",
        "Entropy has collapsed",
        f"It fell from {entropy.before:.3g} to {entropy.after:.3g} per token. The policy hardly tries anything new any more; what it has not found by now it "
        "will hardly find. Harmless at the end of a solved task. Else: a higher algorithm.clip_high, entropy.control, a KL term, or a smaller policy.lr.",
        figures=("entropy", "reward/mean"),
        steps=entropy.steps,
        samples={"step": entropy.steps[1], "set": "step"},
    )


def explosion(seen: Seen) -> Found:
    """KL or the gradient norm is five times what it was at the start, KL at least 0.5 and the norm 5, and neither the reward nor a held-out accuracy rises."""
    reward = seen.ends("reward/mean")
    if (reward and reward.rises) or _accuracy_rises(seen):
        return
    ends = {name: found for name in EXPLODED if (found := seen.ends(name))}
    grown = {n: e for n, e in ends.items() if e.after >= max(EXPLODED[n], GROWTH * e.before)}
    if not grown:
        return
    steps = next(iter(grown.values())).steps
    yield Finding(
        "warning",
        f"{' and '.join(grown)} explode{'s' * (len(grown) == 1)}",
        ", ".join(
            f"{name} was {e.before:.3g} at the start and is {e.after:.3g} at the end" for name, e in grown.items()
        )
        + ". The policy moves far away from where it began, and the reward does not rise with it: steps are too large, or few rewards are blown up to full advantages. "
        "A smaller policy.lr, policy.warmup_updates, or algorithm.std=none may help; a checkpoint from before is still good.",
        figures=(*grown, "entropy", "reward/mean"),
        steps=steps,
        samples={"step": steps[1], "set": "step"},
    )


def only_training_improves(seen: Seen) -> Found:
    """The training reward rises; a held-out accuracy rises by less than a quarter of that, and its interval still reaches down to where it began."""
    reward = seen.ends("reward/mean")
    if not reward or not reward.rises:
        return
    for name, lines in seen.accuracies().items():
        if len(lines) < 2:
            continue
        first, last = lines[0], lines[-1]
        own = name.removeprefix("eval/").removesuffix("/accuracy")
        rise, room = last[name] - first[name], (reward.after - reward.before) / 4
        if rise < room and _edge(last, name, "low") <= first[name]:
            yield Finding(
                "warning",
                f"The reward rises, accuracy on {own} does not",
                f"The mean reward went from {reward.before:.3g} to {reward.after:.3g}, the held-out accuracy from {first[name]:.3g} to {last[name]:.3g}"
                f"{_between(last, name)}. What is learned does not carry over: the reward may be satisfied by something else than the task "
                "(read the best-paid completions), or the training prompts are too few.",
                figures=("reward/mean", name),
                steps=(int(first["step"]), int(last["step"])),
                samples={"step": reward.steps[1], "sort": "reward", "set": "step"},
            )


def past_its_best(seen: Seen) -> Found:
    """A held-out accuracy was better before than it is now, by 0.05 and by more than its interval."""
    for name, lines in seen.accuracies().items():
        own = name.removeprefix("eval/").removesuffix("/accuracy")
        best = max(lines, key=lambda line: line[name], default=None)
        if best is None or lines[-1] is best:
            continue
        last = lines[-1]
        if best[name] - last[name] > RISE and _edge(last, name, "high") < best[name]:
            yield Finding(
                "warning",
                f"Accuracy on {own} was better at step {best['step']:.0f}",
                f"Held-out accuracy was {best[name]:.3g} then, and is {last[name]:.3g}{_between(last, name)} at step {last['step']:.0f}. "
                f"checkpoint.keep_best: {name} keeps the best one.",
                figures=(name,),
                steps=(int(best["step"]), int(last["step"])),
            )


def nothing_learned(seen: Seen) -> Found:
    """After 20 steps or more the reward is neither two standard errors higher than at the start nor near 1, and no held-out accuracy has risen."""
    reward = seen.ends("reward/mean")
    if not reward or len(seen.series("reward/mean")) < 20 or reward.after - reward.before > 2 * reward.noise:
        return
    if min(reward.before, reward.after) >= SOLVED and max(reward.before, reward.after) <= 1:
        return
    if seen.config and seen.config.dynamic_sampling.enabled:
        return  # the mean is of groups with some right and some wrong, whatever is learned
    if _accuracy_rises(seen):
        return
    falls = reward.before - reward.after > max(RISE, 2 * reward.noise)
    shuffled = seen.config is not None and seen.config.reward.shuffle
    yield Finding(
        "warning",
        "The reward falls" if falls else "The reward does not rise",
        f"Its mean was {reward.before:.3g} in the first quarter of the steps and is {reward.after:.3g} in the last one (standard error {reward.noise:.2g}). "
        + (
            "reward.shuffle is on: nothing can be learned."
            if shuffled
            else "Look whether groups have any spread, whether policy.lr is too small or too large, and at the samples: is a right answer ever found?"
        ),
        figures=("reward/mean", "groups/equal", "grad_norm"),
        steps=reward.steps,
        samples={"step": reward.steps[1], "set": "step"},
    )


def mismatch_grows(seen: Seen) -> Found:
    """The gap of rollout and policy log-probs is three times what it was, and a tenth of the limit that stops a run."""
    gap = seen.ends("mismatch/mean_abs")
    if not gap:
        return
    limit = agreement.step_limit(seen.config) if seen.config else agreement.LIMITS["float32"]
    if gap.after < MISMATCH_SHARE * limit or gap.after < MISMATCH_GROWTH * gap.before:
        return
    yield Finding(
        "warning",
        "Engines and policy drift apart",
        f"The mean gap of their log-probs was {gap.before:.2g} and is {gap.after:.2g} per token; at {limit:.2g} the run stops. What is learned is less and less "
        "what was sampled. `rlsys doctor CONFIG` finds the cause; correction.method weighs samples for it.",
        figures=("mismatch/mean_abs", "mismatch/max_abs"),
        steps=gap.steps,
        samples={"step": gap.steps[1], "colour": "gap", "set": "step"},
    )


def clip_holds_much(seen: Seen) -> Found:
    """Of late the clip holds 30 % of the tokens or more."""
    held = seen.recent("clip_fraction")
    if held is not None and held >= HELD:
        steps = [step for step, _ in seen.series("clip_fraction")[-RECENT:]]
        yield Finding(
            "warning",
            f"The clip holds {share(held)} of the tokens",
            f"In the last {len(steps)} steps so many tokens had moved past the clip within their own step, and learned nothing more. "
            "The step is too large for its updates: a smaller policy.lr, fewer updates_per_step or epochs_per_step, or a wider clip.",
            figures=("clip_fraction", "clip_fraction/low", "clip_fraction/high"),
            steps=(steps[0], steps[-1]),
        )


def dead_component(seen: Seen) -> Found:
    """A part of the reward has had the same mean in all steps, eight or more."""
    for name in sorted({n for line in seen.lines for n in line if n.startswith("reward/component/")}):
        found = seen.series(name)
        values = [v for _, v in found]
        if len(values) >= FEWEST and max(values) - min(values) < 1e-9:
            part = name.removeprefix("reward/component/")
            yield Finding(
                "warning",
                f"Reward component {part} is dead",
                f"Its mean was {values[0]:.3g} in each of {len(values)} steps: it tells no completion from another. "
                "Its pattern may never match, or its field may be missing in the data; `rlsys rescore` tries another version on the saved samples.",
                figures=(name, "reward/mean"),
                steps=(found[0][0], found[-1][0]),
                samples={"step": found[-1][0], "set": "step"},
            )


def slower(seen: Seen) -> Found:
    """Tokens per second at the end are 70 % of those at the start, or less."""
    speed = seen.ends("tokens_per_second")
    if speed and speed.after <= SLOWER * speed.before:
        yield Finding(
            "note",
            "Steps make fewer tokens per second",
            f"{speed.before:,.0f} at the start, {speed.after:,.0f} at the end. Shorter completions alone have this effect; so have a slower machine beside, or "
            "one long completion that all wait for. The phases below show which part grew.",
            figures=("tokens_per_second", "length/mean", "length/max", "time/step"),
            steps=speed.steps,
        )


CHECKS: tuple[Callable[[Seen], Found], ...] = (
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


def findings(seen: Seen) -> list[Finding]:
    """Of all checks; problems first."""
    found = [replace(f, check=check.__name__) for check in CHECKS for f in check(seen)]
    return sorted(found, key=lambda f: ("problem", "warning", "note").index(f.tone))


def looked_for() -> list[str]:
    """What each check looks for, in one sentence."""
    return [(check.__doc__ or "").strip() for check in CHECKS]


def finite(line: dict[str, Any], name: str) -> float | None:
    """What a line says, where that is a finite number: a line that somebody else has written may have anything."""
    value = line.get(name)
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if fine else None


def share(part: float) -> str:
    """0.1234 -> "12.3 %" """
    return f"{float(f'{100 * part:.3g}'):g} %"


def _samples_per_step(seen: Seen) -> int:
    return seen.config.trainer.prompts_per_step * seen.config.trainer.samples_per_prompt if seen.config else 0


def _accuracy_rises(seen: Seen) -> bool:
    """Whether one that is held out has, beyond its interval."""
    held_out = seen.accuracies().items()
    return any(lines and _edge(lines[-1], name, "low") > lines[0][name] for name, lines in held_out)


def _edge(line: dict[str, float], name: str, which: str) -> float:
    """Of an accuracy's interval, `low` or `high`; the accuracy itself where it has none."""
    found = finite(line, f"{name}/{which}")
    return line[name] if found is None else found


def _between(line: dict[str, float], name: str) -> str:
    low, high = finite(line, f"{name}/low"), finite(line, f"{name}/high")
    return "" if low is None or high is None else f" (95 % interval {low:.3g} to {high:.3g})"


def _first_line(h: Happening) -> str:
    worker = f"{h.facts['worker']}: " if h.facts.get("worker") else ""
    return (worker + str(h.facts.get("cause", ""))).strip().partition("\n")[0][:200]


def _steps(numbers: Any) -> str:
    """ "step 3" or "steps 3, 4, 9 and 17 more" """
    steps = sorted(set(numbers))
    shown = [str(s) for s in steps[:4]]
    if len(steps) == 1:
        return f"step {shown[0]}"
    if len(steps) > 4:
        return f"steps {', '.join(shown)} and {len(steps) - 4} more"
    return f"steps {', '.join(shown[:-1])} and {shown[-1]}"
