"""`rlsys import gguf:PATH`: a GGUF file, de-quantized to float32.

`gguf_architectures` says what becomes of keys and tensors, `gguf_tokenizer` of the vocabulary. `gguf_checks` compares the
result with the file.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from launch.tools.imports.gguf_architectures import (
    ORIGINAL,
    Facts,
    find_architecture,
    place_tensors,
    read_config,
    refuse_left,
)
from launch.tools.imports.gguf_checks import check_tokens, compare_logprobs, compare_weights, metadata
from launch.tools.imports.gguf_tokenizer import Vocabulary, read_vocabulary, write_tokenizer
from launch.tools.imports.trained_directory import one_line, require_space
from rlsys.errors import ConfigError

BYTES_PER_PARAMETER = 4  # float32 holds every de-quantized value
DESCRIPTIONS = ("GGUF.", "general.", "quantize.", "split.", "mradermacher.", "tokenizer.")  # the last is read apart


def import_gguf(name: str, folder: Path) -> list[str]:
    """Writes model, tokenizer and model card into the folder."""
    path = Path(name).expanduser()
    reader = open_gguf(path)
    facts = metadata(reader)
    require_model(facts)
    vocabulary = read_vocabulary(facts)
    require_space(folder, BYTES_PER_PARAMETER * sum(int(t.n_elements) for t in reader.tensors))
    folder.mkdir(parents=True)
    write_model(reader, facts, vocabulary, folder)
    write_tokenizer(vocabulary, folder)
    (folder / "README.md").write_text(model_card(path, facts))
    return [
        f"from {path}",
        *(compare_weights(reader, folder), check_tokens(reader, folder), compare_logprobs(reader, folder)),
    ]


def open_gguf(path: Path) -> Any:
    """Returns gguf's reader of a whole file."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist, or is no file.")
    with path.open("rb") as file:
        begin = file.read(4)
    if begin != b"GGUF":
        raise ConfigError(f"{path} is not a GGUF file: it begins with {begin!r}.")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(f"GGUF files need the package {error.name}: pip install 'rlsys[gguf]'") from None
    try:
        reader = GGUFReader(path)
        parts = metadata(reader).get("split.count", 1)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError) as error:
        size = path.stat().st_size
        raise ConfigError(
            f"{path} is damaged or cut off: {one_line(error)}. Its size is {size:,} bytes; compare it with the "
            "original's, and download it again."
        ) from None
    if parts > 1:
        raise ConfigError(
            f"{path} is one of {parts} parts. Join them first: llama-gguf-split --merge {path} whole.gguf"
        )
    return reader


def require_model(facts: Facts) -> None:
    """Refuses what is no model of a known architecture, and keys that nobody here understands."""
    name = facts.get("general.architecture")
    find_architecture(str(name))
    if (kind := facts.get("general.type", "model")) != "model":
        raise ConfigError(f"The file holds a {kind}, not a model (general.type).")
    refuse_left({key: value for key, value in facts.items() if not key.startswith((*DESCRIPTIONS, f"{name}."))})


def write_model(reader: Any, facts: Facts, vocabulary: Vocabulary, folder: Path) -> None:
    import gguf
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tensors = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    places = place_tensors(facts, set(tensors))
    ids = {"bos_token_id": vocabulary.bos, "eos_token_id": vocabulary.eos, "pad_token_id": vocabulary.pad}
    settings = read_config(facts, tensors) | ids
    if len(vocabulary.tokens) != settings["vocab_size"]:
        raise ConfigError(
            f"The file has {len(vocabulary.tokens)} tokens, and token_embd.weight {settings['vocab_size']} rows. {ORIGINAL}"
        )
    config = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    weights = {}
    for source, (target, _, formula) in places.items():
        if tensors[source].shape != shapes[target]:
            raise ConfigError(
                f"{source} has the shape {tensors[source].shape}; by the file's keys, it should be {shapes[target]}."
            )
        if not np.isfinite(tensors[source]).all():
            raise ConfigError(f"{source} holds NaN or infinity. The file is damaged; download it again.")
        weights[target] = torch.from_numpy(np.array(formula(tensors.pop(source)), np.float32))
    model.load_state_dict(weights, strict=False, assign=True)  # what is missing is tied, or computed
    model.tie_weights()
    if vocabulary.ends:
        model.generation_config.eos_token_id = sorted({vocabulary.eos, *vocabulary.ends} - {None})
    model.save_pretrained(folder)


def model_card(path: Path, facts: Facts) -> str:
    """Returns a card with the license and the origin, in the hub's form."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name, license_name = facts.get("general.name", path.stem), facts.get("general.license", "unknown")
    link = facts.get("general.license.link")
    license_note = f"The license is {license_name}{f', {link}' if link else ''}, by the file's metadata."
    origin = f"De-quantized to float32 by `rlsys import` from `{path.name}`, SHA-256 `{digest}`."
    return f"---\nlicense: {license_name}\n---\n\n# {name}\n\n{origin} {license_note}\n"
