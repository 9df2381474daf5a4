"""What does not fit together among reward functions and data sets. Part of `checks`."""

import math
from pathlib import Path

from rlsys.config.schema import Config, ConfigError, RewardFunction
from rlsys.data.origin import Origin, locate_data
from rlsys.rewards.check import find_problems as problems_of_functions

COLDEST = 0.01  # vLLM samples at no temperature between this one and 0


def check_rewards(c: Config) -> list[str]:
    problems = []
    of_train = [(f"data.train.{name}.reward", source.reward) for name, source in c.data.train.items()]
    of_eval = [(f"eval.datasets.{name}.reward", source.reward) for name, source in c.eval.datasets.items()]
    own = [functions for _, functions in (*of_train, *of_eval)]
    if not c.reward.functions and not all(own):
        problems.append("reward.functions is empty; name at least one, such as `reward.functions: {exact: 1.0}`.")
    for key, functions in [("reward.functions", c.reward.functions), *of_train, *of_eval]:
        problems += problems_of_functions(key, functions)
    for name, source in c.eval.datasets.items():
        if name in c.data.train and c.data.train[name].reward != source.reward:
            problems.append(
                f"data.train and eval.datasets both have a set {name}, with different reward functions. Give one another "
                f"name: mine: {{path: {source.path}, …}}."
            )
    if not is_on_failure(c.reward.on_failure):
        problems.append(f"reward.on_failure is `{c.reward.on_failure}`; it may be drop, abort, or score: x.")
    elif c.algorithm.advantage == "max_rl" and (c.reward.failure_score or 0.0) < 0:
        problems.append(
            f"algorithm.advantage max_rl takes rewards of 0 or more; reward.on_failure is `{c.reward.on_failure}`. Use drop, or score: 0."
        )
    if not 0 <= c.reward.max_failure_share <= 1:
        problems.append(f"reward.max_failure_share is {c.reward.max_failure_share}; it is a share between 0 and 1.")
    if c.algorithm.advantage == "gdpo" and any(functions for _, functions in of_train):
        problems.append(
            "algorithm.advantage gdpo compares the same components everywhere; no set of data.train may have a reward of its own."
        )
    if c.algorithm.advantage == "gdpo" and c.reward.on_failure.startswith("score"):
        problems.append(
            "algorithm.advantage gdpo compares components, and a failed verdict has none: reward.on_failure must be drop or abort."
        )
    return problems


def functions_of(c: Config) -> list[tuple[str, RewardFunction]]:
    """Every reward function, by where it stands in the configuration."""
    sets = [("reward.functions", c.reward.functions)]
    sets += [(f"data.train.{name}.reward", source.reward) for name, source in c.data.train.items()]
    sets += [(f"eval.datasets.{name}.reward", source.reward) for name, source in c.eval.datasets.items()]
    return [(f"{key}.{name}", f) for key, functions in sets for name, f in functions.items()]


def is_on_failure(text: str) -> bool:
    word, colon, score = (part.strip() for part in text.partition(":"))
    try:
        return math.isfinite(float(score)) and word == "score" if colon else word in ("drop", "abort")
    except ValueError:
        return False


def check_data_sets(c: Config) -> list[str]:
    problems = []
    if not c.data.train:
        problems.append("data.train is empty; name at least one data set, such as `data.train: sums.jsonl`.")
    weights = [source.weight for source in c.data.train.values()]
    if any(w is not None for w in weights) and not all(w is not None and 0 < w < math.inf for w in weights):
        problems.append(
            f"data.train: the weights are {', '.join(map(str, weights))} (of {', '.join(c.data.train)}); "
            "give every set a weight above 0, or none of them."
        )
    for name, held_out in c.eval.datasets.items():
        if held_out.weight is not None:
            problems.append(f"eval.datasets.{name} has a weight; every held-out prompt is asked. Leave it out.")
        if held_out.samples is not None or held_out.temperature is not None:
            samples = c.eval.samples if held_out.samples is None else held_out.samples
            temperature = c.eval.temperature if held_out.temperature is None else held_out.temperature
            problems += check_sampling(f"eval.datasets.{name}", samples, temperature)
    problems += check_sampling("eval", c.eval.samples, c.eval.temperature)
    return problems + check_origins(c)


def check_sampling(key: str, samples: int, temperature: float) -> list[str]:
    if samples < 1:
        return [f"{key}.samples is {samples}; it must be a whole number greater than 0."]
    if not 0 <= temperature < math.inf:
        return [f"{key}.temperature is {temperature}; it must be a number of 0 or more."]
    if 0 < temperature < COLDEST:
        return [
            f"{key}.temperature is {temperature:g}; vLLM would take {COLDEST:g} in its place. Use 0, which is greedy, or {COLDEST:g} or more."
        ]
    if samples > 1 and temperature == 0:
        return [
            f"{key}.samples is {samples}, and temperature 0 gives the same completion {samples} times. Use a temperature such as 1.0."
        ]
    return []


def check_origins(c: Config) -> list[str]:
    """Data sets that are not there, or are of no kind that can be read; templates that are not there."""
    problems = []
    of_train = [(f"data.train.{name}", "data.train", source) for name, source in c.data.train.items()]
    of_eval = [(f"eval.datasets.{name}", "eval.datasets", source) for name, source in c.eval.datasets.items()]
    templates = [("data", c.data.template)]
    for name, key, source in (*of_train, *of_eval):
        templates.append((name, source.template or ""))
        try:
            locate_data(Origin(source.path, source.split, source.subset))
        except ConfigError as error:
            problems += [f"{key}: {problem}" for problem in error.problems]
    for key, template in templates:
        if template and not Path(template).expanduser().is_file():
            problems.append(f"{key}.template: the Jinja file {template} does not exist (from {Path.cwd()}).")
    return problems
