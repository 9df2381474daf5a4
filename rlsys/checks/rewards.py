"""Checks the reward functions, those of data sets included."""

import math
from collections.abc import Iterator

from rlsys.config.derived import has_engines
from rlsys.config.plugins import short_name
from rlsys.config.schema import Config, RewardFunction
from rlsys.episodes.environments import environment_name, is_environment
from rlsys.episodes.settings import plays
from rlsys.rewards.check import find_problems


def check_reward(c: Config) -> Iterator[str]:
    own_of_train = [source.reward for source in c.data.train.values()]
    own_of_eval = [source.reward for source in c.eval.datasets.values()]
    if has_engines(c) and not c.reward.functions and not plays(c) and not all([*own_of_train, *own_of_eval]):
        yield "reward.functions is empty; name at least one, such as `reward.functions: {exact: 1.0}`."
    for key, functions in function_sets(c):
        yield from find_problems(key, functions)
    for name, source in c.eval.datasets.items():
        if name in c.data.train and c.data.train[name].reward != source.reward:
            yield (
                f"data.train and eval.datasets both have a set {name}, with different reward functions. "
                f"Give one another name: mine: {{path: {source.path}, …}}."
            )
    yield from check_on_failure(c)
    for key, f in all_functions(c):
        if f.function == "judge" and not f.options.get("url") and f.options.get("model") not in c.models:
            known = ", ".join(c.models) or "none"
            yield (
                f"{key}: `model` is {f.options.get('model')!r}, which is not in `models` ({known}). Add it there, as "
                "`models: {judge: {path: Qwen/Qwen3-8B}}`, or give `url` the address of an endpoint that serves it."
            )
    if c.algorithm.advantage == "gdpo" and any(own_of_train):
        yield (
            "algorithm.advantage gdpo compares the same components everywhere; "
            "no set of data.train may have a reward of its own."
        )
    if c.algorithm.advantage == "gdpo":
        own = {environment_name(play) if is_environment(play) else short_name(play): play for play in plays(c)}
        for name in sorted({short_name(f) for f in c.reward.functions} & ({"turns"} | set(own) if own else set())):
            what = f"what `{own[name]}` returns" if name in own else "the scores of turns"
            yield (
                f"algorithm.advantage gdpo compares components by name; `{name}` of reward.functions has the name of "
                f"{what}. Rename the function."
            )


def check_on_failure(c: Config) -> Iterator[str]:
    on_failure, advantage = c.reward.on_failure, c.algorithm.advantage
    if not is_on_failure(on_failure):
        yield f"reward.on_failure is `{on_failure}`; it may be drop, abort, or score: x."
    elif advantage == "max_rl" and (c.reward.failure_score or 0.0) < 0:
        yield (
            f"algorithm.advantage max_rl takes rewards of 0 or more; reward.on_failure is `{on_failure}`. "
            "Use drop, or score: 0."
        )
    if advantage == "gdpo" and on_failure.startswith("score"):
        yield (
            "algorithm.advantage gdpo compares components, and a failed verdict has none: "
            "reward.on_failure must be drop or abort."
        )


def is_on_failure(text: str) -> bool:
    word, colon, score = (part.strip() for part in text.partition(":"))
    try:
        return math.isfinite(float(score)) and word == "score" if colon else word in ("drop", "abort")
    except ValueError:
        return False


def function_sets(c: Config) -> list[tuple[str, dict[str, RewardFunction]]]:
    """Returns all mappings of reward functions, each with the option it stands in."""
    return [
        ("reward.functions", c.reward.functions),
        *((f"data.train.{name}.reward", source.reward) for name, source in c.data.train.items()),
        *((f"eval.datasets.{name}.reward", source.reward) for name, source in c.eval.datasets.items()),
    ]


def all_functions(c: Config) -> list[tuple[str, RewardFunction]]:
    """Returns every reward function, with the option it stands in."""
    return [(f"{key}.{name}", f) for key, functions in function_sets(c) for name, f in functions.items()]
