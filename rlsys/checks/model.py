"""Checks the model's path, and whether prompts, completions and tensor parallelism fit its shape."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from rlsys.checks.lora import check_targets
from rlsys.config.derived import has_engines
from rlsys.config.schema import Config
from rlsys.forward.heads import sequence_parallel_problem
from rlsys.models.known_shapes import BUILTIN_MODELS, look_up_shape
from rlsys.models.lookup import architecture_problem_of_model, known_model_shape, limits_of_model, problem_of_model
from rlsys.models.shapes import ModelShape, tensor_parallel_problem
from rlsys.models.weight_files import weight_file_problems


def check_model(c: Config) -> Iterator[str]:
    yield from check_path("model.path", c.model.path)
    if c.reference.path:
        yield from check_path("reference.path", c.reference.path)
        for problem in check_window(c, limits_of_model(c.reference.path).window):
            yield f"reference.path: {problem}"
        if problem := architecture_problem_of_model(c.reference.path):
            yield f"reference.path: {problem}"
    for name, model in c.models.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            yield f"models: `{name}` must be a name of small letters, digits and _, such as judge: {{path: {name}}}."
        if model.engines < 1:
            yield f"models.{name}.engines is {model.engines}; it must be 1 or more."
        yield from check_path(f"models.{name}.path", model.path)


def check_path(key: str, path: str) -> Iterator[str]:
    # A hub name is `owner/name` or `name`; anything else is a directory.
    is_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).is_dir()
    if path.startswith("builtin:"):
        if path not in BUILTIN_MODELS:
            yield f"{key} is `{path}`; the built-in models are {', '.join(BUILTIN_MODELS)}."
    elif is_local:
        file = Path(path).expanduser() / "config.json"
        if not file.is_file():
            yield (f"{key}: {file} does not exist. Give a Hugging Face model directory, a hub name, or builtin:tiny.")
        elif not is_json_object(file):
            yield f"{key}: {file} is not a JSON object; the model directory is damaged."
        else:
            yield from (f"{key}: {problem}" for problem in weight_file_problems(file.parent))


def is_json_object(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_text()), dict)
    except ValueError:
        return False


def check_model_fits(c: Config, path: str, model: ModelShape | None = None) -> list[str]:
    """Checks against the model's shape, as far as this machine knows it.

    A hub model that is new to this machine is checked once its config.json has been downloaded. Until then `model` is
    the shape that models of its name usually have; `train` passes none, and waits for the config.json.
    """
    limits = limits_of_model(path)
    problems = [*check_window(c, model.context if model else limits.window)]
    if problems and model and not path.startswith("builtin:") and model == look_up_shape(path):
        problems[0] += (
            " That is the window of what usually is called so; a config.json goes before: "
            f"hf download {path} config.json"
        )
    if problem := problem_of_model(path, c.cluster.device, c.sync.verify):
        problems.append(f"model.path: {problem}")
    shape = model or known_model_shape(path)
    if (
        c.rollout.tensor_parallel > 1
        and shape
        and (problem := tensor_parallel_problem(shape, c.rollout.tensor_parallel))
    ):
        problems.append(problem)
    problems += [*check_targets(c, shape), *check_heads(c, shape)] if shape else []
    vocabulary = shape.vocabulary if shape else limits.vocabulary
    if vocabulary and (unknown := [i for i in c.rollout.stop_token_ids if i >= vocabulary]):
        problems.append(
            f"rollout.stop_token_ids has {unknown[0]}, and the model's {vocabulary:,} tokens end at {vocabulary - 1}. "
            "Correct it, or leave it out."
        )
    return problems


def check_heads(c: Config, model: ModelShape) -> Iterator[str]:
    """Checks whether ranks can share the heads."""
    sharing = c.policy.sequence_parallel
    if sharing > 1 and (problem := sequence_parallel_problem(model.name, model.heads, model.kv_heads, sharing)):
        yield problem


def check_window(c: Config, window: int) -> Iterator[str]:
    if not has_engines(c):
        return
    prompt, limits = c.rollout.max_prompt_tokens, {"rollout.max_new_tokens": c.rollout.max_new_tokens}
    if c.eval.max_new_tokens and c.eval.datasets:
        limits["eval.max_new_tokens"] = c.eval.max_new_tokens
    limits |= {f"eval.datasets.{n}.max_new_tokens": s.max_new_tokens or 0 for n, s in c.eval.datasets.items()}
    for option, new in limits.items():
        total = max(prompt, 1) + new
        if window and total > window:
            yield (
                f"rollout.max_prompt_tokens ({prompt or 'at least 1'}) + {option} ({new}) = {total}, "
                f"but the model's window is {window} tokens. Reduce one of them by {total - window}."
            )
