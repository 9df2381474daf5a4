"""The models of a run and what they must agree in: tokenizers, limits and control tokens."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

from rlsys.checks.model import check_model_fits
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.models.config_json import ModelLimits, limits_from_config
from rlsys.runs.progress import Note
from rlsys.tasks.builtin import TINY_MODELS
from workers.fleet.watchdog import Watchdog
from workers.start.imports import skip_generation_import


def find_model(path: str, config: Config, note: Note) -> str:
    """The model as a directory or a hub name. A built-in model is made on first use."""
    if path in TINY_MODELS:
        return str(TINY_MODELS[path].folder(config.run.seed, note))
    directory = Path(path).expanduser()
    return str(directory) if directory.is_dir() else path


def find_policy_model(config: Config, model: str, nodes: int, watchdog: Watchdog) -> tuple[str, Any, ModelLimits]:
    """`model`, or the one at model.path; its tokenizer and limits. Raises `ConfigError` if it does not fit."""
    path = model or find_model(config.model.path, config, watchdog.note)
    if config.model.path in TINY_MODELS and not model and nodes > 1:
        path = copy_model_into_run(watchdog.logs.parent, path)
    tokenizer, limits = load_tokenizer(path, config), load_limits(path, config)
    if problems := check_model_fits(config, path):
        raise ConfigError(problems)
    require_end_token(tokenizer, limits.vocabulary, path)
    return path, tokenizer, limits


def require_end_token(tokenizer: Any, vocabulary: int, path: str) -> None:
    """Raises `ConfigError` if the tokenizer's end of a sequence is no token of the model."""
    end = tokenizer.eos_token_id
    if vocabulary and end is not None and end >= vocabulary:
        raise ConfigError(
            f"model.path: the tokenizer in {path} ends sequences with `{tokenizer.eos_token}`, its token {end}, and the "
            f"model's {vocabulary:,} tokens end at {vocabulary - 1}. Use the tokenizer that it was trained with, or give the "
            "model an embedding of that token and train it to write it."
        )


def find_reference_model(config: Config, tokenizer: Any, limits: ModelLimits, note: Note) -> tuple[str, ModelLimits]:
    """The model at reference.path, and the limits of it and of the policy's model, `limits`, together."""
    path = find_model(config.reference.path, config, note)
    require_same_vocabulary(tokenizer, load_tokenizer(path, config, "reference.path"), config)
    own = load_limits(path, config)
    window = min(filter(None, (limits.window, own.window)), default=0)
    return path, ModelLimits(window, min(filter(None, (limits.vocabulary, own.vocabulary)), default=0))


def require_same_vocabulary(tokenizer: Any, other: Any, config: Config) -> None:
    """Raises `ConfigError` if the reference reads other tokens into the policy's numbers."""
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if differing := [token for token, i in ours.items() if theirs.get(token) != i]:
        raise ConfigError(
            f"reference.path: {config.reference.path} has another tokenizer than {config.model.path}: {len(differing):,} "
            f"of {len(ours):,} tokens differ, such as {differing[0]!r}. Use a model of the same family."
        )


def find_control_tokens(config: Config, tokenizer: Any, vocabulary: int) -> dict[int, float]:
    """algorithm.control_tokens by their ids. Raises `ConfigError` for a text that is not one token of the model."""
    reward_by_id = {}
    for text, reward in config.algorithm.control_tokens.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"algorithm.control_tokens: `{text}` is {len(ids)} tokens of {config.model.path}, and must be one. Name "
                "another, or add it to the tokenizer and train the model to begin with it."
            )
        if tokenizer.decode(ids).strip() != text.strip():
            raise ConfigError(
                f"algorithm.control_tokens: the tokenizer of {config.model.path} does not know `{text}` and reads "
                f"`{tokenizer.decode(ids)}` in its place. Name another, or add it to the tokenizer."
            )
        if vocabulary and ids[0] >= vocabulary:
            raise ConfigError(
                f"algorithm.control_tokens: `{text}` is token {ids[0]} of the tokenizer, and the model's {vocabulary:,} tokens "
                f"end at {vocabulary - 1}. Name another, or give the model an embedding of it and train it to begin with it."
            )
        reward_by_id[ids[0]] = reward
    return reward_by_id


def load_tokenizer(path: str, config: Config, option: str = "model.path") -> Any:
    remote = config.model.trust_remote_code
    with contextlib.nullcontext() if remote else skip_generation_import():
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=remote)
    except Exception as error:
        raise ConfigError(f"{option}: no tokenizer could be loaded from {path}: {one_line(error)}") from None


def load_limits(path: str, config: Config) -> ModelLimits:
    from transformers import AutoConfig

    try:
        settings = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except Exception as error:
        raise ConfigError(f"model.path: transformers cannot read {path}: {one_line(error)}") from None
    return limits_from_config(settings.to_dict())


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def copy_model_into_run(run: Path, model: str) -> str:
    """Copies the built-in model into the run directory, which other hosts see. Its cache is on this host only."""
    copy = run / "model"
    if not (run / "config.yaml").is_file():
        return model
    if not copy.is_dir():
        shutil.copytree(model, run / ".model", dirs_exist_ok=True)
        (run / ".model").rename(copy)
    return str(copy)
