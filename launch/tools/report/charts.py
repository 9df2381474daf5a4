"""The charts of the page: which metrics each draws, and how it is explained."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Chart:
    """Chart("Length", ("length/mean", "length/max"), "Tokens of a completion, its end included.", "tokens", "zero")"""

    title: str
    names: tuple[str, ...]  # of metrics.jsonl; a * stands for any text
    caption: str
    unit: str = ""  # "share" is shown in percent
    scale: str = ""  # "zero" starts at 0; "log"
    optional: bool = False  # left out if the run does not have it
    compares_groups: bool = False  # true only for methods that compare the samples of a group


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
            "Held-out prompts that one of k samples solves (pass@k), or whose most frequent answer of k is right "
            "(maj@k).",
            "share",
            optional=True,
        ),
        Chart(
            "Reward components",
            ("reward/component/*",),
            "Mean of each reward function or named part of it, before its weight.",
            optional=True,
        ),
        Chart(
            "Spread of the reward",
            ("reward/std",),
            "Standard deviation of the scores over the samples of a step.",
            scale="zero",
        ),
        Chart(
            "Largest advantage",
            ("advantage/max_abs",),
            "The strongest push of one sample: one far above the others decides the step alone.",
            scale="zero",
            optional=True,
        ),
    ),
    "Policy": (
        Chart(
            "Entropy",
            ("entropy",),
            "Per token, of the policy that sampled: how much it still explores.",
            "nats",
            "zero",
        ),
        Chart(
            "KL to the reference",
            ("kl",),
            "Mean estimate per token, before its coefficient: the distance of the policy from its start.",
            "nats",
        ),
        Chart("KL coefficient", ("kl_coef",), "Weight of the KL term in this step.", optional=True),
        Chart(
            "Clip",
            ("clip_fraction/low", "clip_fraction/high"),
            "Share of clipped tokens at each side: their ratio has left the clip range within the step.",
            "share",
            "zero",
        ),
        Chart("Gradient norm", ("grad_norm",), "Before clipping, mean over the updates of a step.", scale="zero"),
        Chart("Loss", ("loss",), "What the updates minimize. It need not fall: its zero moves with every step."),
        Chart("Learning rate", ("lr",), "In the last update of a step.", scale="zero"),
        Chart(
            "Skipped updates",
            ("update/skipped",),
            "Updates skipped because a loss or gradient was not finite.",
            "updates",
            "zero",
            optional=True,
        ),
    ),
    "Groups and completions": (
        Chart("Length", ("length/mean", "length/max"), "Tokens of a completion, its end included.", "tokens", "zero"),
        Chart(
            "Cut completions",
            ("length/truncated",),
            "Share of completions that reach rollout.max_new_tokens, and of episodes that reach a limit.",
            "share",
            "zero",
        ),
        Chart(
            "Groups that teach nothing",
            ("groups/equal", "groups/one_sample", "groups/all_failed", "groups/dropped"),
            "Groups with equal rewards, with one valid sample, with none; and groups that were replaced by others.",
            "groups",
            "zero",
            compares_groups=True,
        ),
        Chart(
            "Failed verdicts",
            ("reward/failed", "failure/*"),
            "Samples whose reward function failed, by reason.",
            "samples",
            "zero",
        ),
        Chart(
            "Length penalty",
            ("reward/overlong",),
            "Mean penalty of completions that come close to the token limit.",
            optional=True,
        ),
    ),
    "Episodes": (
        Chart(
            "Turns",
            ("episode/turns", "eval/*/episode/turns"),
            "Turns of the model in an episode, mean.",
            "turns",
            "zero",
            optional=True,
        ),
        Chart(
            "How episodes end",
            ("episode/finish/*",),
            "By themselves (stop), with a last turn that is cut (length), or at a limit: share of episodes.",
            "share",
            "zero",
            optional=True,
        ),
        Chart(
            "How held-out episodes end",
            ("eval/*/episode/finish/*",),
            "The same for episodes on held-out prompts that have a verdict.",
            "share",
            "zero",
            optional=True,
        ),
        Chart(
            "Turns that were cut",
            ("episode/turns_cut", "eval/*/episode/turns_cut"),
            "Of the turns after which an episode went on: the share that reached rollout.max_new_tokens.",
            "share",
            "zero",
            optional=True,
        ),
        Chart(
            "Tokens of the environment",
            ("episode/observed_tokens", "eval/*/episode/observed_tokens"),
            "What the environment says in an episode, with what the chat template adds, mean.",
            "tokens",
            "zero",
            optional=True,
        ),
        Chart(
            "Tool calls",
            ("episode/tool_calls", "episode/tool_calls/*", "eval/*/episode/tool_calls*"),
            "Calls in an episode, mean: all of them, and those of each tool that can be read.",
            "calls",
            "zero",
            optional=True,
        ),
        Chart(
            "Unreadable tool calls",
            ("episode/unreadable_calls", "eval/*/episode/unreadable_calls"),
            "Share of the calls that could not be read.",
            "share",
            "zero",
            optional=True,
        ),
    ),
    "Engines and speed": (
        Chart(
            "Mismatch",
            ("mismatch/mean_abs", "mismatch/max_abs"),
            "Gap between the engine's and the policy's log-probs of the same tokens, mean and largest. It should be "
            "rounding only.",
            "nats",
            "log",
        ),
        Chart(
            "Tokens per second", ("tokens_per_second",), "Completion tokens over the whole step.", "tokens/s", "zero"
        ),
        Chart(
            "Seconds per step", ("time/step",), "From the start of a step to its end, without evaluation.", "s", "zero"
        ),
        Chart(
            "Lag",
            ("lag", "lag/mean"),
            "Updates between the weights that sampled a token and the weights it trains.",
            "updates",
            "zero",
            optional=True,
        ),
        Chart(
            "Correction",
            ("correction/mean", "correction/effective_share", "correction/masked"),
            "Importance weights for off-policy samples: their mean, the effective share of tokens, and the share with "
            "weight 0.",
            scale="zero",
            optional=True,
        ),
    ),
    "Critic": (
        Chart(
            "Explained variance of the critic",
            ("critic/explained_variance",),
            "1 if the critic predicts returns perfectly, 0 if it knows nothing.",
            optional=True,
        ),
        Chart("Critic loss", ("critic/loss",), "Mean over the updates of a step.", scale="zero", optional=True),
        Chart("Critic values", ("critic/value_mean",), "Mean value over the tokens of the batch.", optional=True),
    ),
}
OTHER_SECTION = "Everything else"
DRAWN_ELSEWHERE = ("time/*", "step", "tokens", "sync/version", "clip_fraction")
PHASES = ("rollout", "reward", "score", "update", "sync")


def choose_charts(lines: list[dict[str, float]], compares_groups: bool = True) -> list[dict[str, Any]]:
    """Returns the charts in the page's order. A chart without metrics is shown empty, unless it is optional.

    Metrics of an optional chart that are all zero go to the other section. So do those of a chart that holds only for
    methods that compare the samples of a group, if not all methods do.
    """
    available = dict.fromkeys(name for line in lines for name in line)
    nonzero = {name for line in lines for name, value in line.items() if value}
    chosen: list[dict[str, Any]] = []
    for section, members in SECTIONS.items():
        for chart in members:
            names = [name for pattern in chart.names for name in available if fnmatchcase(name, pattern)]
            names = [n for n in names if not n.endswith(("/low", "/high")) or n.startswith("clip_fraction")]
            if (nonzero.intersection(names) or not chart.optional) and (compares_groups or not chart.compares_groups):
                chosen.append(chart_data(chart, section, names, available))
    drawn = {
        name for chart in chosen for name in (*chart["names"], *(b for band in chart["bands"].values() for b in band))
    }
    others = [n for n in available if n not in drawn and not any(fnmatchcase(n, p) for p in DRAWN_ELSEWHERE)]
    return chosen + [chart_data(Chart(name, (name,), ""), OTHER_SECTION, [name], available) for name in sorted(others)]


def chart_data(chart: Chart, section: str, names: list[str], known: Iterable[str]) -> dict[str, Any]:
    return {
        "section": section,
        "title": chart.title,
        "caption": chart.caption,
        "unit": chart.unit,
        "scale": chart.scale,
        "names": list(dict.fromkeys(names)),
        "bands": {n: band for n in names if (band := interval_names(n)) and set(band) <= set(known)},
    }


def interval_names(name: str) -> list[str]:
    """Returns the metrics that hold the interval of a held-out metric."""
    return [f"{name}/low", f"{name}/high"] if name.startswith("eval/") else []
