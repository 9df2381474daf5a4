"""Compares an imported directory with its GGUF file.

weights    exactly, tensor by tensor, each with the one formula that is its own
tokens     with those of a plain tokenizer with the file's vocabulary
log-probs  with those of a plain forward pass of the file's keys and tensors
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from launch.tools.imports.gguf_architectures import ORIGINAL, Array, Facts, place_tensors
from launch.tools.imports.gguf_plain_tokens import PlainTokenizer
from launch.tools.imports.gguf_tokenizer import read_vocabulary
from launch.tools.imports.trained_directory import load_tokenizer, load_whole
from rlsys.errors import ConfigError

TEXTS = (
    *(
        "max(12, 7) = 12",
        "The cat sat on the mat.\n",
        "def f(x):\n    return x",
        "Grüße, 世界 🙂",
        " 3 spaces:   \t\n\n x",
    ),
    *("I'd say IT'S 1234567 times 'RE-READ'", "½ ² ٣ Ⅷ año", "\r\n\r\n  a\u00a0b "),
)
RANDOM_TEXTS, TOKENS_PER_TEXT = 30, 12
TRIED, LAST = 64, 64  # tokens beyond the window; the last ones are compared
FARTHEST = 8192  # position: further ones are not exact in float32
LARGEST_GAP = 2e-3  # of log-probs


def metadata(reader: Any) -> Facts:
    return {name: field.contents() for name, field in reader.fields.items()}


def compare_weights(reader: Any, folder: Path) -> str:
    """Requires that each tensor of the model is one of the file, and the other way round."""
    import gguf

    left, relations = {tensor.name: tensor for tensor in reader.tensors}, Counter[str]()
    places = place_tensors(metadata(reader), set(left))
    sources = {target: (source, words, formula) for source, (target, words, formula) in places.items()}
    for name, saved in saved_tensors(folder):
        if name not in sources:
            raise ConfigError(f"{name} of the model comes from no tensor of the file, so it cannot be checked.")
        source, words, formula = sources.pop(name)
        if not np.array_equal(
            saved, formula(gguf.dequantize(left[source].data, left[source].tensor_type)), equal_nan=True
        ):
            raise ConfigError(f"{name} of the model differs from {source} of the file, where it should be {words}.")
        relations[words] += 1
    if sources:
        raise ConfigError(f"{next(iter(sources))} is missing in the model's weights.")
    return "weights compared with the file's: " + ", ".join(f"{n} {words}" for words, n in relations.items())


def saved_tensors(folder: Path) -> Iterator[tuple[str, Array]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def check_tokens(reader: Any, folder: Path) -> str:
    """Requires the file's tokens for some texts, of which most are random ones of its vocabulary."""
    vocabulary = read_vocabulary(metadata(reader))
    tokenizer, plain = load_tokenizer(folder), PlainTokenizer(vocabulary)
    random = np.random.default_rng(0)
    whole = [vocabulary.tokens[i] for i in vocabulary.whole]
    texts = [*TEXTS, *(f"a {token} b{token}c" for token in random.permutation(whole)[:RANDOM_TEXTS])]
    usual = [i for i, kind in enumerate(vocabulary.types) if kind == 1]
    for _ in range(RANDOM_TEXTS if usual else 0):
        texts.append(plain.spell(random.choice(usual, TOKENS_PER_TEXT)))
    for text in texts:
        ids, wanted = tokenizer(text)["input_ids"], plain(text)
        if ids != wanted:
            raise ConfigError(
                f"The tokenizer reads {text!r} as {[vocabulary.tokens[i] for i in ids]}; by the file's vocabulary it is "
                f"{[vocabulary.tokens[i] for i in wanted]}. {ORIGINAL}"
            )
    return f"tokens of {len(texts)} texts compared with a plain tokenizer's: equal"


def compare_logprobs(reader: Any, folder: Path) -> str:
    """Requires the log-probs of a plain forward pass of the file, beyond its window and at far positions."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    from launch.tools.imports.gguf_forward import file_logprobs

    facts, tensors = metadata(reader), {tensor.name: tensor for tensor in reader.tensors}

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(tensors[name].data, tensors[name].tensor_type).astype(np.float32))

    model = load_whole(folder, AutoModelForCausalLM)
    model.set_attn_implementation("eager")
    ids, positions = tokens_to_try(model.config)
    with torch.no_grad():
        wanted = file_logprobs(facts, read, set(tensors), ids, positions, LAST)
        outputs = model.eval()(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=torch.ones_like(ids)[None],  # without it, a jump of positions would begin another text
            logits_to_keep=LAST,
            use_cache=False,
        )
    gap = (outputs.logits[0].float().log_softmax(-1) - wanted).abs().max().item()
    if not gap <= LARGEST_GAP:
        raise ConfigError(
            f"The imported model computes other log-probs than the file: they differ by up to {gap:.2g}, and by "
            f"rounding alone they would by less than {LARGEST_GAP:g}."
        )
    return f"log-probs after {LAST} of {len(ids)} tokens compared with a plain forward pass: they differ by at most {gap:.2g}"


def tokens_to_try(config: Any) -> tuple[Any, Any]:
    """Random tokens, more than a window; the second half is as far away as the model sees."""
    import torch

    longest = config.max_position_embeddings
    count = max(TRIED, min((getattr(config, "sliding_window", None) or 0) + TRIED, longest))
    ids = torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(count)
    positions[count // 2 :] += max(0, min(longest, FARTHEST) - count)
    return ids, positions
