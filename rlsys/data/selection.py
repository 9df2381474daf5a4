"""Selects the prepared rows that a run uses, and reports the others: over-long, bad, repeated."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rlsys.data.origin import Origin
from rlsys.data.store import PromptRows, StoredDataset, count_occurrences
from rlsys.errors import ConfigError

MAX_PROBLEMS = 10  # of a data set that are listed one by one
MAX_NOTED_ROWS = 3  # bad rows that are noted one by one


@dataclass(frozen=True)
class SelectionRules:
    """SelectionRules(512, "rollout.max_prompt_tokens", overlong="skip", on_bad_row="error")"""

    max_tokens: int  # of a prompt
    limit_option: str = "rollout.max_prompt_tokens"  # where that number comes from
    overlong: str = "error"  # error | skip
    on_bad_row: str = "error"  # error | skip
    max_new_tokens: int = 0  # the longest completion in training; 0: rollout.max_new_tokens
    play: str = ""  # the function that plays an episode on each row


def select_rows(origin: Origin, stored: StoredDataset, rules: SelectionRules, rewards: str = "") -> PromptRows:
    """Returns the rows to use. Raises `ConfigError` with all problems, or if no rows are left."""
    chosen = np.flatnonzero(stored.lengths <= rules.max_tokens)
    problems: list[str] = []
    if stored.facts.bad and (rules.on_bad_row == "error" or not len(stored)):
        problems += map(str, stored.first_bad[:MAX_PROBLEMS])
    if stored.facts.bad and rules.on_bad_row == "error":
        problems.append(
            f"{origin.path}: {_share(stored)} cannot be used ({_reasons(stored)}). "
            "Correct them, or leave them out with data.on_bad_row=skip."
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
            f"{origin.path} holds no prompts: all {len(stored):,} are longer than {rules.max_tokens} tokens "
            f"({rules.limit_option})."
        )
    if problems:
        raise ConfigError(problems)
    return PromptRows(stored, chosen, rewards=rewards, max_new_tokens=rules.max_new_tokens, play=rules.play)


def describe_rows(origin: Origin, stored: StoredDataset, rows: PromptRows, rules: SelectionRules) -> list[str]:
    """Returns notes about a data set that is used: how many rows it has, which were left out, how prompts end."""
    overlong = len(stored) - len(rows)
    repeated = int((count_occurrences(rows.text_hashes) > 1).sum())
    parts = [f"{len(rows):,} prompts"]
    if stored.facts.bad:
        parts.append(f"left out {_share(stored)} that cannot be used ({_reasons(stored)})")
    if overlong:
        parts.append(f"left out {overlong:,} of more than {rules.max_tokens} tokens")
    if repeated:
        parts.append(f"{repeated:,} repeat an earlier prompt")
    if stored.facts.own_system:
        parts.append(f"{stored.facts.own_system:,} rows keep their own system message")
    shown = stored.first_bad[:MAX_NOTED_ROWS]
    more = sum(stored.facts.bad.values()) - sum(bad.rows for bad in shown)
    return [
        f"{origin.path}: {'; '.join(parts)}",
        *(f"    {bad}" for bad in shown),
        *[f"    and {more:,} more"] * (more > 0),
        *(stored.facts.notes or []),
    ]


def describe_contamination(held_out: str, rows: PromptRows, train: list[PromptRows]) -> str:
    """Returns a sentence about held-out prompts that are also trained on; empty if there are none."""
    seen = int(np.isin(rows.text_hashes, np.concatenate([t.text_hashes for t in train])).sum())
    sentence = (
        f"{held_out}: {seen:,} of {len(rows):,} held-out prompts are also trained on; accuracy on them is no test"
    )
    return sentence if seen else ""


def describe_shared_prompts(train: list[PromptRows]) -> str:
    """Returns a sentence about prompts that are in several sets; empty if there are none."""
    together = int((count_occurrences(np.concatenate([t.text_hashes for t in train])) > 1).sum())
    within = sum(int((count_occurrences(t.text_hashes) > 1).sum()) for t in train)
    return f"data.train: {together - within:,} prompts are in another set too" if together > within else ""


def write_bad_rows(file: Path, sets: list[StoredDataset]) -> int:
    """Writes every bad row of every set, one per line, or removes the file if there are none. Returns how many."""
    bad = [bad for stored in sets for bad in stored.read_all_bad()]
    if bad:
        file.write_text("".join(json.dumps(asdict(b)) + "\n" for b in bad), encoding="utf-8")
    else:
        file.unlink(missing_ok=True)
    return len(bad)


def _overlong(origin: Origin, stored: StoredDataset, rules: SelectionRules) -> list[str]:
    """Returns a sentence for each of the first prompts that are too long, and one for the rest."""
    overlong = np.flatnonzero(stored.lengths > rules.max_tokens)
    problems = [
        f"{stored.row_location(int(i))}: the prompt has {stored.lengths[i]} tokens; at most {rules.max_tokens} fit "
        f"({rules.limit_option})."
        for i in overlong[:MAX_PROBLEMS]
    ]
    problems[-1] += " Shorten it, or set data.overlong=skip to leave such prompts out."
    if more := len(overlong) - len(problems):
        longest = stored.lengths.max()
        problems.append(f"{origin.path}: {more:,} more prompts are too long; the longest has {longest} tokens.")
    return problems


def _share(stored: StoredDataset) -> str:
    """ "3 of 1,000 rows" """
    bad = sum(stored.facts.bad.values())
    return f"{bad:,} of {stored.facts.read:,} rows"


def _reasons(stored: StoredDataset) -> str:
    """ "2 not JSON, 1 without a prompt" """
    most_first = sorted(stored.facts.bad.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {reason}" for reason, count in most_first)
