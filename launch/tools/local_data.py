"""What a configuration's data says before a run, where its files and the model's tokenizer are on this machine.

Downloads nothing.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from launch import datasets
from launch.datasets import named_sources
from rlsys.config.schema import Config, DataSource
from rlsys.data import DatasetPreparer, describe_missing_bos, select_rows
from rlsys.data.bos import check_first_prompt
from rlsys.data.origin import locate_data
from rlsys.data.readers import read_rows
from rlsys.data.readers.rows import DataRow
from rlsys.data.render import PromptRenderer, UnusableRow
from rlsys.episodes.settings import plays
from rlsys.errors import ConfigError
from rlsys.models.end_ids import read_end_ids
from rlsys.models.lookup import find_config_file, limits_of_model
from rlsys.sampling.demonstrations import demonstrated_sample
from rlsys.tasks.builtin import TINY_MODELS

SAMPLED_PROMPTS = 1000  # whose lengths are averaged
SHOWN_ROWS = 100  # that are prepared to show the first


class PromptLengths(NamedTuple):
    """Lengths of prompts, in tokens."""

    longest: int  # of all sets
    mean: float  # of the first training prompts
    answers: tuple[float, int] | None = None  # mean and longest of theirs, in supervised training


def measure_prompts(config: Config) -> PromptLengths | str:
    """The lengths of prompts, or why they are not known."""
    for _, source in datasets.named_sources(config):
        try:
            if locate_data(datasets.origin(source)).kind == "hub":
                return f"{source.path} is a data set of the hub"
        except ConfigError:
            return f"{source.path} is not on this machine"
    if (tokenizer := find_tokenizer(config)) is None:
        return "the model's tokenizer is not on this machine"
    try:
        loaded = datasets.load(config, tokenizer, limits_of_model(config.model.path), lambda _: None)
    except ConfigError as error:
        return error.problems[0].removesuffix(".")
    prompts = loaded.train.take(0, SAMPLED_PROMPTS)
    answers = [len(p.demonstration.tokens) for p in prompts if p.demonstration]
    shown = (fmean(answers), max(answers)) if answers else None
    return PromptLengths(loaded.longest_prompt, fmean(len(p.tokens) for p in prompts), shown)


class ShownPrompt(NamedTuple):
    """One of the first prompts of a data set, as the model gets it, and what is odd about the first."""

    name: str
    text: str
    tokens: list[str]
    notes: list[str]
    turns: list[tuple[list[str], list[str]]]  # what supervised training reads before each turn, and what it learns


def first_prompts(config: Config, count: int = 1) -> Iterator[ShownPrompt]:
    """Prepares the first rows of each data set as a run would. Raises `ConfigError` for one that a run would refuse."""
    if (tokenizer := find_tokenizer(config)) is None:
        raise ConfigError(f"--show: the tokenizer of {config.model.path} is not on this machine.")
    limits = limits_of_model(config.model.path)
    for name, source in datasets.named_sources(config):
        origin, form = datasets.origin(source), datasets.prompt_format(config, source)
        stored = DatasetPreparer(tokenizer, lambda _: None, limits.vocabulary).prepare_first(origin, form, SHOWN_ROWS)
        rows = select_rows(origin, stored, datasets.selection_rules(config, source, limits.window))
        first = rows[0]
        bos = describe_missing_bos(source.path, form, tokenizer, first.tokens, first.messages is not None)
        notes = [n for n in (*(stored.facts.notes or []), bos) if n and first.tokens]
        for number, prompt in enumerate(rows[:count]):
            turns = demonstrated_sample(prompt, 0).turns if prompt.demonstration else []
            each = [(texts(tokenizer, read), texts(tokenizer, learned)) for read, learned in turns]
            tokens = texts(tokenizer, prompt.tokens)
            yield ShownPrompt(
                f"{name}: {f'prompt {number + 1}' if number else 'the first prompt'}",
                prompt.text,
                tokens,
                notes if not number else [],
                each,
            )


def texts(tokenizer: Any, tokens: Iterable[int]) -> list[str]:
    return [tokenizer.decode([token]) for token in tokens]


def find_missing_bos(config: Config) -> list[str]:
    """A sentence for each data set whose prompts lack the BOS token that the model expects."""
    if not has_bos(config.model.path) or (tokenizer := find_tokenizer(config)) is None:
        return []
    warnings = []
    for _, source in datasets.named_sources(config):
        origin, form = datasets.origin(source), datasets.prompt_format(config, source)
        if locate_data(origin).kind != "hub":
            warnings.append(check_first_prompt(origin, form, tokenizer))
    return [warning for warning in dict.fromkeys(warnings) if warning]


def find_missing_end(config: Config) -> list[str]:
    """A sentence if the model's chat template ends a turn by a token that ends no completion."""
    folder = model_files(config.model.path)
    if folder is None or (tokenizer := find_tokenizer(config)) is None:
        return []
    try:
        end_ids = read_end_ids(str(folder), tokenizer, config)
    except (OSError, ValueError, KeyError):  # a model that transformers does not know: the start of a run says so
        return []
    is_chat = bool(plays(config)) or any(has_chats(config, source, tokenizer) for _, source in named_sources(config))
    return [note] if is_chat and (note := datasets.describe_missing_end(config, tokenizer, end_ids)) else []


def has_chats(config: Config, source: DataSource, tokenizer: Any) -> bool:
    """True if the first usable row of a set that is on this machine becomes a chat."""
    place, renderer = datasets.origin(source), PromptRenderer(datasets.prompt_format(config, source), tokenizer)
    if (files := locate_data(place)).kind == "hub":
        return False
    for row in read_rows(place, files):
        with contextlib.suppress(UnusableRow):
            if isinstance(row, DataRow):
                return renderer(row.fields).messages is not None
    return False


def has_bos(model: str) -> bool:
    """True if the tokenizer's file names a BOS token. Reading it takes no time, unlike the tokenizer."""
    folder = model_files(model)
    file = folder / "tokenizer_config.json" if folder else None
    try:
        return bool(file and json.loads(file.read_text()).get("bos_token"))
    except (OSError, ValueError):
        return False


def find_tokenizer(config: Config) -> Any | None:
    """The model's tokenizer, if it is on this machine."""
    if config.model.path in TINY_MODELS:
        return TINY_MODELS[config.model.path].make_tokenizer()
    if (folder := model_files(config.model.path)) is None:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=config.model.trust_remote_code, local_files_only=True
        )
    except Exception:  # files are missing or damaged: the start of a run says so
        return None


def model_files(model: str) -> Path | None:
    """The folder of a model on this machine, of a hub name in the cache."""
    file = find_config_file(model)
    return file.parent if file else None
