"""Which prepared rows a run uses, and what is said of the others: over-long, bad, repeated."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rlsys.config.schema import ConfigError
from rlsys.data.origin import Origin
from rlsys.data.store import PromptRows, StoredDataset, count_occurrences

SHOWN = 10  # problems of a data set told one by one
SHOWN_AS_NOTES = 3


@dataclass(frozen=True)
class SelectionRules:
    """What a prompt may be. Rules(512, "rollout.max_prompt_tokens", overlong="skip", on_bad_row="error")"""

    max_tokens: int  # tokens
    limit_option: str = "rollout.max_prompt_tokens"  # where that number is from
    overlong: str = "error"
    on_bad_row: str = "error"


def select_rows(origin: Origin, stored: StoredDataset, rules: SelectionRules, rewards: str = "") -> PromptRows:
    """The rows to use. Raises `ConfigError` with all that is wrong, or with that there are none."""
    chosen = np.flatnonzero(stored.lengths <= rules.max_tokens)
    problems: list[str] = []
    if stored.facts.bad and (rules.on_bad_row == "error" or not len(stored)):
        problems += map(str, stored.first_bad[:SHOWN])
    if stored.facts.bad and rules.on_bad_row == "error":
        problems.append(
            f"{origin.path}: {_share(stored)} cannot be used ({_reasons(stored)}). "
            "Mend them, or leave them out with data.on_bad_row=skip."
        )
    if not stored.facts.read:
        problems.append(f"{origin.path} holds no prompts; it is empty.")
    elif not len(stored):
        problems.append(
            f"{origin.path} holds no prompts: none of its {stored.facts.read:,} rows can be used ({_reasons(stored)})."
        )
    elif rules.overlong == "error" and len(chosen) < len(stored):
        problems += _overlong(origin, stored, rules)
    elif not len(chosen):
        problems.append(
            f"{origin.path} holds no prompts: all {len(stored):,} are longer than {rules.max_tokens} tokens ({rules.limit_option})."
        )
    if problems:
        raise ConfigError(problems)
    return PromptRows(stored, chosen, rewards=rewards)


def describe_rows(origin: Origin, stored: StoredDataset, rows: PromptRows, rules: SelectionRules) -> list[str]:
    """What is worth knowing of a data set that is used."""
    overlong = len(stored) - len(rows)
    repeated = int((count_occurrences(rows.text_hashes) > 1).sum())
    parts = [f"{len(rows):,} prompts"]
    if stored.facts.bad:
        parts.append(f"left out {_share(stored)} that cannot be used ({_reasons(stored)})")
    if overlong:
        parts.append(f"left out {overlong:,} of more than {rules.max_tokens} tokens")
    if repeated:
        parts.append(f"{repeated:,} repeat a prompt that is there already")
    if stored.facts.own_system:
        parts.append(f"{stored.facts.own_system:,} rows keep their own system message")
    shown = stored.first_bad[:SHOWN_AS_NOTES]
    more = sum(stored.facts.bad.values()) - sum(bad.rows for bad in shown)
    return [
        f"{origin.path}: {'; '.join(parts)}",
        *(f"    {bad}" for bad in shown),
        *[f"    and {more:,} more"] * (more > 0),
    ]


def describe_contamination(held_out: str, rows: PromptRows, train: list[PromptRows]) -> str:
    """A sentence, where prompts that are to measure what was learned are learned from."""
    seen = int(np.isin(rows.text_hashes, np.concatenate([t.text_hashes for t in train])).sum())
    return (
        f"{held_out}: {seen:,} of {len(rows):,} held-out prompts are also trained on; accuracy on them is no test"
        if seen
        else ""
    )


def describe_shared_prompts(train: list[PromptRows]) -> str:
    """A sentence, where sets repeat prompts of each other."""
    together = int((count_occurrences(np.concatenate([t.text_hashes for t in train])) > 1).sum())
    within = sum(int((count_occurrences(t.text_hashes) > 1).sum()) for t in train)
    return f"data.train: {together - within:,} prompts are there already in another set" if together > within else ""


def write_bad_rows(file: Path, sets: list[StoredDataset]) -> int:
    """Every bad row of every set, a line each; no file where there are none."""
    bad = [bad for one in sets for bad in one.read_all_bad()]
    if bad:
        file.write_text("".join(json.dumps(asdict(b)) + "\n" for b in bad), encoding="utf-8")
    else:
        file.unlink(missing_ok=True)
    return len(bad)


def _overlong(origin: Origin, stored: StoredDataset, rules: SelectionRules) -> list[str]:
    over = np.flatnonzero(stored.lengths > rules.max_tokens)
    said = [
        f"{stored.row_location(int(i))}: the prompt has {stored.lengths[i]} tokens; at most {rules.max_tokens} fit ({rules.limit_option})."
        for i in over[:SHOWN]
    ]
    said[-1] += " Shorten it, or set data.overlong=skip to leave such prompts out."
    more = len(over) - len(said)
    return (
        [*said, f"{origin.path}: {more:,} more prompts are too long; the longest has {stored.lengths.max()} tokens."]
        if more
        else said
    )


def _share(stored: StoredDataset) -> str:
    bad = sum(stored.facts.bad.values())
    return f"{bad:,} of {stored.facts.read:,} rows"


def _reasons(stored: StoredDataset) -> str:
    most_first = sorted(stored.facts.bad.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {reason}" for reason, count in most_first)
