"""From defaults ← YAML ← `key=value` to a `Config`. Unknown keys and wrong types are collected and raised together.

A YAML file may start from another. `base: tiny_cpu.yaml` on its top level, a path from its own folder, reads that file first, and
its base before it; a value replaces the base's, lists and named functions or data sets as a whole. `${section.option}` refers
within a file, `${oc.env:NAME}` to the environment: in an option of a reward function it stays a reference, see `secrets`.
"""

import contextlib
import dataclasses
import difflib
import operator
import os
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError

from rlsys.config.schema import Config, ConfigError, DataSource
from rlsys.config.secrets import EnvReference, find_secrets, redact, resolve_env
from rlsys.config.shorthand import ENTRY_TYPES, parse_entries, shorten_entries, update_entries
from rlsys.config.suggest import option_names, suggest_option

MARK = re.compile("\0oc\\.env:([^\0]+)\0")  # where a value referred to the environment
LITERAL = " A text that has ${ in it is written with \\${."


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads a YAML file and its bases and applies `key=value` overrides. Every option is known and has the right type.

    Whether the options fit together is not checked here: see `rlsys.checks.load_checked`.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file.{_near(path)}")
    *bases, (tree, where) = _with_bases(path)
    config = build_config(tree, list(overrides), where, bases)
    if not config.run.dir:
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=f"runs/{path.stem}"))
    return config


def build_config(
    tree: DictConfig, overrides: list[str], where: str, bases: list[tuple[DictConfig, str]] | None = None
) -> Config:
    """Merges the sources over the defaults; unknown keys and wrong types are collected and raised together."""
    problems: list[str] = []
    merged: dict[str, tuple[str, Any]] = {}
    entries: dict[str, dict[str, Any]] = {key: operator.attrgetter(key)(Config()) for key in ENTRY_TYPES}
    with _references_kept():
        sources = [(name, _items(file, name)) for file, name in [*(bases or []), (tree, where)]]
        sources.append(("command line", _overrides(overrides, problems)))
    for source, items in sources:
        for key, marked in items:
            try:
                value = _referring(marked)
                if not _named(key) or (key in ENTRY_TYPES and not isinstance(value, dict)):
                    value = resolve_env(value)
            except ConfigError as error:
                problems.append(f"{source}: `{key}`: {error}")
                continue
            kind = _kind(key)
            if kind is None:
                problems.append(f"{source}: unknown option `{key}`.{suggest_option(key)}")
            elif section := _named(key):
                try:
                    whole = key == section
                    entries[section] = (
                        parse_entries(key, value)
                        if whole
                        else update_entries(section, entries[section], key[len(section) + 1 :], value)
                    )
                except ValueError as error:
                    problems.append(f"{source}: {error}")
            else:
                if key == "reward.on_failure" and isinstance(value, dict) and list(value) == ["score"]:
                    value = f"score: {value['score']}"
                merged[key] = source, [value] if get_origin(kind) is list and isinstance(value, str) else value
    schema = OmegaConf.structured(Config)
    OmegaConf.set_readonly(schema, False)
    for section in schema:
        OmegaConf.set_readonly(schema[section], False)
    for key, (source, value) in merged.items():
        try:
            if isinstance(value, list) and any(isinstance(v, list | dict | None) for v in value):
                raise ValidationError
            OmegaConf.update(schema, key, escape_references(value))
        except OmegaConfBaseException:
            problems.append(f"{source}: `{key}` must be {_name(_kind(key))}; {value!r} is {_name(type(value))}.")
    if problems:
        raise ConfigError([redact(problem) for problem in problems])
    try:
        config = OmegaConf.to_object(schema)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from None
    assert isinstance(config, Config)
    for key, found in entries.items():
        section, _, name = key.partition(".")
        with_entries = dataclasses.replace(getattr(config, section), **{name: _known(found)})
        config = dataclasses.replace(config, **{section: with_entries})
    if problems := [problem for key, value in flatten(config).items() for problem in find_secrets(key, value)]:
        raise ConfigError(problems)
    return config


def parse_value(text: str) -> Any:
    """A value in YAML as a command line has it; where it refers to the environment it goes on referring. ValueError: it is none."""
    try:
        with _references_kept():
            value = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=True)
    except Exception as error:  # whatever the parser raises
        raise ValueError(str(error)) from None
    assert isinstance(value, dict)
    return _referring(value["value"])


def to_yaml(config: Config) -> str:
    tree: dict[str, dict[str, Any]] = {}
    for key, value in flatten(config).items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = escape_references(value)
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def flatten(config: Config) -> dict[str, Any]:
    """`{"run.seed": 0, …}`: what two configurations are compared by."""
    values = {key: operator.attrgetter(key)(config) for key in option_names()}
    return values | {key: shorten_entries(values[key]) for key in ENTRY_TYPES}


def escape_references(value: Any) -> Any:
    """What OmegaConf reads as this very value: a `${` in a text refers to nothing.  "${x}" -> "\\${x}" """
    if isinstance(value, dict):
        return {k: escape_references(v) for k, v in value.items()}
    if isinstance(value, list):
        return [escape_references(v) for v in value]
    if isinstance(value, EnvReference):
        return str(value)
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


# --- files ---------------------------------------------------------------------------------------------------------------


def _with_bases(path: Path, below: tuple[Path, ...] = ()) -> list[tuple[DictConfig, str]]:
    """A file's tree after those of its bases, each with the name of its file. `below` are the files that led here."""
    chain = (*below, path)
    if path.resolve() in [p.resolve() for p in below]:
        names = " → ".join(map(str, chain))
        raise ConfigError(f"{names}: each has the next as its `base`, in a circle. Remove one of these lines.")
    tree = _read(path)
    if "base" not in tree:
        return [(tree, str(path))]
    name = tree["base"]
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{path}: `base` must be the path of a YAML file, such as tiny_cpu.yaml; it is {name!r}.")
    base = path.parent / Path(name).expanduser()
    if not base.is_file():
        way_out = (
            _near(base) or f" The path is taken from the folder of {path.name}; copy the base along, or correct it."
        )
        raise ConfigError(f"{path}: its base `{name}` is missing; there is no file {base}.{way_out}")
    del tree["base"]
    return [*_with_bases(base, chain), (tree, str(path))]


def config_files(path: str | Path) -> list[str]:
    """The YAML file and its bases."""
    return [name for _, name in _with_bases(Path(path))]


def _read(path: Path) -> DictConfig:
    try:
        tree = OmegaConf.load(path)
    except Exception as error:  # the YAML parser's own errors name line and column
        way_out = LITERAL if isinstance(error, OmegaConfBaseException) else ""
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}{way_out}") from None
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path} must hold a mapping such as `trainer: {{steps: 10}}`.")
    return tree


def _near(path: Path) -> str:
    """A file of nearly that name in the same folder, as a question."""
    names = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, 1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


def _items(tree: DictConfig, where: str) -> list[tuple[str, Any]]:
    try:
        return _flatten(tree)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere, a `???`
        way_out = "" if isinstance(error, MissingMandatoryValue) else f".{LITERAL}"
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}{way_out}") from None


# --- the environment -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _references_kept() -> Iterator[None]:
    """What OmegaConf resolves meanwhile has marks where the environment is referred to, and not its values."""
    from omegaconf.resolvers import oc

    def settled(text: Any) -> Any:
        return MARK.sub(lambda mark: oc.env(mark[1]), text) if isinstance(text, str) else text

    def env(name: str, *default: Any) -> Any:
        name = settled(name)
        return oc.env(name, *default) if default and name not in os.environ else f"\0oc.env:{name}\0"

    def decode(text: str | None, _parent_: Any, _node_: Any) -> Any:
        return oc.decode(settled(text), _parent_, _node_)

    OmegaConf.register_resolver("oc.env", env, replace=True)
    OmegaConf.register_resolver("oc.decode", decode, replace=True, annotation_validation="off")
    try:
        yield
    finally:
        OmegaConf.register_resolver("oc.env", oc.env, replace=True, annotation_validation="off")
        OmegaConf.register_resolver("oc.decode", oc.decode, replace=True, annotation_validation="off")


def _referring(value: Any) -> Any:
    """The marks made into references again.  "Bearer \\0oc.env:KEY\\0" -> FromEnvironment("Bearer ${oc.env:KEY}")"""
    if isinstance(value, dict):
        return {resolve_env(_referring(k)): _referring(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_referring(v) for v in value]
    if not isinstance(value, str) or not MARK.search(value):
        return value
    parts = MARK.split(value)
    # Before a reference a \ is written twice.
    texts = [re.sub(r"(\\+)$", r"\1\1", escape_references(text)) for text in parts[:-1:2]]
    references = [f"{text}${{oc.env:{name}}}" for text, name in zip(texts, parts[1::2], strict=True)]
    return EnvReference("".join(references) + escape_references(parts[-1]))


def _known(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries in which only options of functions and trackers still refer to the environment."""
    found = {}
    for name, entry in entries.items():
        kept = ("options", "reward")
        fields = {f.name: getattr(entry, f.name) for f in dataclasses.fields(entry)}
        values = {k: resolve_env(v) for k, v in fields.items() if k not in kept}
        if isinstance(entry, DataSource):
            values["reward"] = _known(entry.reward)
        found[name] = dataclasses.replace(entry, **values)
    return found


# --- names and kinds of options ------------------------------------------------------------------------------------------


def _kind(key: str) -> Any:
    """The annotated type of a dotted option, or None where there is no such option."""
    kind: Any = Config
    for part in key.split("."):
        if not dataclasses.is_dataclass(kind):
            return Any if get_origin(kind) is dict else None
        fields = {f.name: f.type for f in dataclasses.fields(kind)}
        if part not in fields:
            return None
        kind = fields[part]
    return kind


def _named(key: str) -> str | None:
    """The mapping of functions, data sets or trackers that the option is, or is in."""
    return next((section for section in ENTRY_TYPES if f"{key}.".startswith(f"{section}.")), None)


def _name(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is types.UnionType:
        return f"{_name(get_args(kind)[0])}, or null"
    if origin is list:
        return f"a list of {_name(get_args(kind)[0]).split(' ', 1)[1]}s"
    if dataclasses.is_dataclass(kind):
        return f"a section with options {', '.join(f.name for f in dataclasses.fields(kind))}"
    return {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "a truth value",
        list: "a list",
        dict: "a mapping",
        type(None): "nothing",
    }.get(kind, str(kind))


def _flatten(tree: DictConfig, prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for name in tree:
        value, key = tree[name], f"{prefix}{name}"
        if (
            isinstance(value, DictConfig)
            and get_origin(_kind(key)) is not dict
            and (_kind(key) is None or dataclasses.is_dataclass(_kind(key)))
        ):
            items += _flatten(value, f"{key}.") if _kind(key) is not None else [(key, None)]
        else:
            items.append((key, OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value))
    return items


def _overrides(overrides: list[str], problems: list[str]) -> list[tuple[str, Any]]:
    """`trainer.steps=3` and `trainer={steps: 3}` as (dotted key, value); values are YAML."""
    items: list[tuple[str, Any]] = []
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
        if isinstance(parsed, DictConfig) and dataclasses.is_dataclass(_kind(key)):
            items += _flatten(parsed, f"{key}.")
        else:
            items.append((key, OmegaConf.to_container(parsed, resolve=True) if OmegaConf.is_config(parsed) else parsed))
    return items
