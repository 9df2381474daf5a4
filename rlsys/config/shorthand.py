"""Mappings of names to functions, data sets or trackers, and the short forms people write them in.

    exact    [exact, my.py:brevity]    {exact: 1.0, my.py:brevity: 0.1}    {exact: 1.0, length: {weight: 0.1, at_most: 200}}

What is no field of the entry is an option of the function or the tracker; a data set has no others.
"""

import dataclasses
import difflib
from typing import Any

from rlsys.config.schema import DataSource, HeldOutSource, RewardFunction, TrackerConfig

ENTRY_TYPES: dict[str, type] = {
    "reward.functions": RewardFunction,
    "data.train": DataSource,
    "eval.datasets": HeldOutSource,
    "tracking.to": TrackerConfig,
}
SHORT = {
    RewardFunction: "weight",
    DataSource: "weight",
    HeldOutSource: "",
    TrackerConfig: "",
}  # what a number stands for
ITSELF = {
    RewardFunction: "function",
    DataSource: "path",
    HeldOutSource: "path",
    TrackerConfig: "tracker",
}  # what is the name where it is not said
OPEN = (RewardFunction, TrackerConfig)  # those with options


def parse_entries(key: str, value: Any) -> dict[str, Any]:
    """The entries of a mapping, from any of its forms. Raises `ValueError` with what is wrong."""
    kind = ENTRY_TYPES[key]
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(name, str) and name for name in value):
        if doubled := next((name for name in value if value.count(name) > 1), None):
            raise ValueError(f"`{key}` has {doubled} more than once.")
        value = dict.fromkeys(value)
    if not isinstance(value, dict):
        raise ValueError(f"`{key}` must be {describe_form(key)}; {value!r} is not.")
    return {str(name): parse_entry(f"{key}.{name}", kind, str(name), given) for name, given in value.items()}


def describe_form(key: str) -> str:
    """What such a mapping looks like, in words."""
    if ENTRY_TYPES[key] is RewardFunction:
        return "a mapping of names to weights, such as {exact: 1.0}"
    if ENTRY_TYPES[key] is TrackerConfig:
        return "a name, a list of names, or a mapping of names to options, such as {wandb: {project: sums}}"
    return "a path, a list of paths, or a mapping of names to settings, such as {sums.jsonl: {prompt_key: question}}"


def parse_entry(key: str, kind: type, name: str, given: Any) -> Any:
    """One of them: null, a number, or a mapping."""
    if given is None:
        given = {}
    elif isinstance(given, int | float) and not isinstance(given, bool) and SHORT[kind]:
        given = {SHORT[kind]: float(given)}
    if not isinstance(given, dict):
        short = f"a number, its {SHORT[kind]}, or " if SHORT[kind] else ""
        raise ValueError(f"`{key}` must be {short}a mapping of settings; it is {given!r}.")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for field, value in given.items():
        if field in fields:
            values[field] = _converted(f"{key}.{field}", fields[field].type, value)
        elif kind in OPEN:
            values["options"] = values.get("options", {}) | {str(field): value}
        else:
            near = difflib.get_close_matches(str(field), list(fields), 1)
            raise ValueError(
                f"`{key}` has no setting `{field}`."
                + (f" Did you mean `{near[0]}`?" if near else f" It may have {', '.join(fields)}.")
            )
    itself = ITSELF[kind]
    return kind(**(values | {itself: values.get(itself) or name}))


def update_entries(key: str, entries: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """With one entry, or one setting of it, said anew: `name` is all that follows the mapping's own key."""
    kind = ENTRY_TYPES[key]
    inner, dot, setting = name.rpartition(".")
    if dot and inner in entries:
        known = {f.name: getattr(entries[inner], f.name) for f in dataclasses.fields(kind)}
        if kind in OPEN and setting not in known:
            known["options"] = known["options"] | {setting: value}
        else:
            known[setting] = value
        return entries | {inner: parse_entry(f"{key}.{inner}", kind, inner, known)}
    return entries | {name: parse_entry(f"{key}.{name}", kind, name, value)}


def shorten_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """The shortest form that reads as these entries: what is saved with a run, and compared with it."""
    return {name: _short(name, e) for name, e in entries.items()}


def _short(name: str, e: Any) -> Any:
    default = type(e)(**{ITSELF[type(e)]: name})
    said = {f.name: getattr(e, f.name) for f in dataclasses.fields(e) if getattr(e, f.name) != getattr(default, f.name)}
    if "reward" in said:
        said["reward"] = shorten_entries(said["reward"])
    if "options" in said and not set(said["options"]) & {f.name for f in dataclasses.fields(e)}:
        said |= said.pop("options")
    if isinstance(e, RewardFunction) and set(said) <= {"weight"}:
        return e.weight
    return said or None


def _converted(key: str, kind: Any, value: Any) -> Any:
    """A setting of the right type, or `ValueError`."""
    if kind == dict[str, RewardFunction]:
        return parse_functions(key, value)
    if kind == dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"`{key}` must be a mapping; it is {value!r}.")
        return {str(k): v for k, v in value.items()}
    may_be_null = kind != (kind := _without_none(kind))
    if value is None and may_be_null:
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}
        raise ValueError(f"`{key}` must be {words[kind]}{', or null' * may_be_null}; it is {value!r}.")
    return value


def parse_functions(key: str, value: Any) -> dict[str, RewardFunction]:
    """Reward functions in any of their forms. `functions("reward", {"exact": 1.0})`"""
    if value is None or value == {}:
        return {}
    if all(isinstance(v, RewardFunction) for v in (value.values() if isinstance(value, dict) else [None])):
        return dict(value)
    try:
        return parse_entries("reward.functions", value)
    except ValueError as error:
        raise ValueError(str(error).replace("reward.functions", key)) from None


def _without_none(kind: Any) -> Any:
    inner = [k for k in getattr(kind, "__args__", ()) if k is not type(None)]
    return inner[0] if inner else kind
