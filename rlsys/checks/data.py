"""Checks the data sets to train and to evaluate on."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsys.config.derived import evaluated_samples, is_supervised
from rlsys.config.schema import MIN_TEMPERATURE, Config, DataSource
from rlsys.data.origin import Origin, locate_data
from rlsys.errors import ConfigError

RESERVED_NAMES = (  # of chat templates and of the method that applies them
    *("messages", "conversation", "prompt", "system", "row", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize", "return_tensors", "return_dict", "raise_exception"),
)


def check_data(c: Config) -> Iterator[str]:
    if not c.data.train:
        yield "data.train is empty; name at least one data set, such as `data.train: sums.jsonl`."
    weights = [source.weight for source in c.data.train.values()]
    if any(w is not None for w in weights) and not all(w is not None and 0 < w < math.inf for w in weights):
        yield (
            f"data.train: the weights are {', '.join(map(str, weights))} (of {', '.join(c.data.train)}); "
            "give every set a weight above 0, or none of them."
        )
    yield from missing_template("data", c.data.template)
    yield from check_template_options("data", c.data.template_options)
    for name, source in c.data.train.items():
        yield from check_source("data.train", name, source)
        yield from check_limit(c, name, source)


def check_limit(c: Config, name: str, source: DataSource) -> Iterator[str]:
    """Refuses a training set's own limit of completions, if it is higher than what memory and packs are planned for."""
    limit, longest = source.max_new_tokens, c.rollout.max_new_tokens
    if limit is not None and not 0 < limit <= longest:
        yield (
            f"data.train.{name}.max_new_tokens is {limit}; it must be greater than 0 and at most "
            f"rollout.max_new_tokens ({longest}), or null."
        )
    elif limit and limit < c.overlong.buffer:
        yield f"data.train.{name}.max_new_tokens is {limit}, less than overlong.buffer ({c.overlong.buffer}). Use a shorter buffer, or more tokens."


def check_eval(c: Config) -> Iterator[str]:
    least = 0 if is_supervised(c) else 1
    yield from check_sampling("eval", c.eval.samples, c.eval.temperature, least)
    yield from check_truncated_sampling(c)
    for name, source in c.eval.datasets.items():
        yield from check_source("eval.datasets", name, source)
        if source.weight is not None:
            yield f"eval.datasets.{name} has a weight; every held-out prompt is asked. Leave it out."
        if source.max_new_tokens is not None and source.max_new_tokens < 1:
            yield f"eval.datasets.{name}.max_new_tokens is {source.max_new_tokens}; it must be greater than 0, or null."
        if source.samples is not None or source.temperature is not None:
            temperature = c.eval.temperature if source.temperature is None else source.temperature
            yield from check_sampling(f"eval.datasets.{name}", evaluated_samples(c, source), temperature, least)


def check_sampling(key: str, samples: int, temperature: float, least: int) -> Iterator[str]:
    """`least`: with 0 samples, as supervised training may have them, only losses are measured."""
    if samples < least:
        yield f"{key}.samples is {samples}; it must be a whole number {'of 0 or more' if least == 0 else 'greater than 0'}."
    elif not 0 <= temperature < math.inf:
        yield f"{key}.temperature is {temperature}; it must be a number of 0 or more."
    elif 0 < temperature < MIN_TEMPERATURE:
        yield (
            f"{key}.temperature is {temperature:g}; vLLM would take {MIN_TEMPERATURE:g} in its place. "
            f"Use 0, which is greedy, or {MIN_TEMPERATURE:g} or more."
        )
    elif samples > 1 and temperature == 0:
        yield (
            f"{key}.samples is {samples}, and temperature 0 gives the same completion {samples} times. "
            "Use a temperature such as 1.0."
        )


def check_truncated_sampling(c: Config) -> Iterator[str]:
    top_p, top_k = c.eval.top_p, c.eval.top_k
    if not 0 < top_p <= 1:
        yield f"eval.top_p is {top_p:g}; it is a probability above 0, at most 1. 1 samples from all tokens."
    if top_k < 1 and top_k != -1:
        yield f"eval.top_k is {top_k}; it is a number of tokens, or -1 for all."
    temperatures = [source.temperature for source in c.eval.datasets.values()]
    sampled = any(c.eval.temperature if t is None else t for t in [None, *temperatures])
    if (top_p != 1 or top_k != -1) and not sampled:
        yield (
            f"eval.top_p={top_p:g}, eval.top_k={top_k}: at temperature 0 the likeliest token is taken anyway. "
            "Set eval.temperature, such as 0.6, or leave them out."
        )


def check_source(key: str, name: str, source: DataSource) -> Iterator[str]:
    """Refuses a data set that does not exist or cannot be read, and a template that does not exist."""
    try:
        locate_data(Origin(source.path, source.split, source.subset, options=json.dumps(source.options)))
    except ConfigError as error:
        yield from (f"{key}: {problem}" for problem in error.problems)
    yield from missing_template(f"{key}.{name}", source.template or "")
    yield from check_template_options(f"{key}.{name}", source.template_options or {})


def check_template_options(key: str, options: dict[str, Any]) -> Iterator[str]:
    if reserved := sorted(set(options) & set(RESERVED_NAMES)):
        own = reserved[0] == "continue_final_message"
        way_out = f"Leave it out, or set {key}.continue_final_message" if own else "Leave it out"
        yield f"{key}.template_options has `{reserved[0]}`, which rlsys sets itself. {way_out}."


def missing_template(key: str, template: str) -> Iterator[str]:
    if template and not Path(template).expanduser().is_file():
        yield f"{key}.template: the Jinja file {template} does not exist (from {Path.cwd()})."
