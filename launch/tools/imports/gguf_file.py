"""`rlsys import gguf:PATH`: a GGUF file, de-quantized to float32.

transformers converts names, order and tokenizer. `gguf_checks` compares the result with what gguf itself reads.
"""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from launch.tools.imports.gguf_checks import check_tokens, compare_weights
from launch.tools.imports.trained_directory import one_line, require_space
from rlsys.config.schema import ConfigError

BYTES_PER_PARAMETER = 4  # float32 holds every de-quantized value


def import_gguf(name: str, folder: Path) -> list[str]:
    """Writes model, tokenizer and model card into the folder."""
    path = Path(name).expanduser()
    reader = open_gguf(path)
    require_space(folder, BYTES_PER_PARAMETER * sum(int(t.n_elements) for t in reader.tensors))
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as source:  # transformers would also read other files next to the GGUF file
        (Path(source) / "model.gguf").symlink_to(path.resolve())
        write_model(Path(source), folder)
        write_tokenizer(Path(source), metadata(reader), folder)
    (folder / "README.md").write_text(model_card(path, metadata(reader)))
    return [f"from {path}", compare_weights(reader, folder), check_tokens(reader, folder)]


def open_gguf(path: Path) -> Any:
    """Returns gguf's reader of a whole file."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist, or is no file.")
    with path.open("rb") as file:
        begin = file.read(4)
    if begin != b"GGUF":
        raise ConfigError(f"{path} is not a GGUF file: it begins with {begin!r}.")
    try:
        import accelerate  # noqa: F401  transformers asks for it
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


def metadata(reader: Any) -> dict[str, Any]:
    """Returns the file's single values: numbers and texts, no lists."""
    return {name: f.contents() for name, f in reader.fields.items() if len(f.data) == 1 and len(f.types) == 1}


def write_model(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file="model.gguf", dtype=torch.float32)
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"transformers cannot read this model: {one_line(error)} Import it from the hub instead: hf:NAME"
        ) from None
    # A model loaded from GGUF counts as quantized and cannot be saved; a plain one with its weights can.
    settings = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    with torch.device("meta"):
        model = type(loaded)(type(loaded.config).from_dict(settings))
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)


def write_tokenizer(source: Path, facts: dict[str, Any], folder: Path) -> None:
    """Writes the tokenizer, which puts BOS before a text if the file asks for it."""
    from tokenizers import processors
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file="model.gguf")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"transformers cannot read this tokenizer: {one_line(error)}") from None
    tokenizer.chat_template = tokenizer.chat_template or facts.get("tokenizer.chat_template")
    bos = tokenizer.bos_token
    asked = facts.get("tokenizer.ggml.add_bos_token", facts.get("tokenizer.ggml.model") == "llama")
    if asked and bos and tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id]:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    tokenizer.save_pretrained(folder)


def model_card(path: Path, facts: dict[str, Any]) -> str:
    """Returns a card with the license and the origin, in the hub's form."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name, license_name = facts.get("general.name", path.stem), facts.get("general.license", "unknown")
    link = facts.get("general.license.link")
    license_note = f"The license is {license_name}{f', {link}' if link else ''}, by the file's metadata."
    origin = f"De-quantized to float32 by `rlsys import` from `{path.name}`, SHA-256 `{digest}`."
    return f"---\nlicense: {license_name}\n---\n\n# {name}\n\n{origin} {license_note}\n"
