"""Loads the data sets that a configuration names, and mixes those for training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlsys import data
from rlsys.config.derived import evaluated_samples, max_new_tokens, shows_answers
from rlsys.config.schema import Config, DataSource, HeldOutSource
from rlsys.data import Dataset, DatasetPreparer, Origin, PromptFormat, PromptRows, SelectionRules, StoredDataset
from rlsys.data.render import read_template
from rlsys.episodes.settings import play_of, plays
from rlsys.episodes.template import ConversationTemplate
from rlsys.episodes.turn_end import describe_turn_end
from rlsys.errors import ConfigError
from rlsys.evaluation.held_out import HeldOutSet
from rlsys.models.config_json import ModelLimits
from rlsys.runs.progress import Note

BAD_ROWS = "bad_rows.jsonl"


@dataclass(frozen=True)
class LoadedDatasets:
    train: Dataset
    held_out: list[HeldOutSet]
    longest_sequence: int  # a prompt with the longest completion that it may have, in tokens

    @property
    def longest_prompt(self) -> int:
        held_out = [h.longest_prompt for h in self.held_out]
        return max(self.train.longest_prompt, *held_out, 0)


def peek(config: Config) -> None:
    """Checks the first rows of every set before anything is started. Raises all problems together."""
    problems = []
    for _, source in named_sources(config):
        try:
            data.peek(origin(source), prompt_format(config, source), config.data.on_bad_row)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def load(config: Config, tokenizer: Any, limits: ModelLimits, note: Note, folder: Path | None = None) -> LoadedDatasets:
    """Loads all sets. `limits` are the model's; `folder` gets the list of bad rows."""
    sets = read_all(config, named_sources(config), tokenizer, limits, note, folder)
    train, held_out = sets[: len(config.data.train)], sets[len(config.data.train) :]
    stream = mix_training_sets(config, train, note)
    if remark := data.describe_shared_prompts(train):
        note(remark)
    for name, rows in zip(config.eval.datasets, held_out, strict=True):
        if remark := data.describe_contamination(name, rows, train):
            note(remark)
    to_evaluate = [make_held_out(config, name, rows) for name, rows in zip(config.eval.datasets, held_out, strict=True)]
    trained = [
        rows.longest_prompt + (0 if shows_answers(config, source) else max_new_tokens(config, source))
        for source, rows in zip(config.data.train.values(), train, strict=True)
    ]
    longest = max(*trained, *(h.longest_sequence for h in to_evaluate), longest_episode(config, limits.window))
    return LoadedDatasets(stream, to_evaluate, longest)


def longest_episode(config: Config, window: int) -> int:
    """Returns the most tokens that an episode may have; 0 if none is played."""
    return min(config.episode.window, window or config.episode.window) if plays(config) else 0


def load_held_out(config: Config, name: str, tokenizer: Any, limits: ModelLimits, note: Note) -> HeldOutSet:
    """Loads one set of eval.datasets."""
    [rows] = read_all(config, [(name, config.eval.datasets[name])], tokenizer, limits, note, None)
    return make_held_out(config, name, rows)


def named_sources(config: Config) -> list[tuple[str, DataSource]]:
    return [*config.data.train.items(), *config.eval.datasets.items()]


def origin(source: DataSource) -> Origin:
    return Origin(source.path, source.split, source.subset, source.source, json.dumps(source.options))


def prompt_format(config: Config, source: DataSource) -> PromptFormat:
    """How rows become prompts: by the set's own options, and by those of `data` where it has none."""
    names = [f.name for f in fields(PromptFormat) if f.name not in ("required", "supervised")]
    own = {name: value for name in names if (value := getattr(source, name)) is not None}
    general = {name: getattr(config.data, name) for name in names}
    return PromptFormat(**general | own, required=not play_of(config, source), supervised=shows_answers(config, source))


def describe_missing_end(config: Config, tokenizer: Any, end_ids: Sequence[int]) -> str:
    """Returns a sentence if the chat template ends an answer by a token that ends no completion; else an empty text."""
    chat_template = read_template(config.data.template) if config.data.template else ""
    template = ConversationTemplate(tokenizer, config.data.template_options, chat_template)
    return describe_turn_end(template, end_ids)


def selection_rules(config: Config, source: DataSource, window: int) -> SelectionRules:
    """How long a set's prompts may be, and what happens to rows that cannot be used."""
    limit, option = config.rollout.max_prompt_tokens, "rollout.max_prompt_tokens"
    new_tokens = max_new_tokens(config, source)
    room, why = (
        window - new_tokens if window else 1 << 30,
        f"the model's window of {window} less completions of {new_tokens}",
    )
    if shows_answers(config, source):  # a prompt and its answer go into a pack
        limit, option = config.policy.tokens_per_pack, "policy.tokens_per_pack"
        room, why = window or 1 << 30, f"the model's window of {window}"
    if not limit or room < limit:
        limit, option = room, why
    if limit < 1:
        raise ConfigError(f"completions have {new_tokens} tokens, the model's window {window}: no room for a prompt.")
    in_training = 0 if isinstance(source, HeldOutSource) else source.max_new_tokens or 0
    play = play_of(config, source)
    return SelectionRules(limit, option, config.data.overlong, config.data.on_bad_row, in_training, play)


def read_all(
    config: Config,
    named: list[tuple[str, DataSource]],
    tokenizer: Any,
    limits: ModelLimits,
    note: Note,
    folder: Path | None,
) -> list[PromptRows]:
    """The usable rows of each set. Raises the problems of all sets together."""
    prepare = DatasetPreparer(tokenizer, note, limits.vocabulary)
    stored: dict[tuple[Origin, PromptFormat], StoredDataset] = {}  # a set may serve for training and evaluation
    sets: list[PromptRows] = []
    remarks: list[str] = []
    problems: list[str] = []
    for name, source in named:
        key = origin(source), prompt_format(config, source)
        try:
            rules = selection_rules(config, source, limits.window)
            new = key not in stored
            if new:
                stored[key] = prepare(*key)
            sets.append(data.select_rows(key[0], stored[key], rules, name if source.reward else ""))
            if new and source.path.startswith("builtin:"):  # how many rows it has needs no remark
                remarks += stored[key].facts.notes or []
            elif new:
                remarks += data.describe_rows(key[0], stored[key], sets[-1], rules)
            first = sets[-1][0]
            warning = data.describe_missing_bos(
                source.path, key[1], tokenizer, first.tokens, first.messages is not None
            )
            remarks += [warning] if new and warning and not first.play else []
        except ConfigError as error:
            problems += [p for p in error.problems if p not in problems]
    if folder and (bad := data.write_bad_rows(folder / BAD_ROWS, list(stored.values()))):
        remarks.append(f"{bad:,} bad rows are listed in {folder / BAD_ROWS}")
    for remark in remarks:
        note(remark)
    if problems:
        raise ConfigError(problems)
    return sets


def mix_training_sets(config: Config, train: list[PromptRows], note: Note) -> Dataset:
    """The training stream: one set, several shuffled together as one, or several mixed by weight."""
    seed, shuffle = config.run.seed, config.data.shuffle
    prompts = train[0] if len(train) == 1 else data.JoinedPrompts(train)
    weights = [source.weight for source in config.data.train.values() if source.weight is not None]
    if len(train) == 1 or not weights:
        return Dataset(prompts, seed=seed, shuffle=shuffle)
    lengths = dict(zip(config.data.train, map(len, train), strict=True))
    order = data.WeightedOrder(lengths, weights, seed=seed, shuffle=shuffle)
    for name, rows, count in zip(config.data.train, train, order.counts, strict=True):
        note(f"{name}: {count / sum(order.counts):.1%} of the prompts, {len(rows):,} rows")
    return Dataset(prompts, order=order)


def make_held_out(config: Config, name: str, rows: PromptRows) -> HeldOutSet:
    source = config.eval.datasets[name]
    temperature = config.eval.temperature if source.temperature is None else source.temperature
    prompts = list(rows)  # held in memory: every evaluation reads all of it
    limit = max_new_tokens(config, source)
    return HeldOutSet(
        name, prompts, evaluated_samples(config, source), temperature, limit, config.eval.top_p, config.eval.top_k
    )
