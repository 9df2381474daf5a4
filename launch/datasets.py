"""The data sets a configuration names, read and tokenized."""

from collections.abc import Callable
from typing import Any

from rlsys import data
from rlsys.config import Config
from rlsys.data import Dataset


def peek(config: Config) -> None:
    """What is wrong with every row is said before anything is started."""
    for path in (config.data.train, *config.eval.datasets):
        data.peek(path, config.data.prompt_key)


def training(config: Config, tokenizer: Any, note: Callable[[str], None]) -> Dataset:
    return _load(config, config.data.train, tokenizer, note)


def held_out(config: Config, tokenizer: Any, note: Callable[[str], None]) -> list[Dataset]:
    return [_load(config, path, tokenizer, note) for path in config.eval.datasets]


def _load(config: Config, path: str, tokenizer: Any, note: Callable[[str], None]) -> Dataset:
    loaded = data.load(
        path,
        tokenizer,
        prompt_key=config.data.prompt_key,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        overlong=config.data.overlong,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
    )
    if loaded.skipped:
        note(f"{path}: left out {loaded.skipped} prompts longer than {config.rollout.max_prompt_tokens} tokens")
    return loaded
