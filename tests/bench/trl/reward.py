"""The same reward for both: the longer, the less. It costs nothing, and differs within a group."""

from typing import Any


def brevity(tokens: list[int], completions: list[str]) -> list[float]:
    return [-n / 128 for n in tokens]


def brevity_for_trl(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [-len(ids) / 128 for ids in completion_ids]
