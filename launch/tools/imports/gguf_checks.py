"""Compares an imported model with its GGUF file, as the gguf package itself reads that.

weights   gguf's table of names and gguf's de-quantization, tensor by tensor
tokens    the spelling of each token of a few texts, by the vocabulary in the file
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from launch.tools.imports.trained_directory import load_tokenizer
from rlsys.config.schema import ConfigError

TEXTS = ("max(12, 7) = 12", "The cat sat on the mat.\n", "def f(x):\n    return x", "Grüße, 世界 🙂")


def compare_weights(reader: Any, folder: Path) -> str:
    """Requires that each tensor of the model is one of the file, and the other way round."""
    import gguf

    architecture = reader.fields["general.architecture"].contents()
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    blocks = reader.fields[f"{architecture}.block_count"].contents()
    names = gguf.get_tensor_name_map(architectures[architecture], blocks)
    left, relations = {tensor.name: tensor for tensor in reader.tensors}, Counter[str]()
    for name, saved in saved_tensors(folder):
        source = left.pop(names.get_name(name, (".weight", ".bias")) or "", None)
        if source is None:
            raise ConfigError(f"{name} of the model comes from no tensor of the file, so it cannot be checked.")
        relation = describe_relation(saved, gguf.dequantize(source.data, source.tensor_type))
        if not relation:
            raise ConfigError(f"{name} of the model differs from {source.name} of the file as gguf reads it.")
        relations[relation] += 1
    if left:
        raise ConfigError(
            f"{len(left)} tensors of the file have no place in the model, such as {next(iter(left))}: transformers "
            "would leave them out. Import the model from the hub instead: hf:NAME"
        )
    return "weights compared with gguf's own: " + ", ".join(f"{n} {relation}" for relation, n in relations.items())


def saved_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def describe_relation(saved: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> str:
    """Returns how the saved values follow from the file's, or an empty text."""
    if saved.shape != source.shape:
        return ""
    if np.array_equal(saved, source, equal_nan=True):
        return "equal"
    if saved.ndim == 1 and np.array_equal(saved, source - np.float32(1), equal_nan=True):
        return "less 1"  # Gemma's norms multiply by 1 + weight, and a file holds the sum
    if saved.ndim == 2 and sorted(row.tobytes() for row in saved) == sorted(row.tobytes() for row in source):
        return "with rows in another order"  # Llama's queries and keys rotate neighbors, or halves
    return ""


def check_tokens(reader: Any, folder: Path) -> str:
    """Requires that the tokens of a text, spelled by the file's vocabulary, are that text."""
    vocabulary = reader.fields["tokenizer.ggml.tokens"].contents()
    is_sentencepiece = reader.fields["tokenizer.ggml.model"].contents() == "llama"
    tokenizer, checked = load_tokenizer(folder), 0
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id in ids:
            continue
        spelled = spell([vocabulary[i] for i in ids], is_sentencepiece)
        if text not in (spelled, spelled.removeprefix(" ")):
            raise ConfigError(f"The tokenizer reads {text!r} as {spelled!r}, by the vocabulary of the file.")
        checked += 1
    if not checked:
        raise ConfigError("The tokenizer knows none of the texts that it was tried on.")
    return f"tokens of {checked} texts spelled by the file's vocabulary: equal"


def spell(tokens: list[str], is_sentencepiece: bool) -> str:
    """["▁a", "<0xC3>", "<0xBC>"] -> " aü" """
    if is_sentencepiece:
        pieces = [
            bytes([int(byte[1], 16)]) if (byte := re.fullmatch("<0x(..)>", token)) else token.replace("▁", " ").encode()
            for token in tokens
        ]
        return b"".join(pieces).decode(errors="replace")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    return bytes(byte_of[c] for token in tokens for c in token).decode(errors="replace")
