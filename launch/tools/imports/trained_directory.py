"""Checks that a model directory can be trained: it loads whole, its weights are finite, and it has a tokenizer."""

import re
import shutil
from pathlib import Path
from typing import Any

from rlsys.data.bos import chat_begins_with_bos
from rlsys.errors import ConfigError


def require_space(folder: Path, size: int) -> None:
    """Raises `ConfigError` if the disk of a folder, which need not exist, has no room for `size` bytes."""
    free = shutil.disk_usage(folder.parent).free
    if free < size:
        raise ConfigError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, and the model needs {size / 1e9:.1f} GB. "
            "Choose a directory on another disk."
        )


def check_directory(folder: Path) -> list[str]:
    """Loads model and tokenizer as training does. Returns what a user should know, in sentences."""
    return [*check_weights(folder), *describe_tokenizer(folder), describe_license(folder)]


def check_weights(folder: Path) -> list[str]:
    from transformers import AutoModelForCausalLM

    model = load_whole(folder, AutoModelForCausalLM)
    if broken := [name for name, p in model.named_parameters() if not p.isfinite().all()]:
        raise ConfigError(f"{broken[0]} holds NaN or infinity. The weights are damaged; download them again.")
    parameters = list(model.parameters())
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    return [f"{sum(p.numel() for p in parameters):,} parameters, {' and '.join(kinds)}, all finite"]


def load_whole(folder: Path, kind: Any) -> Any:
    """Loads a model by one of transformers' classes, which would draw missing tensors at random."""
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, loading = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError(f"The model cannot be loaded: {one_line(error)}") from None
    if missing := sorted(loading["missing_keys"]):
        raise ConfigError(
            f"{len(missing)} tensors of the model are not in the weights, such as {missing[0]}. "
            "The files are not whole, or are for another architecture. Download them again."
        )
    return model


def describe_tokenizer(folder: Path) -> list[str]:
    tokenizer = load_tokenizer(folder)
    if tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        begin = f"texts begin with {tokenizer.bos_token}"
    elif chat_begins_with_bos(tokenizer):
        begin = f"chats begin with {tokenizer.bos_token}, plain texts do not"
    else:
        begin = "texts begin with no BOS token"
    return [begin, "chat template: " + ("yes" if tokenizer.chat_template else "none; this may be a base model")]


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"The tokenizer cannot be loaded: {one_line(error)}") from None


def describe_license(folder: Path) -> str:
    """Returns the license that the model card names."""
    card = folder / "README.md"
    head = card.read_text(errors="replace").split("\n---", 1)[0] if card.is_file() else ""
    name = re.search(r"^license:\s*(\S.*)$", head, re.M)
    return f"license: {name[1]}" if name else "license: unknown; read it where the model comes from"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
