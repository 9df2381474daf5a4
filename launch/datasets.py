"""The data sets a configuration names, prepared and put in order."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys import data
from rlsys.config.schema import Config, ConfigError, Source
from rlsys.data import Dataset, Form, Origin, Preparation, Rows, Rules, Stored
from rlsys.evaluation.held_out import HeldOut
from rlsys.runs.progress import Note

BAD_ROWS = "bad_rows.jsonl"


@dataclass(frozen=True)
class Loaded:
    train: Dataset
    held_out: list[HeldOut]

    @property
    def longest_prompt(self) -> int:
        return max(self.train.longest, *(h.longest for h in self.held_out), 0)


def peek(config: Config) -> None:
    """What is wrong with every row is said before anything is started."""
    problems = []
    for _, source in sources(config):
        try:
            data.peek(origin(source), form(config, source), config.data.on_bad_row)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def load(config: Config, tokenizer: Any, window: int, note: Note, folder: Path | None = None) -> Loaded:
    """All of them. `window` is the model's, 0 where it is not known; `folder` is where a list of bad rows goes."""
    found = read(config, sources(config), tokenizer, window, note, folder)
    train, held_out = found[: len(config.data.train)], found[len(config.data.train) :]
    stream = mixed(config, train, note)
    if said := data.shared(train):
        note(said)
    for name, rows in zip(config.eval.datasets, held_out, strict=True):
        if said := data.contamination(name, rows, train):
            note(said)
    return Loaded(stream, [evaluated(config, *pair) for pair in zip(config.eval.datasets, held_out, strict=True)])


def load_one(config: Config, name: str, tokenizer: Any, window: int, note: Note) -> HeldOut:
    """One set of eval.datasets."""
    [rows] = read(config, [(name, config.eval.datasets[name])], tokenizer, window, note, None)
    return evaluated(config, name, rows)


def sources(config: Config) -> list[tuple[str, Source]]:
    return [*config.data.train.items(), *config.eval.datasets.items()]


def origin(source: Source) -> Origin:
    return Origin(source.path, source.split, source.subset, source.source)


def form(config: Config, source: Source) -> Form:
    """How its rows are meant: as it says itself, or else as `data` says."""
    d = config.data
    return Form(
        prompt_key=d.prompt_key if source.prompt_key is None else source.prompt_key,
        answer_key=d.answer_key if source.answer_key is None else source.answer_key,
        system=d.system if source.system is None else source.system,
        template=d.template if source.template is None else source.template,
        as_chat=d.as_chat if source.as_chat is None else source.as_chat,
    )


def rules(config: Config, window: int) -> Rules:
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
    return Rules(most, limit, config.data.overlong, config.data.on_bad_row)


def read(
    config: Config, named: list[tuple[str, Source]], tokenizer: Any, window: int, note: Note, folder: Path | None
) -> list[Rows]:
    """The rows of each that a run may use. What is wrong with any of them is raised together."""
    prepare, allowed = Preparation(tokenizer, note), rules(config, window)
    stored: dict[tuple[Origin, Form], Stored] = {}  # a set may be trained and evaluated on
    found: list[Rows] = []
    said: list[str] = []
    problems: list[str] = []
    for name, source in named:
        key = origin(source), form(config, source)
        try:
            new = key not in stored
            if new:
                stored[key] = prepare(*key)
            found.append(data.choose(key[0], stored[key], allowed, name if source.reward else ""))
            if new and not source.path.startswith("builtin:"):  # of which all is known
                said += data.notes(key[0], stored[key], found[-1], allowed)
        except ConfigError as error:
            problems += [p for p in error.problems if p not in problems]
    if folder and (bad := data.write_bad_rows(folder / BAD_ROWS, list(stored.values()))):
        said.append(f"{bad:,} bad rows are listed in {folder / BAD_ROWS}")
    for line in said:
        note(line)
    if problems:
        raise ConfigError(problems)
    return found


def mixed(config: Config, train: list[Rows], note: Note) -> Dataset:
    """The training stream: one set, several end to end and shuffled together, or several by weight."""
    seed, shuffle = config.run.seed, config.data.shuffle
    prompts = train[0] if len(train) == 1 else data.Joined(train)
    weights = [source.weight for source in config.data.train.values() if source.weight is not None]
    if len(train) == 1 or not weights:
        return Dataset(prompts, seed=seed, shuffle=shuffle)
    order = data.Weighted(
        dict(zip(config.data.train, map(len, train), strict=True)), weights, seed=seed, shuffle=shuffle
    )
    for name, rows, count in zip(config.data.train, train, order.counts, strict=True):
        note(f"{name}: {count / sum(order.counts):.1%} of the prompts, {len(rows):,} rows")
    return Dataset(prompts, order=order)


def evaluated(config: Config, name: str, rows: Rows) -> HeldOut:
    source = config.eval.datasets[name]
    samples = config.eval.samples if source.samples is None else source.samples
    temperature = config.eval.temperature if source.temperature is None else source.temperature
    return HeldOut(name, list(rows), samples, temperature)  # read whole: it is gone through at every evaluation
