"""Which curves the page draws, and what it says of each."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Chart:
    """`names` are those of metrics.jsonl; a * stands for anything."""

    title: str
    names: tuple[str, ...]
    caption: str
    unit: str = ""  # share: shown in per cent
    scale: str = ""  # zero: from 0 on; log
    optional: bool = False  # whether nobody misses it where a run does not have it
    compares_groups: bool = False  # whether it is true only of methods that compare the samples of a group


SECTIONS: dict[str, tuple[Chart, ...]] = {
    "Learning": (
        Chart("Reward", ("reward/mean",), "Mean score of the training samples, before length penalty and KL."),
        Chart(
            "Held-out accuracy",
            ("eval/*/accuracy",),
            "Mean score on prompts that are not trained on; the band is the 95 % bootstrap interval over prompts.",
            "share",
        ),
        Chart(
            "Best of k, and votes",
            ("eval/*/pass@*", "eval/*/maj@*"),
            "Held-out prompts that one of k samples solves (pass@k), and whose most frequent answer of k is right (maj@k).",
            "share",
            optional=True,
        ),
        Chart(
            "Reward components",
            ("reward/component/*",),
            "Mean of each reward function or named part of it, before its weight.",
            optional=True,
        ),
        Chart("Spread of the reward", ("reward/std",), "Standard deviation of the scores over the samples of a step.", scale="zero"),
        Chart(
            "Largest advantage",
            ("advantage/max_abs",),
            "The sample that pushes hardest: one far above the others decides the step alone.",
            scale="zero",
            optional=True,
        ),
    ),
    "Policy": (
        Chart("Entropy", ("entropy",), "Of the policy's next-token distribution, per token: how much it still tries.", "nats", "zero"),
        Chart("KL to the reference", ("kl",), "Mean estimate per token, before its coefficient: how far the policy is from where it began.", "nats"),
        Chart("KL coefficient", ("kl_coef",), "Weight of the KL term in this step.", optional=True),
        Chart(
            "Clip",
            ("clip_fraction/low", "clip_fraction/high"),
            "Share of tokens that the clip holds, at each side: they have moved far within their own step.",
            "share",
            "zero",
        ),
        Chart("Gradient norm", ("grad_norm",), "Before clipping, mean over the updates of a step.", scale="zero"),
        Chart("Loss", ("loss",), "What the updates minimise. It need not fall: its zero moves with every step."),
        Chart("Learning rate", ("lr",), "Of the last update of a step.", scale="zero"),
        Chart(
            "Skipped updates",
            ("update/skipped",),
            "Updates left out because a loss or gradient was not finite.",
            "updates",
            "zero",
            optional=True,
        ),
    ),
    "Groups and completions": (
        Chart("Length", ("length/mean", "length/max"), "Tokens of a completion, its end included.", "tokens", "zero"),
        Chart("Cut completions", ("length/truncated",), "Share of completions that reach rollout.max_new_tokens.", "share", "zero"),
        Chart(
            "Groups that teach nothing",
            ("groups/equal", "groups/alone", "groups/lost", "groups/dropped"),
            "Groups with equal rewards, with one sample left, with none left; and those that made room for others.",
            "groups",
            "zero",
            compares_groups=True,
        ),
        Chart("Failed verdicts", ("reward/failed", "failure/*"), "Samples whose reward function failed, by reason.", "samples", "zero"),
        Chart("Length penalty", ("reward/overlong",), "Mean that completions lost for coming near the cut.", optional=True),
    ),
    "Engines and speed": (
        Chart(
            "Mismatch",
            ("mismatch/mean_abs", "mismatch/max_abs"),
            "Gap of the engine's and the policy's log-probs of the same tokens, mean and largest. It should be rounding.",
            "nats",
            "log",
        ),
        Chart("Tokens per second", ("tokens_per_second",), "Completion tokens over the whole step.", "tokens/s", "zero"),
        Chart("Seconds per step", ("time/step",), "From the begin of a step to its end, without evaluation.", "s", "zero"),
        Chart("Lag", ("lag", "lag/mean"), "Updates between the weights a token was sampled from and those it trains.", "updates", "zero", optional=True),
        Chart(
            "Correction",
            ("correction/mean", "correction/effective_share", "correction/masked"),
            "Weights of samples of another policy: their mean, the effective share of tokens, and the share that weighs nothing.",
            scale="zero",
            optional=True,
        ),
    ),
    "Critic": (
        Chart("Critic's grasp", ("critic/explained_variance",), "1 where the critic knows what comes, 0 where it knows nothing.", optional=True),
        Chart("Critic's loss", ("critic/loss",), "Mean over the updates of a step.", scale="zero", optional=True),
        Chart("Critic's values", ("critic/value_mean",), "Mean value over the tokens of the batch.", optional=True),
    ),
}  # fmt: skip
OTHER_SECTION = "Everything else"
DRAWN_ELSEWHERE = ("time/*", "step", "tokens", "sync/version", "clip_fraction")
PHASES = ("rollout", "reward", "score", "update", "sync")


def choose_charts(lines: list[dict[str, float]], compared: bool = True) -> list[dict[str, Any]]:
    """What is to be drawn of these figures, in the page's order; a chart without figures says so, unless it is optional.

    An optional chart of nothing but zeros is not worth its place; its figures are among the others. So are those of a chart that is
    not true of runs whose samples are not `compared` within their group.
    """
    left = dict.fromkeys(name for line in lines for name in line)
    said = {name for line in lines for name, value in line.items() if value}
    found: list[dict[str, Any]] = []
    for section, members in SECTIONS.items():
        for chart in members:
            names = [name for pattern in chart.names for name in left if fnmatchcase(name, pattern)]
            names = [n for n in names if not n.endswith(("/low", "/high")) or n.startswith("clip_fraction")]
            if (said.intersection(names) or not chart.optional) and (compared or not chart.compares_groups):
                found.append(chart_data(chart, section, names, left))
    taken = {
        name for chart in found for name in (*chart["names"], *(b for band in chart["bands"].values() for b in band))
    }
    rest = [n for n in left if n not in taken and not any(fnmatchcase(n, pattern) for pattern in DRAWN_ELSEWHERE)]
    return found + [chart_data(Chart(name, (name,), ""), OTHER_SECTION, [name], left) for name in sorted(rest)]


def chart_data(chart: Chart, section: str, names: list[str], known: Iterable[str]) -> dict[str, Any]:
    return {
        "section": section,
        "title": chart.title,
        "sentence": chart.caption,
        "unit": chart.unit,
        "scale": chart.scale,
        "names": list(dict.fromkeys(names)),
        "bands": {n: band for n in names if (band := interval_names(n)) and set(band) <= set(known)},
    }


def interval_names(name: str) -> list[str]:
    """The interval of a held-out figure."""
    return [f"{name}/low", f"{name}/high"] if name.startswith("eval/") else []
