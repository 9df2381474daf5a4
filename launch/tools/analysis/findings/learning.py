"""Checks for trouble with learning: rewards, accuracies, and the metrics of updates."""

from launch.tools.analysis.findings.run_data import (
    MIN_RISE,
    MIN_STEPS,
    RECENT_STEPS,
    Finding,
    Findings,
    RunData,
    Trend,
    as_percent,
    finite_value,
)
from rlsys import agreement
from rlsys.config.methods import GROUP_RELATIVE

EQUAL_GROUPS = 0.5  # share of groups with equal rewards
MIN_TRUNCATION_RISE, MIN_TRUNCATION = 0.1, 0.1  # share of completions cut at the limit: its rise, and its end
NEARLY_ALL = 0.9  # share of completions cut at the limit, even without a rise
COLLAPSED = 0.1  # entropy at the end, relative to the start
EXPLODED = {"kl": 0.5, "grad_norm": 5.0}  # the least values that count as an explosion; kl in nats per token
GROWTH = 5.0  # and the least growth: a straight line from 0 grows 7 times
SOLVED = 0.95  # mean reward above which little is left to learn, if the maximum is 1
MISMATCH_GROWTH, MISMATCH_SHARE = 3.0, 0.1  # end relative to start; and relative to the limit that stops a run
CLIPPED = 0.3  # share of tokens outside the clip range


def only_training_improves(run: RunData) -> Findings:
    """The training reward rises; a held-out accuracy rises by less than a quarter of that, and its interval still
    includes its first value.
    """
    reward = run.trend("reward/mean")
    if not reward or not reward.rises:
        return
    for name, lines in run.held_out_accuracies().items():
        if len(lines) < 2:
            continue
        first, last = lines[0], lines[-1]
        dataset = name.removeprefix("eval/").removesuffix("/accuracy")
        rise, room = last[name] - first[name], (reward.after - reward.before) / 4
        if rise < room and _interval_edge(last, name, "low") <= first[name]:
            yield Finding(
                "warning",
                f"The reward rises, accuracy on {dataset} does not",
                f"The mean reward went from {reward.before:.3g} to {reward.after:.3g}, the held-out accuracy from "
                f"{first[name]:.3g} to {last[name]:.3g}{_interval_text(last, name)}. What is learned does not "
                "generalize. The reward may be satisfied without solving the task (read the completions with the "
                "highest rewards), or there are too few training prompts.",
                figures=("reward/mean", name),
                steps=(int(first["step"]), int(last["step"])),
                samples={"step": reward.steps[1], "sort": "reward", "set": "step"},
            )


def accuracy_drop(run: RunData) -> Findings:
    """A held-out accuracy was better before than it is now, by more than 0.05 and more than its interval."""
    for name, lines in run.held_out_accuracies().items():
        dataset = name.removeprefix("eval/").removesuffix("/accuracy")
        best = max(lines, key=lambda line: line[name], default=None)
        if best is None or lines[-1] is best:
            continue
        last = lines[-1]
        if best[name] - last[name] > MIN_RISE and _interval_edge(last, name, "high") < best[name]:
            yield Finding(
                "warning",
                f"Accuracy on {dataset} was better at step {best['step']:.0f}",
                f"Held-out accuracy was {best[name]:.3g} then, and is {last[name]:.3g}{_interval_text(last, name)} at "
                f"step {last['step']:.0f}. checkpoint.keep_best: {name} keeps the best one.",
                figures=(name,),
                steps=(int(best["step"]), int(last["step"])),
            )


def nothing_learned(run: RunData) -> Findings:
    """After 20 steps or more the reward has not risen by two standard errors, is not near 1, and no held-out accuracy
    has risen.
    """
    reward = run.trend("reward/mean")
    if not reward or len(run.series("reward/mean")) < 20 or reward.after - reward.before > 2 * reward.noise:
        return
    if min(reward.before, reward.after) >= SOLVED and max(reward.before, reward.after) <= 1:
        return
    if run.config and run.config.dynamic_sampling.enabled:
        return  # its batches hold only groups with some right and some wrong answers, whatever is learned
    if _any_accuracy_rises(run):
        return
    falls = reward.before - reward.after > max(MIN_RISE, 2 * reward.noise)
    shuffled = run.config is not None and run.config.reward.shuffle
    yield Finding(
        "warning",
        "The reward falls" if falls else "The reward does not rise",
        f"Its mean was {reward.before:.3g} in the first quarter of the steps, and is {reward.after:.3g} in the last "
        f"(standard error {reward.noise:.2g}). "
        + (
            "reward.shuffle is on, so nothing can be learned."
            if shuffled
            else "Check whether rewards differ within groups, whether policy.lr is too small or too large, and whether "
            "any sample has a right answer."
        ),
        figures=("reward/mean", "groups/equal", "grad_norm"),
        steps=reward.steps,
        samples={"step": reward.steps[1], "set": "step"},
    )


def entropy_collapse(run: RunData) -> Findings:
    """Entropy has fallen to a tenth of its value at the start, or less."""
    entropy = run.trend("entropy")
    if not entropy or entropy.before <= 0 or entropy.after > COLLAPSED * entropy.before:
        return
    yield Finding(
        "warning",
        "Entropy has collapsed",
        f"It fell from {entropy.before:.3g} to {entropy.after:.3g} per token. The policy hardly explores any more. "
        "That is harmless at the end of a solved task. Otherwise try a higher algorithm.clip_high, entropy.control, a "
        "KL term, or a smaller policy.lr.",
        figures=("entropy", "reward/mean"),
        steps=entropy.steps,
        samples={"step": entropy.steps[1], "set": "step"},
    )


def explosion(run: RunData) -> Findings:
    """KL (0.5 or more) or the gradient norm (5 or more) has grown five times, and neither the reward nor a held-out
    accuracy rises.
    """
    reward = run.trend("reward/mean")
    if (reward and reward.rises) or _any_accuracy_rises(run):
        return
    trends = {name: trend for name in EXPLODED if (trend := run.trend(name))}
    grown = {n: t for n, t in trends.items() if t.after >= max(EXPLODED[n], GROWTH * t.before)}
    if not grown:
        return
    steps = next(iter(grown.values())).steps
    yield Finding(
        "warning",
        f"{' and '.join(grown)} explode{'s' * (len(grown) == 1)}",
        ", ".join(
            f"{name} was {t.before:.3g} at the start and is {t.after:.3g} at the end" for name, t in grown.items()
        )
        + ". The policy moves far from its start, and the reward does not rise with it. Updates may be too large, or "
        "tiny reward differences are scaled up to full advantages. A smaller policy.lr, policy.warmup_updates, or "
        "algorithm.std=none may help. Earlier checkpoints are still good.",
        figures=(*grown, "entropy", "reward/mean"),
        steps=steps,
        samples={"step": steps[1], "set": "step"},
    )


def no_spread(run: RunData) -> Findings:
    """In recent steps half of the groups or more have equal rewards and teach nothing."""
    equal, groups = run.recent_mean("groups/equal"), run.config.trainer.prompts_per_step if run.config else 0
    if equal is None or not groups or equal / groups < EQUAL_GROUPS:
        return
    if run.config and run.config.algorithm.advantage not in GROUP_RELATIVE:
        return
    reward = run.recent_mean("reward/mean") or 0.0
    steps = [step for step, _ in run.series("groups/equal")[-RECENT_STEPS:]]
    yield Finding(
        "warning",
        f"{as_percent(equal / groups)} of the groups teach nothing",
        f"In the last {len(steps)} steps all samples of these groups had the same reward; the mean reward was "
        f"{reward:.3g}. They cost time and give no gradient. If most are solved, use harder prompts; if none is, "
        "easier ones or partial credit. dynamic_sampling.enabled replaces such groups.",
        figures=("groups/equal", "reward/mean"),
        steps=(steps[0], steps[-1]),
        samples={"step": steps[-1], "spread": "none", "set": "step"},
    )


def dead_component(run: RunData) -> Findings:
    """A component of the reward has had the same mean in all steps, eight or more."""
    for name in sorted({n for line in run.metrics for n in line if n.startswith("reward/component/")}):
        series = run.series(name)
        values = [v for _, v in series]
        if len(values) >= MIN_STEPS and max(values) - min(values) < 1e-9:
            component = name.removeprefix("reward/component/")
            yield Finding(
                "warning",
                f"Reward component {component} is constant",
                f"Its mean was {values[0]:.3g} in each of {len(values)} steps, so it does not distinguish completions. "
                "Its pattern may never match, or its field may be missing in the data. `rlsys rescore` tries another "
                "version on the saved samples.",
                figures=(name, "reward/mean"),
                steps=(series[0][0], series[-1][0]),
                samples={"step": series[-1][0], "set": "step"},
            )


def truncation(run: RunData) -> Findings:
    """The share of completions cut at rollout.max_new_tokens has risen by a tenth or more, to a tenth or more; or it is
    nine tenths.
    """
    truncated = run.trend("length/truncated")
    if not truncated or run.has_episodes or not is_cut_often(truncated):
        return
    rises = truncation_rises(truncated)
    limit = f" ({run.config.rollout.max_new_tokens})" if run.config else ""
    yield Finding(
        "warning",
        "Completions are cut more often" if rises else "Nearly all completions are cut",
        f"{as_percent(truncated.after)} of the completions reach rollout.max_new_tokens{limit} at the end, "
        f"{as_percent(truncated.before)} did at the start. A cut completion is judged without its answer, so length is "
        "punished by chance. Allow more tokens, or use overlong.buffer.",
        figures=("length/truncated", "length/mean"),
        steps=truncated.steps,
        samples={"step": truncated.steps[1], "finish": "length", "set": "step"},
    )


def is_cut_often(truncated: Trend) -> bool:
    """True if completions are cut more often than at the start, or nearly all of them."""
    return truncation_rises(truncated) or truncated.after >= NEARLY_ALL


def truncation_rises(truncated: Trend) -> bool:
    return truncated.after - truncated.before >= MIN_TRUNCATION_RISE and truncated.after >= MIN_TRUNCATION


def mismatch_grows(run: RunData) -> Findings:
    """The gap between rollout and policy log-probs has grown three times, to a tenth of the limit that stops a run."""
    gap = run.trend("mismatch/mean_abs")
    if not gap:
        return
    limit = agreement.step_mismatch_limit(run.config) if run.config else agreement.LIMIT_BY_DTYPE["float32"]
    if gap.after < MISMATCH_SHARE * limit or gap.after < MISMATCH_GROWTH * gap.before:
        return
    yield Finding(
        "warning",
        "Engines and policy drift apart",
        f"The mean gap of their log-probs was {gap.before:.2g} and is {gap.after:.2g} per token; at {limit:.2g} the "
        "run stops. Samples come more and more from another policy than the one that learns. `rlsys doctor CONFIG` "
        "finds the cause; correction.method reweights samples.",
        figures=("mismatch/mean_abs", "mismatch/max_abs"),
        steps=gap.steps,
        samples={"step": gap.steps[1], "color": "gap", "set": "step"},
    )


def heavy_clipping(run: RunData) -> Findings:
    """In recent steps 30 % of the tokens or more are clipped."""
    clipped = run.recent_mean("clip_fraction")
    if clipped is not None and clipped >= CLIPPED:
        steps = [step for step, _ in run.series("clip_fraction")[-RECENT_STEPS:]]
        yield Finding(
            "warning",
            f"{as_percent(clipped)} of the tokens are clipped",
            f"In the last {len(steps)} steps the ratio of these tokens left the clip range within their step, so they "
            "had no gradient any more. Use a smaller policy.lr, fewer updates_per_step or epochs_per_step, or a wider "
            "clip.",
            figures=("clip_fraction", "clip_fraction/low", "clip_fraction/high"),
            steps=(steps[0], steps[-1]),
        )


def _any_accuracy_rises(run: RunData) -> bool:
    """True if a held-out accuracy has risen beyond its interval."""
    held_out = run.held_out_accuracies().items()
    return any(lines and _interval_edge(lines[-1], name, "low") > lines[0][name] for name, lines in held_out)


def _interval_edge(line: dict[str, float], name: str, which: str) -> float:
    """Returns the `low` or `high` edge of an accuracy's interval; the accuracy itself if it has none."""
    edge = finite_value(line, f"{name}/{which}")
    return line[name] if edge is None else edge


def _interval_text(line: dict[str, float], name: str) -> str:
    low, high = finite_value(line, f"{name}/low"), finite_value(line, f"{name}/high")
    return "" if low is None or high is None else f" (95 % interval {low:.3g} to {high:.3g})"
