"""Data sets that `rlsys init` knows: their fields, their reward, and the lengths of prompts and completions."""

from dataclasses import dataclass, field, replace
from typing import Any

from rlsys.data.origin import DataLocation, Origin, locate_data
from rlsys.data.readers import read_rows
from rlsys.data.readers.rows import BadRow
from rlsys.errors import ConfigError
from rlsys.models.shapes import ModelShape
from rlsys.rewards.functions import REWARDS

BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
QUESTIONS = ("prompt", "question", "problem", "instruction", "input", "query", "messages")
ANSWERS = ("answer", "solution", "final_answer", "label", "target", "output", "response")
CHECK = "  # CHECK THIS: the field of a row"


@dataclass(frozen=True)
class DatasetPreset:
    """A data set as lines of YAML, by section, and what it needs."""

    goal: str
    yaml: dict[str, list[str]]
    prompt_tokens: int  # at most
    max_new_tokens: int
    mean_tokens: float  # of a completion
    steps: int
    held_out: bool = False
    notes: list[str] = field(default_factory=list)


ZIGZAG = DatasetPreset(
    "zigzag orders of six digits, the built-in task",
    {
        "data": ["  train: builtin:zigzag"],
        "reward": ["  functions:", "    zigzag: 1.0  # 1 if the digits of the answer rise and fall in turn"],
        "eval": ["  datasets: [builtin:zigzag_heldout]"],
    },
    prompt_tokens=7,
    max_new_tokens=10,
    mean_tokens=7.0,
    steps=80,
    held_out=True,
)


def known_presets() -> dict[str, DatasetPreset]:
    """Presets by hub name."""
    return {
        "builtin:zigzag": ZIGZAG,
        "openai/gsm8k": DatasetPreset(
            "grade-school mathematics (GSM8K)",
            mathematics_yaml("openai/gsm8k", "question", "answer", subset="main", test="test"),
            prompt_tokens=512,
            max_new_tokens=1024,
            mean_tokens=300.0,
            steps=200,
            held_out=True,
        ),
        "DigitalLearningGmbH/MATH-lighteval": DatasetPreset(
            "competition mathematics (MATH)",
            mathematics_yaml("DigitalLearningGmbH/MATH-lighteval", "problem", "solution", test="test"),
            prompt_tokens=1024,
            max_new_tokens=2048,
            mean_tokens=700.0,
            steps=300,
            held_out=True,
        ),
        "agentica-org/DeepScaleR-Preview-Dataset": DatasetPreset(
            "competition mathematics (DeepScaleR)",
            mathematics_yaml("agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer"),
            prompt_tokens=1024,
            max_new_tokens=8192,
            mean_tokens=3000.0,
            steps=500,
        ),
        "BytedTsinghua-SIA/DAPO-Math-17k": DatasetPreset(
            "competition mathematics (DAPO)",
            mathematics_yaml("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model.ground_truth", system=""),
            prompt_tokens=2048,
            max_new_tokens=8192,
            mean_tokens=3000.0,
            steps=500,
        ),
    }


def mathematics_yaml(
    hub: str, question: str, answer: str, *, subset: str = "", test: str = "", system: str = BOXED
) -> dict[str, list[str]]:
    """Questions with one right answer, read from the hub. `test` is the split of held-out questions."""
    source = [f"      path: {hub}"] + [f"      subset: {subset}"] * bool(subset)
    data = [f"  prompt_key: {question}", f"  answer_key: {answer}  # its last number or box is compared"]
    data += [f"  system: '{system}'"] * bool(system)
    data += ["  overlong: skip  # leaves out and counts prompts that are too long", "  train:", "    train:", *source]
    math = "    math: 1.0  # 1 if the final answer equals the data's; see rlsys/rewards/README.md"
    yaml = {"data": data, "reward": ["  functions:", math]}
    if test:
        yaml["eval"] = ["  datasets:", "    held_out:", *source, f"      split: {test}"]
    return yaml


def find_preset(data: str, reward: str, model: ModelShape) -> DatasetPreset:
    """The preset of a hub name; for any other hub name, file or folder, one made from its first row."""
    preset = next((p for name, p in known_presets().items() if name.lower() == data.lower()), None)
    name = reward or ("" if preset else "math")
    if preset is None:
        preset = preset_from_first_row(data, name)
    elif reward:
        preset = replace(preset, yaml=preset.yaml | {"reward": ["  functions:", f"    {reward}: 1.0"]})
    if name and ":" not in name and name not in REWARDS:
        raise ConfigError(f"--reward {name}: known are {', '.join(REWARDS)}, and your own as file.py:function.")
    for task in ("two_modes", "guess", "calculator"):
        if f"builtin:{task}" in (model.name, data):
            raise ConfigError(f"builtin:{task} has a configuration already: configs/{task}_cpu.yaml.")
    if (data == "builtin:zigzag") != (model.name == "builtin:tiny"):
        raise ConfigError("builtin:tiny knows digits only, and builtin:zigzag is its task: take both, or neither.")
    return preset


def preset_from_first_row(data: str, reward: str) -> DatasetPreset:
    """Guesses the fields from their names, and marks guesses for the user."""
    try:
        location = locate_data(Origin(data))
    except ConfigError as error:
        raise ConfigError([f"--data: {problem}" for problem in error.problems]) from None
    fields = {} if location.kind == "hub" else first_row(data, location)
    question, sure_of_question = find_field(fields, QUESTIONS)
    answer, sure_of_answer = find_field(fields, ANSWERS)
    notes = []
    if not (sure_of_question and sure_of_answer):
        hint = f"its first row has {', '.join(fields)}: set" if fields else "look at a row, and set"
        notes.append(f"The fields of {data} are a guess: {hint} data.prompt_key and data.answer_key.")
    lines = [
        f"  train: {data}",
        f"  prompt_key: {question}" + CHECK * (not sure_of_question),
        f"  answer_key: {answer}" + CHECK * (not sure_of_answer),
    ]
    if not isinstance(fields.get(question), list):
        lines.append("  as_chat: true  # makes a text a user message; leave it out for base models")
    lines.append("  overlong: skip  # leaves out and counts prompts that are too long")
    rewards = ["  functions:", f"    {reward}: 1.0  # CHECK THIS: what is right; see rlsys/rewards/README.md"]
    return DatasetPreset(data, {"data": lines, "reward": rewards}, 1024, 1024, 400.0, 200, notes=notes)


def first_row(data: str, location: DataLocation) -> dict[str, Any]:
    row = next(read_rows(Origin(data), location), None)
    if row is None:
        raise ConfigError(f"--data {data}: it has no rows.")
    if isinstance(row, BadRow):
        raise ConfigError(f"--data {row}")
    return row.fields


def find_field(fields: dict[str, Any], usual_names: tuple[str, ...]) -> tuple[str, bool]:
    """The field with the first usual name, and True if it is the only one with such a name."""
    names = {name.lower(): name for name in fields}
    matches = [names[name] for name in usual_names if name in names]
    return (matches or [usual_names[0]])[0], len(matches) == 1
