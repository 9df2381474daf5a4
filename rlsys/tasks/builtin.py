"""The built-in models and data sets by name."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.tasks import basics, calculator, guess, two_modes, zigzag

Note = Callable[[str], None]


@dataclass(frozen=True)
class BuiltinModel:
    folder: Callable[[int, Note], Path]  # makes the model of a seed at its first use
    make_tokenizer: Callable[[], Any]
    symbols: list[str]  # the text of each token


TINY_MODELS = {
    "builtin:tiny": BuiltinModel(zigzag.model_folder, zigzag.make_tokenizer, zigzag.SYMBOLS),
    "builtin:untrained": BuiltinModel(zigzag.untrained_folder, zigzag.make_tokenizer, zigzag.SYMBOLS),
    "builtin:two_modes": BuiltinModel(two_modes.model_folder, two_modes.make_tokenizer, two_modes.SYMBOLS),
    "builtin:guess": BuiltinModel(guess.model_folder, guess.make_tokenizer, guess.SYMBOLS),
    "builtin:calculator": BuiltinModel(calculator.model_folder, calculator.make_tokenizer, calculator.SYMBOLS),
}
SEEDS, HELD_OUT_SEEDS = 10_000, 100


def seeds(name: str) -> list[dict[str, Any]]:
    """Rows for environments that make a new game of each seed; none of the held-out ones is in the other set."""
    numbers = range(SEEDS, SEEDS + HELD_OUT_SEEDS) if name.endswith("_heldout") else range(SEEDS)
    return [{"seed": seed} for seed in numbers]


ROWS: dict[str, Callable[[str], list[dict[str, Any]]]] = {  # of builtin:<name>
    "zigzag": zigzag.rows,
    "zigzag_heldout": zigzag.rows,
    "copy": zigzag.rows,
    "copy_heldout": zigzag.rows,
    "basics": basics.rows,
    "basics_heldout": basics.rows,
    "two_modes": two_modes.rows,
    "two_modes_heldout": two_modes.rows,
    "seeds": seeds,
    "seeds_heldout": seeds,
    "guess": guess.rows,
    "guess_heldout": guess.rows,
    "calculator": calculator.rows,
    "calculator_heldout": calculator.rows,
}
