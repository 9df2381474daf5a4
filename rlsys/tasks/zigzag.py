"""The built-in task, tokenizer and model: small enough to learn by GRPO on a laptop in a minute.

Zigzag: the prompt is six distinct digits and `>`, the answer the same digits in an order whose neighbours alternately
rise and fall, starting either way: `864152>` → `481625`. 122 of 720 orders are right, so there is nothing to imitate and
only a verifier can judge. The warm start teaches the model to copy the digits in any order and to stop, never to zigzag.
"""

import hashlib
import inspect
import itertools
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlsys.config.cache import cache_dir

DIGITS = 6
WINDOW = 64  # tokens
SYMBOLS = ["<pad>", "<eos>", *"0123456789", ">"]
HELD_OUT_SETS = 29  # of the 210 sets of six digits; never seen in warm start or training
HELD_OUT_PROMPTS = 256
TRAIN_PROMPTS = 4096
COPY_ROWS = 16384


def is_zigzag(text: str) -> bool:
    signs = [b > a for a, b in itertools.pairwise(text)]
    return all(x != y for x, y in itertools.pairwise(signs))


def digit_sets(held_out: bool) -> list[str]:
    """29 sets held out, and 181 to learn from: the same split for every seed of the run."""
    sets = ["".join(c) for c in itertools.combinations("0123456789", DIGITS)]
    random.Random(20240617).shuffle(sets)
    return sets[:HELD_OUT_SETS] if held_out else sets[HELD_OUT_SETS:]


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of `builtin:zigzag`, `builtin:zigzag_heldout`, and `builtin:copy` and `copy_heldout`, which have answers."""
    if name.startswith("copy"):
        return copy_rows(name)
    held_out = name == "zigzag_heldout"
    rng, sets = random.Random(name), digit_sets(held_out)
    orders = {"".join(rng.sample(rng.choice(sets), DIGITS)) for _ in range(2 * TRAIN_PROMPTS)}
    prompts = sorted(orders)
    rng.shuffle(prompts)
    return [{"prompt": p + ">", "source": "zigzag"} for p in prompts[: HELD_OUT_PROMPTS if held_out else TRAIN_PROMPTS]]


def copy_rows(name: str) -> list[dict[str, Any]]:
    """Shows the digits of a prompt in any order, as the warm start does."""
    held_out = name == "copy_heldout"
    rng, sets = random.Random(name), digit_sets(held_out)
    pairs = [(rng.sample(digits, DIGITS), rng.sample(digits, DIGITS)) for digits in rng.choices(sets, k=COPY_ROWS)]
    shown = pairs[: HELD_OUT_PROMPTS if held_out else COPY_ROWS]
    return [{"prompt": "".join(p) + ">", "answer": "".join(a), "source": "copy"} for p, a in shown]


def untrained_folder(seed: int, note: Callable[[str], None] = lambda _: None) -> Path:
    """The model for a seed before its warm start."""
    recipe = hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[:10]
    return cached_model(f"untrained-{recipe}-seed{seed}", lambda folder: make_model(folder, seed, steps=0, note=note))


def model_folder(seed: int, note: Callable[[str], None] = lambda _: None) -> Path:
    """The warm-started model for a seed as a Hugging Face directory, made on first use and kept in the user's cache."""
    recipe = hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[:10]
    return cached_model(f"tiny-{recipe}-seed{seed}", lambda folder: make_model(folder, seed, note=note))


def cached_model(name: str, make: Callable[[Path], None]) -> Path:
    """A directory in the user's cache, which `make` fills the first time. Others see it once it is whole."""
    folder = cache_dir() / name
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    try:
        make(unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:  # someone else was faster
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def make_model(folder: Path, seed: int, *, steps: int = 450, note: Callable[[str], None] = lambda _: None) -> None:
    """Builds tokenizer and model, warm-starts the model on random orders, and saves both."""
    import torch

    model, tokenizer = build_model(seed), make_tokenizer()
    rows = _warm_start_rows(digit_sets(held_out=False), random.Random(f"warm start {seed}"), tokenizer)

    def loss() -> Any:
        ids = torch.tensor(list(itertools.islice(rows, 64)))
        logits = model(ids[:, :-1]).logits[:, DIGITS:]  # from `>` on: the answer and the end
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, DIGITS + 1 :].flatten())

    warm_start(model, loss, steps, note)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def warm_start(model: Any, loss: Callable[[], Any], steps: int, note: Callable[[str], None]) -> None:
    """Trains the model on the loss of one batch after the other."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min((step + 1) / 20, (steps - step) / (steps - 20))
        batch_loss = loss()
        optimizer.zero_grad()
        batch_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 150 == 0:
            note(f"warm start {step + 1}/{steps}, loss {batch_loss.item():.3f}")


def build_model(seed: int, symbols: list[str] = SYMBOLS) -> Any:
    """330,752 parameters, with 13 symbols. Head size 32 is the smallest that vLLM's CPU attention takes."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(symbols),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            tie_word_embeddings=True,
            initializer_range=0.05,
            max_position_embeddings=WINDOW,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            dtype="float32",
        )
    )


def make_tokenizer(symbols: list[str] = SYMBOLS) -> Any:
    """One token per character, or per longer symbol such as `<think>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer.add_tokens([s for s in symbols[2:] if len(s) > 1])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", model_max_length=WINDOW
    )


def _warm_start_rows(sets: list[str], rng: random.Random, tokenizer: Any) -> Iterator[list[int]]:
    code = {s: i for i, s in enumerate(SYMBOLS)}
    while True:
        digits = rng.choice(sets)
        prompt, answer = rng.sample(digits, DIGITS), rng.sample(digits, DIGITS)
        yield [code[s] for s in [*prompt, ">", *answer, "<eos>"]]
