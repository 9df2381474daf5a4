"""The text model within one that takes images or sound too. rlsys trains it; the rest stays behind.

transformers loads the whole model. Its layers and output become a model of the text's own class, which is shown to compute
the same log-probs.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

from launch.tools.imports.trained_directory import load_tokenizer, load_whole, one_line, require_space
from rlsys.errors import ConfigError
from rlsys.models.families import family_of
from rlsys.models.support import has_more_than_text, model_problem, quantization

OF_IMAGES = ("mrope_section", "mrope_interleaved", "type")  # how these would turn positions in images
NORMALIZES = "norm_topk_prob"  # Qwen3-VL's routers always do; Qwen3's when told
BESIDE_WEIGHTS = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "tekken.json", "*.model"),
    *("vocab*", "merges.txt", "*.jinja", "*.md", "LICENSE*", "NOTICE*"),
)
TOKENS = 64  # that both models are tried on
LARGEST_GAP = 1e-3  # of log-probs, in the model's dtype: both compute the same operations


def import_directory(name: str, folder: Path) -> list[str]:
    """`rlsys import dir:PATH`: writes the text model of a directory into the folder."""
    source = Path(name).expanduser()
    if not takes_more_than_text(source):
        raise ConfigError(f"{source} is a model of text already: name it in model.path.")
    require_trainable(source, name)
    return [f"from {source.resolve()}", *write_text_model(source, folder)]


def keep_text_alone(folder: Path) -> list[str]:
    """Replaces a directory by one of its text model."""
    whole = folder.with_name(f"{folder.name}.whole")
    shutil.rmtree(whole, ignore_errors=True)  # of an import that was killed
    folder.rename(whole)
    try:
        return write_text_model(whole, folder)
    finally:
        shutil.rmtree(whole)


def takes_more_than_text(folder: Path) -> bool:
    return has_more_than_text(read_config(folder))


def read_config(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} has no config.json that can be read: {one_line(error)}") from None
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ConfigError(f"{folder / 'config.json'} is not a model's: it has no model_type.")
    return settings


def require_trainable(source: Path, name: str) -> None:
    """Raises `ConfigError` if config.json alone says that its text cannot be trained: weights take long to come."""
    settings = read_config(source)
    trained = settings if quantization(settings) or not has_more_than_text(settings) else text_settings(source)
    if problem := model_problem(trained, "gpu", verify=False):
        raise ConfigError(f"{name}: {problem}")


def text_settings(source: Path) -> dict[str, Any]:
    """The config.json of the text model within another, by the config.json of that one."""
    import torch
    from transformers import AutoConfig, AutoModelForMultimodalLM

    try:
        with torch.device("meta"):
            whole = AutoModelForMultimodalLM.from_config(AutoConfig.from_pretrained(source))
        return dict(text_model_of(whole).config.to_dict())
    except ConfigError:
        raise
    except Exception:  # some can be built with their weights only; `take_text` says what is wrong with others
        return {}


def write_text_model(source: Path, folder: Path) -> list[str]:
    settings = read_config(source)
    require_space(folder, sum(file.stat().st_size for file in source.glob("*.safetensors")))
    try:
        facts = take_text(source, folder)
    except ConfigError:
        raise
    except Exception as error:  # families differ in more than transformers' interface says
        raise ConfigError(
            f"The text model of this {settings.get('model_type')} model cannot be taken: {type(error).__name__}: "
            f"{one_line(error)} Use a model of text."
        ) from None
    for pattern in BESIDE_WEIGHTS:
        for file in source.glob(pattern):
            shutil.copy(file, folder)
    keep_chat_template(source, folder)
    return facts


def take_text(source: Path, folder: Path) -> list[str]:
    """Writes the model. Never holds two at the same time: a model and the text model within it share their tensors."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    whole = load_whole(source, AutoModelForMultimodalLM)
    kind, size, ids = whole.config.model_type, whole.num_parameters(), tokens_to_try(whole.config)
    wanted = logprobs(whole, ids)
    text_model_of(whole).save_pretrained(folder)
    del whole
    text = load_whole(folder, AutoModelForCausalLM)
    gap = float((logprobs(text, ids) - wanted).abs().max())
    if math.isnan(gap):
        raise ConfigError("The model computes NaN: its weights are damaged. Download them again.")
    if gap > LARGEST_GAP:
        raise ConfigError(
            f"The text model alone computes other log-probs than within {kind}: they differ by up to {gap:.2g}. Use a model of "
            "text."
        )
    return [
        f"the text model of a {kind} model; {size - text.num_parameters():,} parameters for images or sound are left out",
        f"log-probs of {ids.shape[1]} tokens compared with the whole model's: they differ by at most {gap:.2g}",
    ]


def text_model_of(whole: Any) -> Any:
    """The same tensors in a model of the text's class."""
    import torch

    config = text_config(whole)
    with torch.device("meta"):
        text = text_class(config)(config)
    tensors: dict[str, Any] = {}
    outputs = text.get_output_embeddings(), whole.get_output_embeddings()
    for inner, outer in ((decoder(text), decoder(whole)), outputs):
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
    settings = inner.to_dict() | {n: outer[n] for n in ("bos_token_id", "eos_token_id", "pad_token_id") if n in outer}
    settings["tie_word_embeddings"] = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    kind = family_of(inner.model_type).same_text_as or inner.model_type
    if kind != inner.model_type:
        if rope := settings.get("rope_parameters"):
            settings["rope_parameters"] = {name: value for name, value in rope.items() if name not in OF_IMAGES}
        settings.setdefault(NORMALIZES, True)
    named = ("model_type", "architectures")
    return CONFIG_MAPPING[kind].from_dict({name: value for name, value in settings.items() if name not in named})


def text_class(config: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise ConfigError(
            f"transformers has no class for {config.model_type} models alone. Use a model of text."
        ) from None


def tokens_to_try(config: Any) -> Any:
    """[1, T] None of them means more than text, such as the place of an image."""
    import torch

    special = [number for name, number in config.to_dict().items() if "token" in name]
    vocabulary = config.get_text_config().vocab_size
    return torch.tensor([[i for i in range(1, vocabulary) if i not in special][:TOKENS]])


def logprobs(model: Any, ids: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)


def keep_chat_template(source: Path, folder: Path) -> None:
    """Takes it from the file of a processor, which tokenizers do not read."""
    file = source / "chat_template.json"
    if file.is_file() and load_tokenizer(folder).chat_template is None:
        (folder / "chat_template.jinja").write_text(json.loads(file.read_text())["chat_template"])
