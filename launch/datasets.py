"""The data sets a configuration names, read and tokenized."""

from dataclasses import dataclass
from typing import Any

from rlsys import data
from rlsys.config import Config, ConfigError
from rlsys.data import Dataset
from rlsys.progress import Note


def peek(config: Config) -> None:
    """What is wrong with every row is said before anything is started."""
    for path in (config.data.train, *config.eval.datasets):
        data.peek(path, config.data.prompt_key)


@dataclass(frozen=True)
class Loaded:
    train: Dataset
    held_out: list[Dataset]

    @property
    def longest_prompt(self) -> int:
        return max(d.longest for d in (self.train, *self.held_out))


def load(config: Config, tokenizer: Any, window: int, note: Note) -> Loaded:
    """All of them. `window` is the model's, 0 where it is not known."""

    def one(path: str) -> Dataset:
        return load_one(config, path, tokenizer, window, note)

    return Loaded(one(config.data.train), [one(path) for path in config.eval.datasets])


def load_one(config: Config, path: str, tokenizer: Any, window: int, note: Note) -> Dataset:
    most, limit = config.rollout.max_prompt_tokens, "rollout.max_prompt_tokens"
    room = window - config.rollout.max_new_tokens if window else 1 << 30
    if not most or room < most:
        most, limit = (
            room,
            f"the model's window of {window} less rollout.max_new_tokens of {config.rollout.max_new_tokens}",
        )
    if most < 1:
        raise ConfigError(
            f"rollout.max_new_tokens is {config.rollout.max_new_tokens}, the model's window {window}: no room for a prompt."
        )
    loaded = data.load(
        path,
        tokenizer,
        prompt_key=config.data.prompt_key,
        max_prompt_tokens=most,
        limit=limit,
        overlong=config.data.overlong,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
    )
    if loaded.skipped:
        note(f"{path}: left out {loaded.skipped} prompts longer than {most} tokens")
    return loaded
