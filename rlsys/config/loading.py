"""Reads a `Config` from defaults ← YAML ← `key=value`. Unknown options and wrong types are raised together.

Some defaults are others on GPUs, see `allowed_values`.

A YAML file may start from another one. `base: tiny_cpu.yaml` at its top level names a file, in its own folder, to read
first, and its base before it. A value replaces the base's; lists, and mappings of functions or data sets, are
replaced as a whole. `${section.option}` refers to a value of the same file. `${oc.env:NAME}` refers to the environment,
and in an option of a reward function, an episode or a tracker it stays a reference: see `secrets`.
"""

import dataclasses
import difflib
import operator
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from rlsys.config.references import escape_references, keep_references, restore_references
from rlsys.config.saved_runs import RETIRED, is_run, upgrade
from rlsys.config.schema import Config, DataSource, EpisodeConfig
from rlsys.config.secrets import find_secrets, redact, resolve_env
from rlsys.config.shorthand import ENTRY_TYPES, OPTIONS_OF_COMMANDS, parse_entries, shorten_entries, update_entries
from rlsys.config.suggest import option_names, suggest_option
from rlsys.config.threads import resolve_auto, take_auto
from rlsys.errors import ConfigError

ESCAPE_HINT = " A text that has ${ in it is written with \\${."
TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "a truth value",
    list: "a list",
    dict: "a mapping",
    dict[str, Any]: "a mapping",
    dict[str, float]: "a mapping of texts to numbers",
    dict[str, str]: "a mapping of texts",
    list[str]: "a list of texts",
    list[int]: "a list of whole numbers",
    list[float]: "a list of numbers",
    list[Any]: "a list",
    type(None): "nothing",
}
Items = list[tuple[str, Any]]  # dotted option and value


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads a YAML file with its bases, and applies `key=value` overrides.

    Every option is then known and has the right type. `rlsys.checks.load_checked` also checks that they fit together.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file.{suggest_file(path)}")
    *bases, (tree, name) = read_with_bases(path)
    return build_config(tree, list(overrides), name, bases, default_dir=f"runs/{path.stem}")


def build_config(
    tree: DictConfig,
    overrides: list[str],
    name: str,
    bases: list[tuple[DictConfig, str]] | None = None,
    default_dir: str = "",
) -> Config:
    """Merges bases, the file called `name` and overrides over the defaults.

    Raises `ConfigError` with all unknown options and wrong types.
    """
    problems: list[str] = []
    with keep_references():
        sources = [(file, read_items(base, file)) for base, file in [*(bases or []), (tree, name)]]
        sources.append(("command line", parse_overrides(overrides, problems)))
    values, entries = merge_sources(sources, problems)
    if plays_episodes(values, entries) and not sets_option(sources, "reward.functions"):
        entries["reward.functions"] = {}  # an episode's function scores it
    options = take_episode_options(values)
    if values.get("cluster.device", ("", ""))[1] == "gpu":
        values = {key: ("default on GPUs", value) for key, value in gpu_defaults().items()} | values
    auto = take_auto(values)
    config = apply_values(values, name, problems)
    if not config.run.dir:
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=default_dir))
    config = resolve_auto(config, auto)
    config = dataclasses.replace(config, episode=dataclasses.replace(config.episode, options=options))
    for key, mapping in entries.items():
        section, _, option = key.partition(".")
        entries_or_section: Any = resolve_settings(mapping)
        if option:
            entries_or_section = dataclasses.replace(getattr(config, section), **{option: entries_or_section})
        config = dataclasses.replace(config, **{section: entries_or_section})
    if problems := [problem for key, value in flatten(config).items() for problem in find_secrets(key, value)]:
        raise ConfigError(problems)
    return config


def plays_episodes(values: dict[str, tuple[str, Any]], entries: dict[str, dict[str, Any]]) -> bool:
    named = any(source.episode for key in ("data.train", "eval.datasets") for source in entries[key].values())
    return named or any(values.get(f"episode.{name}", ("", ""))[1] for name in ("play", "tools"))


def sets_option(sources: list[tuple[str, Items]], option: str) -> bool:
    return any(key == option or key.startswith(f"{option}.") for _, items in sources for key, _ in items)


def merge_sources(
    sources: list[tuple[str, Items]], problems: list[str]
) -> tuple[dict[str, tuple[str, Any]], dict[str, dict[str, Any]]]:
    """Returns the last value of every option, with its source, and the entries of every mapping in `ENTRY_TYPES`."""
    values: dict[str, tuple[str, Any]] = {}
    entries: dict[str, dict[str, Any]] = {key: operator.attrgetter(key)(Config()) for key in ENTRY_TYPES}
    for source, key, marked in [(source, key, value) for source, items in sources for key, value in items]:
        if key == "episode.command":  # short for what plays it
            values["episode.play"] = source, "command"
        key = OPTIONS_OF_COMMANDS.get(key, key)
        mapping = mapping_of(key)
        if key in RETIRED:
            problems.append(f"{source}: `{key}` is no longer an option: {RETIRED[key][0]}.")
            continue
        if option_type(key) is None:
            problems.append(f"{source}: unknown option `{key}`.{suggest_option(key)}")
            continue
        try:
            value = restore_references(marked)
            if not keeps_references(key, value, mapping):
                value = resolve_env(value)
        except ConfigError as error:
            problems.append(f"{source}: `{key}`: {error}")
            continue
        if not mapping:
            if key in ("policy.lora.targets", "policy.offload") and isinstance(value, str):
                value = [value]
            is_score = key == "reward.on_failure" and isinstance(value, dict) and list(value) == ["score"]
            values[key] = source, f"score: {value['score']}" if is_score else value
            continue
        try:
            entries[mapping] = update_mapping(key, mapping, entries[mapping], value)
        except ValueError as error:
            problems.append(f"{source}: {error}")
    return values, entries


def take_episode_options(values: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    """Removes `episode.options` and its entries from the values, and returns them as one mapping.

    OmegaConf would resolve their references to the environment.
    """
    options: dict[str, Any] = {}
    for key in [key for key in values if keeps_references(key, None, None)]:
        name, value = key.removeprefix("episode.options").removeprefix("."), values[key][1]
        if name or isinstance(value, dict):  # anything else is refused with its type
            del values[key]
            options = options | {name: value} if name else dict(value)
    return options


def keeps_references(key: str, value: Any, mapping: str | None) -> bool:
    """True if references to the environment stay: they may be secrets of the user's functions."""
    if f"{key}.".startswith("episode.options."):
        return True
    return mapping is not None and (key != mapping or isinstance(value, dict))


def update_mapping(key: str, mapping: str, entries: dict[str, Any], value: Any) -> dict[str, Any]:
    """Returns the entries after `key`, which is the mapping itself, one entry or one setting, is set to `value`."""
    if key == mapping:
        return parse_entries(key, value)
    return update_entries(mapping, entries, key[len(mapping) + 1 :], value)


def apply_values(values: dict[str, tuple[str, Any]], name: str, problems: list[str]) -> Config:
    """Sets the values in the schema, which checks their types. Raises these problems and those from before."""
    schema = OmegaConf.structured(Config)
    make_writable(schema)
    for key, (source, value) in values.items():
        try:
            OmegaConf.update(schema, key, escape_references(value))
        except OmegaConfBaseException:
            expected, actual = type_name(option_type(key)), type_name(type(value))
            problems.append(f"{source}: `{key}` must be {expected}; {value!r} is {actual}.")
    if problems:
        raise ConfigError([redact(problem) for problem in problems])
    try:
        config = OmegaConf.to_object(schema)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{name}: {str(error).splitlines()[0]}") from None
    assert isinstance(config, Config)
    return config


def make_writable(schema: DictConfig) -> None:
    """Frozen dataclasses are read-only, each by itself."""
    OmegaConf.set_readonly(schema, False)
    for name in schema:
        if isinstance(schema[name], DictConfig):
            make_writable(schema[name])


def parse_value(text: str) -> Any:
    """Returns a YAML value of the command line, with references to the environment kept. ValueError: it is not YAML."""
    try:
        with keep_references():
            value = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=True)
    except Exception as error:  # the parser raises errors of many kinds
        raise ValueError(str(error)) from None
    assert isinstance(value, dict)
    return restore_references(value["value"])


def to_yaml(config: Config) -> str:
    tree: dict[str, Any] = {}
    for key, value in flatten(config).items():
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = escape_references(value)
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def defaults(device: str = "cpu") -> dict[str, Any]:
    """Returns the default of every option by its dotted name."""
    return flatten(Config()) | (gpu_defaults() if device == "gpu" else {})


def flatten(config: Config) -> dict[str, Any]:
    """Returns every option by its dotted name.  {"run.dir": "runs/demo", "run.seed": 0, …}"""
    values = {key: operator.attrgetter(key)(config) for key in option_names()}
    return values | {key: shorten_entries(values[key]) for key in ENTRY_TYPES}


# --- files -----------------------------------------------------------------------------------------------------------


def config_files(path: str | Path) -> list[str]:
    """Returns the paths of a YAML file and its bases."""
    return [name for _, name in read_with_bases(Path(path))]


def read_with_bases(path: Path, below: tuple[Path, ...] = ()) -> list[tuple[DictConfig, str]]:
    """Returns a file's tree after those of its bases, each with its path. `below` are the files that led here."""
    chain = (*below, path)
    if path.resolve() in [p.resolve() for p in below]:
        names = " → ".join(map(str, chain))
        raise ConfigError(f"{names}: each has the next as its `base`, in a circle. Remove one of these lines.")
    tree = read_tree(path)
    if "base" not in tree:
        return [(tree, str(path))]
    base = find_base(path, tree["base"])
    del tree["base"]
    return [*read_with_bases(base, chain), (tree, str(path))]


def find_base(path: Path, name: Any) -> Path:
    """Returns the file that `base: name` means in the file at `path`. Raises `ConfigError` if there is none."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{path}: `base` must be the path of a YAML file, such as tiny_cpu.yaml; it is {name!r}.")
    base = path.parent / Path(name).expanduser()
    if not base.is_file():
        way_out = (
            suggest_file(base)
            or f" The path is taken from the folder of {path.name}; copy the base along, or correct it."
        )
        raise ConfigError(f"{path}: its base `{name}` is missing; there is no file {base}.{way_out}")
    return base


def read_tree(path: Path) -> DictConfig:
    try:
        tree = OmegaConf.load(path)
    except Exception as error:  # the YAML parser's own errors name line and column
        hint = ESCAPE_HINT if isinstance(error, OmegaConfBaseException) else ""
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}{hint}") from None
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path} must hold a mapping such as `trainer: {{steps: 10}}`.")
    return tree


def suggest_file(path: Path) -> str:
    """Suggests a file with a similar name in the same folder."""
    names = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, 1)
    return f" Did you mean {path.parent / close[0]}?" if close else ""


# --- options and values ----------------------------------------------------------------------------------------------


def read_items(tree: DictConfig, name: str) -> Items:
    try:
        items = list(flatten_tree(tree))
    except OmegaConfBaseException as error:  # a reference that leads nowhere, or a `???`
        hint = "" if isinstance(error, MissingMandatoryValue) else f".{ESCAPE_HINT}"
        raise ConfigError(f"{name}: {str(error).splitlines()[0]}{hint}") from None
    return upgrade(items) if Path(name).name == "config.yaml" and is_run(Path(name).parent) else items


def flatten_tree(tree: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted options and values. Mappings of functions and data sets are values; so is an unknown section."""
    for name in tree:
        value, key = tree[name], f"{prefix}{name}"
        kind = option_type(key)
        if kind is EpisodeConfig and isinstance(value, str):
            yield f"{key}.play", value
        elif isinstance(value, DictConfig) and dataclasses.is_dataclass(kind):
            yield from flatten_tree(value, f"{key}.")
        elif isinstance(value, DictConfig) and kind is None:
            yield key, None
        else:
            yield key, to_plain(value)


def parse_overrides(overrides: list[str], problems: list[str]) -> Items:
    """Splits `trainer.steps=3` and `trainer={steps: 3}` into dotted options and values, which are YAML."""
    items: Items = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            problems.append(f"command line: `{text}` is not key=value, such as trainer.steps=10.")
            continue
        try:
            tree = OmegaConf.create(f"value: {value}" if value else "value: ''")
            OmegaConf.resolve(tree)
            parsed = tree["value"]
        except Exception:  # not YAML: a text such as a path with a colon and a blank
            parsed = value
        items += flatten_tree(OmegaConf.create({key: parsed})) if is_section(key) else [(key, to_plain(parsed))]
    return items


def is_section(key: str) -> bool:
    return dataclasses.is_dataclass(option_type(key))


def to_plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def resolve_settings(entries: dict[str, Any]) -> dict[str, Any]:
    """Resolves references to the environment, except in options of functions and trackers: they may be secrets."""
    resolved = {}
    for name, entry in entries.items():
        fields = {f.name: getattr(entry, f.name) for f in dataclasses.fields(entry)}
        values = {k: resolve_env(v) for k, v in fields.items() if k not in ("options", "reward")}
        if isinstance(entry, DataSource):
            values["reward"] = resolve_settings(entry.reward)
        resolved[name] = dataclasses.replace(entry, **values)
    return resolved


def option_type(key: str) -> Any:
    """Returns the annotated type of a dotted option, or None if there is no such option."""
    kind: Any = Config
    for part in key.split("."):
        if not dataclasses.is_dataclass(kind):
            return Any if get_origin(kind) is dict else None
        fields = {f.name: f.type for f in dataclasses.fields(kind)}
        if part not in fields:
            return None
        kind = fields[part]
    return kind


def gpu_defaults(kind: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Returns the options that have another default on GPUs.  {"policy.dtype": "bfloat16", …}"""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(field.type):
            values |= gpu_defaults(field.type, f"{key}.")
        elif (value := field.metadata.get("gpu")) is not None:
            values[key] = value
    return values


def mapping_of(key: str) -> str | None:
    """Returns the mapping of `ENTRY_TYPES` that the option is, or is part of."""
    return next((mapping for mapping in ENTRY_TYPES if f"{key}.".startswith(f"{mapping}.")), None)


def type_name(kind: Any) -> str:
    if get_origin(kind) is types.UnionType:
        return f"{type_name(get_args(kind)[0])}, or null"
    if dataclasses.is_dataclass(kind):
        return f"a section with options {', '.join(f.name for f in dataclasses.fields(kind))}"
    return TYPE_NAMES.get(kind, str(kind))
