"""Finds options that another option keeps from having an effect. That is no error: configurations share a base."""

from collections.abc import Callable

from rlsys.config.derived import has_engines, has_reference_worker
from rlsys.config.loading import defaults, flatten
from rlsys.config.schema import Config
from rlsys.episodes.settings import TOOL_PLAY, plays, sources

Needs = tuple[tuple[str, ...], Callable[[Config], bool], str]

NEEDS: tuple[Needs, ...] = (  # options, or sections that end with a dot; whether they act; what they need
    (("critic.",), lambda c: c.algorithm.advantage == "gae", "algorithm.advantage gae"),
    (
        ("reference.ranks", "reference.place"),
        has_reference_worker,
        "a reference.kl_coef above 0, and a reference that is not the policy without its adapters",
    ),
    (("reference.kl_in", "algorithm.kl"), lambda c: c.reference.kl_coef > 0, "a reference.kl_coef above 0"),
    (("entropy.share",), lambda c: c.entropy.control != "none", "entropy.control clip_cov or kl_cov"),
    (("overlong.penalty",), lambda c: c.overlong.buffer > 0, "an overlong.buffer above 0"),
    (("dynamic_sampling.max_rounds",), lambda c: c.dynamic_sampling.enabled, "dynamic_sampling.enabled true"),
    (("episode.",), lambda c: bool(plays(c)), "episode.play or episode.tools"),
    (
        ("episode.play",),
        lambda c: not plays(c) or any(not source.episode for source in sources(c)),
        "a data set without an episode of its own",
    ),
    (
        ("episode.on_bad_call",),
        lambda c: not plays(c) or TOOL_PLAY in plays(c),
        f"an episode played by `{TOOL_PLAY}`, the built-in function,",
    ),
    (("rollout.", "reward."), has_engines, "an eval.samples above 0"),
    (("eval.",), lambda c: bool(c.eval.datasets), "eval.datasets"),
    (("rollout.kv_cache_mb",), lambda c: c.cluster.device == "cpu", "cluster.device cpu"),
    (("rollout.gpu_memory",), lambda c: c.cluster.device == "gpu", "cluster.device gpu"),
)


def find_unused_options(config: Config) -> list[str]:
    """Returns a sentence for each need that is not met, with the options that were changed and would act then."""
    normal = defaults(config.cluster.device)
    changed = [key for key, value in flatten(config).items() if value != normal[key]]
    sentences = []
    for options, act, need in NEEDS:
        named = [key for key in changed if key in options or f"{key.partition('.')[0]}." in options]
        if named and not act(config):
            sentences.append(f"{', '.join(named)}: without effect; to have one, {need} is needed.")
    return sentences
