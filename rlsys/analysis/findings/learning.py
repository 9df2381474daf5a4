"""What went wrong with learning: of rewards, accuracies, and what an update looks at."""

from rlsys.analysis.findings.run_data import (
    MIN_RISE,
    MIN_STEPS,
    RECENT_STEPS,
    Finding,
    Findings,
    RunData,
    as_percent,
    finite_value,
)
from rlsys.checks import GROUP_RELATIVE
from rlsys.numerics import agreement

EQUAL = 0.5  # share of groups whose rewards are equal
CUT_RISE, CUT = 0.1, 0.1  # share of completions cut at the limit: how much it rises, and to what
NEARLY_ALL = 0.9  # of the completions are cut, whether that has risen or not
COLLAPSED = 0.1  # entropy at the end, over that at the start
EXPLODED = {"kl": 0.5, "grad_norm": 5.0}  # what they are at least where they explode, kl in nats per token
GROWTH = 5.0  # and at least so many times what they were: a straight line from 0 is 7 times
SOLVED = 0.95  # mean reward, of 1 at most, above which there is little left to learn
MISMATCH_GROWTH, MISMATCH_SHARE = 3.0, 0.1  # end over begin; and of the limit that stops a run
HELD = 0.3  # share of tokens that the clip holds


def only_training_improves(seen: RunData) -> Findings:
    """The training reward rises; a held-out accuracy rises by less than a quarter of that, and its interval still reaches down to where it began."""
    reward = seen.trend("reward/mean")
    if not reward or not reward.rises:
        return
    for name, lines in seen.held_out_accuracies().items():
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


def past_its_best(seen: RunData) -> Findings:
    """A held-out accuracy was better before than it is now, by 0.05 and by more than its interval."""
    for name, lines in seen.held_out_accuracies().items():
        own = name.removeprefix("eval/").removesuffix("/accuracy")
        best = max(lines, key=lambda line: line[name], default=None)
        if best is None or lines[-1] is best:
            continue
        last = lines[-1]
        if best[name] - last[name] > MIN_RISE and _edge(last, name, "high") < best[name]:
            yield Finding(
                "warning",
                f"Accuracy on {own} was better at step {best['step']:.0f}",
                f"Held-out accuracy was {best[name]:.3g} then, and is {last[name]:.3g}{_between(last, name)} at step {last['step']:.0f}. "
                f"checkpoint.keep_best: {name} keeps the best one.",
                figures=(name,),
                steps=(int(best["step"]), int(last["step"])),
            )


def nothing_learned(seen: RunData) -> Findings:
    """After 20 steps or more the reward is neither two standard errors higher than at the start nor near 1, and no held-out accuracy has risen."""
    reward = seen.trend("reward/mean")
    if not reward or len(seen.series("reward/mean")) < 20 or reward.after - reward.before > 2 * reward.noise:
        return
    if min(reward.before, reward.after) >= SOLVED and max(reward.before, reward.after) <= 1:
        return
    if seen.config and seen.config.dynamic_sampling.enabled:
        return  # the mean is of groups with some right and some wrong, whatever is learned
    if _accuracy_rises(seen):
        return
    falls = reward.before - reward.after > max(MIN_RISE, 2 * reward.noise)
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


def entropy_collapse(seen: RunData) -> Findings:
    """Entropy has fallen to a tenth of what it was at the start."""
    entropy = seen.trend("entropy")
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


def explosion(seen: RunData) -> Findings:
    """KL or the gradient norm is five times what it was at the start, KL at least 0.5 and the norm 5, and neither the reward nor a held-out accuracy rises."""
    reward = seen.trend("reward/mean")
    if (reward and reward.rises) or _accuracy_rises(seen):
        return
    ends = {name: found for name in EXPLODED if (found := seen.trend(name))}
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


def no_spread(seen: RunData) -> Findings:
    """Half of the groups of late, or more, have equal rewards and teach nothing."""
    equal, groups = seen.recent_mean("groups/equal"), seen.config.trainer.prompts_per_step if seen.config else 0
    if equal is None or not groups or equal / groups < EQUAL:
        return
    if seen.config and seen.config.algorithm.advantage not in GROUP_RELATIVE:
        return
    reward = seen.recent_mean("reward/mean") or 0.0
    steps = [step for step, _ in seen.series("groups/equal")[-RECENT_STEPS:]]
    yield Finding(
        "warning",
        f"{as_percent(equal / groups)} of the groups teach nothing",
        f"In the last {len(steps)} steps so many groups had the same reward for all of their samples; the mean reward there is {reward:.3g}. "
        "They cost time and have no gradient. If most are solved, use harder prompts; if none is, easier ones or partial credit; "
        "dynamic_sampling.enabled asks for others in their place.",
        figures=("groups/equal", "reward/mean"),
        steps=(steps[0], steps[-1]),
        samples={"step": steps[-1], "spread": "none", "set": "step"},
    )


def dead_component(seen: RunData) -> Findings:
    """A part of the reward has had the same mean in all steps, eight or more."""
    for name in sorted({n for line in seen.metrics for n in line if n.startswith("reward/component/")}):
        found = seen.series(name)
        values = [v for _, v in found]
        if len(values) >= MIN_STEPS and max(values) - min(values) < 1e-9:
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


def truncation(seen: RunData) -> Findings:
    """The share of completions that are cut at rollout.max_new_tokens has risen by a tenth or more, to a tenth or more; or is nine tenths."""
    cut = seen.trend("length/truncated")
    if not cut:
        return
    rises = cut.after - cut.before >= CUT_RISE and cut.after >= CUT
    if not rises and cut.after < NEARLY_ALL:
        return
    limit = f" ({seen.config.rollout.max_new_tokens})" if seen.config else ""
    yield Finding(
        "warning",
        "Completions are cut more often" if rises else "Nearly all completions are cut",
        f"{as_percent(cut.after)} of the completions reach rollout.max_new_tokens{limit} at the end, {as_percent(cut.before)} did at the start. "
        "A cut completion is judged without its answer, so length is punished by chance. Allow more tokens, or shape the end with overlong.buffer.",
        figures=("length/truncated", "length/mean"),
        steps=cut.steps,
        samples={"step": cut.steps[1], "finish": "length", "set": "step"},
    )


def mismatch_grows(seen: RunData) -> Findings:
    """The gap of rollout and policy log-probs is three times what it was, and a tenth of the limit that stops a run."""
    gap = seen.trend("mismatch/mean_abs")
    if not gap:
        return
    limit = agreement.step_mismatch_limit(seen.config) if seen.config else agreement.LIMIT_BY_DTYPE["float32"]
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


def clip_holds_much(seen: RunData) -> Findings:
    """Of late the clip holds 30 % of the tokens or more."""
    held = seen.recent_mean("clip_fraction")
    if held is not None and held >= HELD:
        steps = [step for step, _ in seen.series("clip_fraction")[-RECENT_STEPS:]]
        yield Finding(
            "warning",
            f"The clip holds {as_percent(held)} of the tokens",
            f"In the last {len(steps)} steps so many tokens had moved past the clip within their own step, and learned nothing more. "
            "The step is too large for its updates: a smaller policy.lr, fewer updates_per_step or epochs_per_step, or a wider clip.",
            figures=("clip_fraction", "clip_fraction/low", "clip_fraction/high"),
            steps=(steps[0], steps[-1]),
        )


def _accuracy_rises(seen: RunData) -> bool:
    """Whether one that is held out has, beyond its interval."""
    held_out = seen.held_out_accuracies().items()
    return any(lines and _edge(lines[-1], name, "low") > lines[0][name] for name, lines in held_out)


def _edge(line: dict[str, float], name: str, which: str) -> float:
    """Of an accuracy's interval, `low` or `high`; the accuracy itself where it has none."""
    found = finite_value(line, f"{name}/{which}")
    return line[name] if found is None else found


def _between(line: dict[str, float], name: str) -> str:
    low, high = finite_value(line, f"{name}/low"), finite_value(line, f"{name}/high")
    return "" if low is None or high is None else f" (95 % interval {low:.3g} to {high:.3g})"
