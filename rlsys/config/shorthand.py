"""Short forms of the mappings from names to reward functions, data sets or trackers, and of the options of a command.

    exact    [exact, my.py:brevity]    {exact: 1.0, my.py:brevity: 0.1}    {exact: 1.0, length: {at_most: 200}}

A setting that is not a field of the entry is an option of the reward function, the tracker, the task of reasoning_gym
or the taskset of verifiers. Other data sets have no options.
"""

import dataclasses
import difflib
from types import UnionType
from typing import Any, get_args

from rlsys.config.schema import DataSource, FrozenModel, HeldOutSource, RewardFunction, TrackerConfig

ENTRY_TYPES: dict[str, type] = {
    "models": FrozenModel,
    "reward.functions": RewardFunction,
    "data.train": DataSource,
    "eval.datasets": HeldOutSource,
    "tracking.to": TrackerConfig,
}
NUMBER_FIELD: dict[type, str] = {RewardFunction: "weight", DataSource: "weight"}  # set by a bare number
NAME_FIELD: dict[type, str] = {  # empty, it is the name of the entry
    FrozenModel: "path",
    RewardFunction: "function",
    DataSource: "path",
    HeldOutSource: "path",
    TrackerConfig: "tracker",
}
# `episode: {command: python agent.py {task}, grade: my.py:grade}` is played by the built-in `command`, with these options.
OPTIONS_OF_COMMANDS = {f"episode.{name}": f"episode.options.{name}" for name in ("command", "grade")}
WITH_OPTIONS = (RewardFunction, TrackerConfig)
GYM = "reasoning_gym:"  # in front of the name of a task
VERIFIERS = "verifiers:"  # in front of the name of a taskset


def parse_entries(key: str, value: Any) -> dict[str, Any]:
    """Returns the entries of a mapping in any of its forms. Raises `ValueError` with what is wrong."""
    kind = ENTRY_TYPES[key]
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(name, str) and name for name in value):
        if duplicate := next((name for name in value if value.count(name) > 1), None):
            raise ValueError(f"`{key}` has {duplicate} more than once.")
        value = dict.fromkeys(value)
    if not isinstance(value, dict):
        raise ValueError(f"`{key}` must be {describe_form(key)}; {value!r} is not.")
    return {str(name): parse_entry(f"{key}.{name}", kind, str(name), settings) for name, settings in value.items()}


def describe_form(key: str) -> str:
    """Describes in words what such a mapping looks like."""
    if ENTRY_TYPES[key] is FrozenModel:
        return "a mapping of names to settings, such as {judge: {path: Qwen/Qwen3-8B}}"
    if ENTRY_TYPES[key] is RewardFunction:
        return "a mapping of names to weights, such as {exact: 1.0}"
    if ENTRY_TYPES[key] is TrackerConfig:
        return "a name, a list of names, or a mapping of names to options, such as {wandb: {project: sums}}"
    return "a path, a list of paths, or a mapping of names to settings, such as {sums.jsonl: {prompt_key: question}}"


def parse_entry(key: str, kind: type, name: str, settings: Any) -> Any:
    """Returns one entry. Its settings are null, a number, or a mapping."""
    settings = as_mapping(key, kind, settings)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    path = str(settings.get("path") or name) if issubclass(kind, DataSource) else ""
    values = package_values(path)
    for setting, value in settings.items():
        if setting in fields:
            values[setting] = convert_setting(f"{key}.{setting}", fields[setting].type, value)
        elif kind in WITH_OPTIONS or path.startswith((GYM, VERIFIERS)):
            values["options"] = values.get("options", {}) | {str(setting): value}
        else:
            close = difflib.get_close_matches(str(setting), list(fields), 1)
            way_out = f"Did you mean `{close[0]}`?" if close else f"It may have {', '.join(fields)}."
            raise ValueError(f"`{key}` has no setting `{setting}`. {way_out}")
    name_field = NAME_FIELD[kind]
    return kind(**(values | {name_field: values.get(name_field) or name}))


def as_mapping(key: str, kind: type, settings: Any) -> dict[str, Any]:
    """null -> {}, and for a reward function 0.5 -> {weight: 0.5}"""
    number = NUMBER_FIELD.get(kind)
    if settings is None:
        return {}
    if isinstance(settings, int | float) and not isinstance(settings, bool) and number:
        return {number: float(settings)}
    if not isinstance(settings, dict):
        or_number = f"a number, its {number}, or " if number else ""
        raise ValueError(f"`{key}` must be {or_number}a mapping of settings; it is {settings!r}.")
    return settings


def package_values(path: str) -> dict[str, Any]:
    """What a data set of a package brings along: the reward of a task, or the episode that its rows are played by."""
    if path.startswith(GYM):
        return {"reward": {"reasoning_gym": RewardFunction(function="reasoning_gym")}}
    return {"episode": path} if path.startswith(VERIFIERS) else {}


def update_entries(key: str, entries: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Returns the entries with one entry, or one of its settings, replaced.

    `name` is what follows the mapping's own key: an entry such as `exact`, or a setting such as `exact.weight`.
    """
    kind = ENTRY_TYPES[key]
    entry, dot, setting = name.rpartition(".")
    if dot and entry in entries:
        settings = {f.name: getattr(entries[entry], f.name) for f in dataclasses.fields(kind)}
        if kind in WITH_OPTIONS and setting not in settings:
            settings["options"] = settings["options"] | {setting: value}
        else:
            settings[setting] = value
        return entries | {entry: parse_entry(f"{key}.{entry}", kind, entry, settings)}
    return entries | {name: parse_entry(f"{key}.{name}", kind, name, value)}


def shorten_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """Returns the shortest form that reads as these entries. Runs are saved and compared in this form."""
    return {name: shorten_entry(name, entry) for name, entry in entries.items()}


def shorten_entry(name: str, entry: Any) -> Any:
    default = type(entry)(**{NAME_FIELD[type(entry)]: name})
    names = [f.name for f in dataclasses.fields(entry)]
    settings = {n: getattr(entry, n) for n in names if getattr(entry, n) != getattr(default, n)}
    if "reward" in settings:
        settings["reward"] = shorten_entries(settings["reward"])
    if "options" in settings and not set(settings["options"]) & set(names):
        settings |= settings.pop("options")
    if isinstance(entry, RewardFunction) and set(settings) <= {"weight"}:
        return entry.weight
    return settings or None


def convert_setting(key: str, kind: Any, value: Any) -> Any:
    """Returns a setting with the type of its field. Raises `ValueError` for another type."""
    if kind == dict[str, RewardFunction]:
        return parse_functions(key, value)
    may_be_null = kind != (kind := without_none(kind))
    if value is None and may_be_null:
        return None
    if kind == dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"`{key}` must be a mapping; it is {value!r}.")
        return {str(k): v for k, v in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}
        raise ValueError(f"`{key}` must be {names[kind]}{', or null' * may_be_null}; it is {value!r}.")
    return value


def parse_functions(key: str, value: Any) -> dict[str, RewardFunction]:
    """Returns reward functions, given in any of their forms. `parse_functions("reward", {"exact": 1.0})`"""
    if value is None or value == {}:
        return {}
    if all(isinstance(v, RewardFunction) for v in (value.values() if isinstance(value, dict) else [None])):
        return dict(value)
    try:
        return parse_entries("reward.functions", value)
    except ValueError as error:
        raise ValueError(str(error).replace("reward.functions", key)) from None


def without_none(kind: Any) -> Any:
    """float | None -> float"""
    members = [k for k in get_args(kind) if k is not type(None)]
    return members[0] if isinstance(kind, UnionType) else kind
