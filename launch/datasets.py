"""The data sets a configuration names, prepared and put in order."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys import data
from rlsys.config.schema import Config, ConfigError, DataSource
from rlsys.data import Dataset, DatasetPreparer, Origin, PromptFormat, PromptRows, SelectionRules, StoredDataset
from rlsys.evaluation.held_out import HeldOutSet
from rlsys.runs.progress import Note

BAD_ROWS = "bad_rows.jsonl"


@dataclass(frozen=True)
class LoadedDatasets:
    train: Dataset
    held_out: list[HeldOutSet]

    @property
    def longest_prompt(self) -> int:
        return max(self.train.longest_prompt, *(h.longest_prompt for h in self.held_out), 0)


def peek(config: Config) -> None:
    """What is wrong with every row is said before anything is started."""
    problems = []
    for _, source in named_sources(config):
        try:
            data.peek(origin(source), row_form(config, source), config.data.on_bad_row)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def load(config: Config, tokenizer: Any, window: int, note: Note, folder: Path | None = None) -> LoadedDatasets:
    """All of them. `window` is the model's, 0 where it is not known; `folder` is where a list of bad rows goes."""
    found = read_all(config, named_sources(config), tokenizer, window, note, folder)
    train, held_out = found[: len(config.data.train)], found[len(config.data.train) :]
    stream = mix_training_sets(config, train, note)
    if said := data.describe_shared_prompts(train):
        note(said)
    for name, rows in zip(config.eval.datasets, held_out, strict=True):
        if said := data.describe_contamination(name, rows, train):
            note(said)
    return LoadedDatasets(
        stream, [make_held_out(config, *pair) for pair in zip(config.eval.datasets, held_out, strict=True)]
    )


def load_held_out(config: Config, name: str, tokenizer: Any, window: int, note: Note) -> HeldOutSet:
    """One set of eval.datasets."""
    [rows] = read_all(config, [(name, config.eval.datasets[name])], tokenizer, window, note, None)
    return make_held_out(config, name, rows)


def named_sources(config: Config) -> list[tuple[str, DataSource]]:
    return [*config.data.train.items(), *config.eval.datasets.items()]


def origin(source: DataSource) -> Origin:
    return Origin(source.path, source.split, source.subset, source.source)


def row_form(config: Config, source: DataSource) -> PromptFormat:
    """How its rows are meant: as it says itself, or else as `data` says."""
    d = config.data
    return PromptFormat(
        prompt_key=d.prompt_key if source.prompt_key is None else source.prompt_key,
        answer_key=d.answer_key if source.answer_key is None else source.answer_key,
        system=d.system if source.system is None else source.system,
        template=d.template if source.template is None else source.template,
        as_chat=d.as_chat if source.as_chat is None else source.as_chat,
    )


def length_rules(config: Config, window: int) -> SelectionRules:
    """How long a prompt may be, and what becomes of rows that cannot be used."""
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
    return SelectionRules(most, limit, config.data.overlong, config.data.on_bad_row)


def read_all(
    config: Config, named: list[tuple[str, DataSource]], tokenizer: Any, window: int, note: Note, folder: Path | None
) -> list[PromptRows]:
    """The rows of each that a run may use. What is wrong with any of them is raised together."""
    prepare, allowed = DatasetPreparer(tokenizer, note), length_rules(config, window)
    stored: dict[tuple[Origin, PromptFormat], StoredDataset] = {}  # a set may be trained and evaluated on
    found: list[PromptRows] = []
    said: list[str] = []
    problems: list[str] = []
    for name, source in named:
        key = origin(source), row_form(config, source)
        try:
            new = key not in stored
            if new:
                stored[key] = prepare(*key)
            found.append(data.select_rows(key[0], stored[key], allowed, name if source.reward else ""))
            if new and not source.path.startswith("builtin:"):  # of which all is known
                said += data.describe_rows(key[0], stored[key], found[-1], allowed)
        except ConfigError as error:
            problems += [p for p in error.problems if p not in problems]
    if folder and (bad := data.write_bad_rows(folder / BAD_ROWS, list(stored.values()))):
        said.append(f"{bad:,} bad rows are listed in {folder / BAD_ROWS}")
    for line in said:
        note(line)
    if problems:
        raise ConfigError(problems)
    return found


def mix_training_sets(config: Config, train: list[PromptRows], note: Note) -> Dataset:
    """The training stream: one set, several end to end and shuffled together, or several by weight."""
    seed, shuffle = config.run.seed, config.data.shuffle
    prompts = train[0] if len(train) == 1 else data.JoinedPrompts(train)
    weights = [source.weight for source in config.data.train.values() if source.weight is not None]
    if len(train) == 1 or not weights:
        return Dataset(prompts, seed=seed, shuffle=shuffle)
    order = data.WeightedOrder(
        dict(zip(config.data.train, map(len, train), strict=True)), weights, seed=seed, shuffle=shuffle
    )
    for name, rows, count in zip(config.data.train, train, order.counts, strict=True):
        note(f"{name}: {count / sum(order.counts):.1%} of the prompts, {len(rows):,} rows")
    return Dataset(prompts, order=order)


def make_held_out(config: Config, name: str, rows: PromptRows) -> HeldOutSet:
    source = config.eval.datasets[name]
    samples = config.eval.samples if source.samples is None else source.samples
    temperature = config.eval.temperature if source.temperature is None else source.temperature
    return HeldOutSet(name, list(rows), samples, temperature)  # read whole: it is gone through at every evaluation
