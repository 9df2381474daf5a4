"""The text model within one that takes images or sound too. rlsys trains it; the rest stays behind.

transformers loads the whole model. Its layers and output become a model of the text's own class, which is shown to compute
the same log-probs.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from launch.tools.imports.trained_directory import one_line, require_space
from rlsys.config.schema import ConfigError

# Without images, these compute what the models of text compute; transformers has no class for them alone.
SAME_ON_TEXT = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
BESIDE_WEIGHTS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "*.jinja",
    "*.md",
    "LICENSE*",
    "NOTICE*",
)
TOKENS = 64  # that both models are tried on
LARGEST_GAP = 1e-3  # of log-probs, in the model's dtype: both compute the same operations


def import_directory(name: str, folder: Path) -> list[str]:
    """`rlsys import dir:PATH`: writes the text model of a directory into the folder."""
    source = Path(name).expanduser()
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source} has no config.json, so it is no directory of a model.")
    if not has_more_than_text(source):
        raise ConfigError(f"{source} is a model of text already: name it in model.path.")
    return [f"from {source.resolve()}", *write_text_model(source, folder)]


def keep_text_alone(folder: Path) -> list[str]:
    """Replaces a directory by one of its text model."""
    whole = folder.rename(folder.with_name(f"{folder.name}.whole"))
    try:
        return write_text_model(whole, folder)
    finally:
        shutil.rmtree(whole)


def has_more_than_text(folder: Path) -> bool:
    return isinstance(json.loads((folder / "config.json").read_text()).get("text_config"), dict)


def write_text_model(source: Path, folder: Path) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    require_space(folder, sum(file.stat().st_size for file in source.glob("*.safetensors")))
    whole = load_model(source, AutoModelForMultimodalLM)
    folder.mkdir(parents=True)
    text_model_of(whole).save_pretrained(folder)
    for pattern in BESIDE_WEIGHTS:
        for file in source.glob(pattern):
            shutil.copy(file, folder)
    text = load_model(folder, AutoModelForCausalLM)
    gap = largest_gap(whole, text)
    if not gap <= LARGEST_GAP:
        raise ConfigError(
            f"The text model alone computes other log-probs than within {whole.config.model_type}: they differ by up to {gap:.2g}. "
            "Use a model of text."
        )
    left = sum(p.numel() for p in whole.parameters()) - sum(p.numel() for p in text.parameters())
    return [
        f"the text model of a {whole.config.model_type} model; {left:,} parameters for images or sound are left out",
        f"log-probs of {TOKENS} tokens compared with the whole model's: they differ by at most {gap:.2g}",
    ]


def load_model(folder: Path, kind: Any) -> Any:
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        return kind.from_pretrained(folder, dtype="auto").eval()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(f"transformers cannot load this model: {one_line(error)} Use a model of text.") from None


def text_model_of(whole: Any) -> Any:
    """The same tensors in a model of the text's class."""
    import torch

    config = text_config(whole)
    with torch.device("meta"):
        text = text_class(config)(config)
    tensors: dict[str, Any] = {}
    for inner, outer in (
        (decoder(text), decoder(whole)),
        (text.get_output_embeddings(), whole.get_output_embeddings()),
    ):
        place = next(name for name, module in text.named_modules() if module is inner)
        tensors |= {f"{place}.{name}": tensor for name, tensor in outer.state_dict().items()}
    missing, unexpected = text.load_state_dict(tensors, assign=True, strict=False)
    if missing or unexpected:
        raise ConfigError(
            f"{type(text).__name__} has other tensors than the text model of {whole.config.model_type}, such as "
            f"{[*missing, *unexpected][0]}. Use a model of text."
        )
    text.tie_weights()
    return text


def decoder(model: Any) -> Any:
    """The layers, which lie next to the embeddings."""
    embeddings = model.get_input_embeddings()
    return next(module for module in model.modules() if any(child is embeddings for child in module.children()))


def text_config(whole: Any) -> Any:
    """The text's config.json, with what the whole one says of tied weights and of tokens."""
    from transformers import CONFIG_MAPPING

    inner, outer = whole.config.get_text_config(), whole.config.to_diff_dict()
    settings = inner.to_dict() | {
        name: outer[name] for name in outer if name.endswith("_token_id") and name[:3] in ("bos", "eos", "pad")
    }
    settings["tie_word_embeddings"] = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    kind = SAME_ON_TEXT.get(inner.model_type, inner.model_type)
    known = CONFIG_MAPPING[kind]
    return known.from_dict(
        {name: value for name, value in settings.items() if name not in ("model_type", "architectures")}
    )


def text_class(config: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise ConfigError(
            f"transformers has no class for {config.model_type} models alone. Use a model of text."
        ) from None


def largest_gap(whole: Any, text: Any) -> float:
    import torch

    settings = whole.config.to_dict()
    meaning_more = [number for name, number in settings.items() if "token" in name]  # such as an image's place
    ids = torch.tensor([[i for i in range(1, text.config.vocab_size) if i not in meaning_more][:TOKENS]])
    with torch.no_grad():
        one, other = (m(input_ids=ids, use_cache=False).logits.float().log_softmax(-1) for m in (whole, text))
    return float((one - other).abs().max())
