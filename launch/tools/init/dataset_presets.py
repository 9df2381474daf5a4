"""What `rlsys init` knows of data sets: where question and answer stand, what judges, how long prompts and completions are."""

from dataclasses import dataclass, field
from typing import Any

from rlsys.config.schema import ConfigError
from rlsys.data.origin import DataLocation, Origin, locate_data
from rlsys.data.readers import read_rows
from rlsys.data.readers.rows import BadRow
from rlsys.models.shapes import ModelShape
from rlsys.rewards.functions import REWARDS

BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
QUESTIONS = ("prompt", "question", "problem", "instruction", "input", "query", "messages")
ANSWERS = ("answer", "solution", "final_answer", "label", "target", "output", "response")
CHECK = "  # CHECK THIS: the field of a row"


@dataclass(frozen=True)
class DatasetPreset:
    """A data set, ready to be written down. `yaml` has the lines of sections that are about it."""

    goal: str
    yaml: dict[str, list[str]]
    prompt_tokens: int  # tokens, at most
    max_new_tokens: int
    mean_tokens: float  # tokens of a completion
    steps: int
    held_out: bool = False
    notes: list[str] = field(default_factory=list)


def known_presets() -> dict[str, DatasetPreset]:
    return {
        "builtin:zigzag": DatasetPreset(
            "zigzag orders of six digits, the built-in task",
            {
                "data": ["  train: builtin:zigzag"],
                "reward": ["  functions:", "    zigzag: 1.0  # 1 if the digits of the answer rise and fall in turn"],
                "eval": ["  datasets: [builtin:zigzag_heldout]"],
            },
            *(7, 10, 7.0, 80),
            held_out=True,
        ),
        "openai/gsm8k": _mathematics(
            *("grade-school mathematics (GSM8K)", "openai/gsm8k", "question", "answer", 512, 1024, 300.0, 200),
            subset="main",
            test="test",
        ),
        "DigitalLearningGmbH/MATH-lighteval": _mathematics(
            "competition mathematics (MATH)",
            *("DigitalLearningGmbH/MATH-lighteval", "problem", "solution", 1024, 2048, 700.0, 300),
            test="test",
        ),
        "agentica-org/DeepScaleR-Preview-Dataset": _mathematics(
            "competition mathematics (DeepScaleR)",
            *("agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer", 1024, 8192, 3000.0, 500),
        ),
        "BytedTsinghua-SIA/DAPO-Math-17k": _mathematics(
            "competition mathematics (DAPO)",
            *("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model.ground_truth", 2048, 8192, 3000.0, 500),
            system="",
        ),
    }


def _mathematics(
    goal: str,
    hub: str,
    question: str,
    answer: str,
    prompt: int,
    new: int,
    mean: float,
    steps: int,
    *,
    subset: str = "",
    test: str = "",
    system: str = BOXED,
) -> DatasetPreset:
    """Questions with one right answer, from the hub as they are there."""
    inside = [f"      path: {hub}"] + [f"      subset: {subset}"] * bool(subset)
    data = [f"  prompt_key: {question}", f"  answer_key: {answer}  # its last number or box is what counts"]
    data += [f"  system: '{system}'"] * bool(system)
    data += [
        "  overlong: skip  # prompts that are too long are left out, and counted",
        "  train:",
        "    train:",
        *inside,
    ]
    yaml = {
        "data": data,
        "reward": [
            "  functions:",
            "    math: 1.0  # 1 if the final answer equals the data's; see rlsys/rewards/README.md",
        ],
    }
    if test:
        yaml["eval"] = ["  datasets:", "    held_out:", *inside, f"      split: {test}"]
    return DatasetPreset(goal, yaml, prompt, new, mean, steps, held_out=bool(test))


def find_preset(data: str, reward: str, model: ModelShape) -> DatasetPreset:
    """A set by its hub name, or a file or folder whose first row is looked at."""
    found = next((s for name, s in known_presets().items() if name.lower() == data.lower()), None)
    if found is None:
        found = _other(data, reward or "math")
    elif reward:
        yaml = found.yaml | {"reward": ["  functions:", f"    {reward}: 1.0"]}
        found = DatasetPreset(
            found.goal,
            yaml,
            found.prompt_tokens,
            found.max_new_tokens,
            found.mean_tokens,
            found.steps,
            found.held_out,
            found.notes,
        )
    name = reward or ("" if data.lower() in (n.lower() for n in known_presets()) else "math")
    if name and ":" not in name and name not in REWARDS:
        raise ConfigError(f"--reward {name}: known are {', '.join(REWARDS)}, and your own as file.py:function.")
    if (data == "builtin:zigzag") != (model.name == "builtin:tiny"):
        raise ConfigError("builtin:tiny knows digits only, and builtin:zigzag is its task: take both, or neither.")
    return found


def _other(data: str, reward: str) -> DatasetPreset:
    try:
        place = locate_data(Origin(data))
    except ConfigError as error:
        raise ConfigError([f"--data: {problem}" for problem in error.problems]) from None
    fields = {} if place.kind == "hub" else _first_row(data, place)
    question, sure_of_question = _key(fields, QUESTIONS)
    answer, sure_of_answer = _key(fields, ANSWERS)
    notes = []
    if not (sure_of_question and sure_of_answer):
        there = f"its first row has {', '.join(fields)}: set" if fields else "look at a row, and set"
        notes.append(f"The fields of {data} are a guess: {there} data.prompt_key and data.answer_key.")
    yaml = {
        "data": [
            f"  train: {data}",
            f"  prompt_key: {question}" + CHECK * (not sure_of_question),
            f"  answer_key: {answer}" + CHECK * (not sure_of_answer),
            *["  as_chat: true  # a text becomes a user message; leave it out for base models"]
            * (not isinstance(fields.get(question), list)),
            "  overlong: skip  # prompts that are too long are left out, and counted",
        ],
        "reward": ["  functions:", f"    {reward}: 1.0  # CHECK THIS: what is right; see rlsys/rewards/README.md"],
    }
    return DatasetPreset(data, yaml, 1024, 1024, 400.0, 200, notes=notes)


def _first_row(data: str, place: DataLocation) -> dict[str, Any]:
    first = next(read_rows(Origin(data), place), None)
    if first is None:
        raise ConfigError(f"--data {data}: it has no rows.")
    if isinstance(first, BadRow):
        raise ConfigError(f"--data {first}")
    return first.fields


def _key(fields: dict[str, Any], usual: tuple[str, ...]) -> tuple[str, bool]:
    """The field that is called as such fields usually are, and whether it is the only one."""
    named = {name.lower(): name for name in fields}
    found = [named[name] for name in usual if name in named]
    return (found or [usual[0]])[0], len(found) == 1
