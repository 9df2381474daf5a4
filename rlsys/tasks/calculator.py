"""A task for tools, and a tiny model that cannot add: it learns to call a calculator, without a mistake in the call.

    prompt   27+58
    model    =31                                        or
    model    <tool_call>{"name": "add", "arguments": {"a": 27, "b": 58}}</tool_call>
    tool     <tool_response>85</tool_response>
    model    =85

The warm start shows the form of both. Most of its answers are numbers drawn at random, without a call. The others copy
the prompt into a call and the result into the answer, and each digit is often a wrong one.
"""

import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlsys.tasks import zigzag

NUMBERS = range(10, 100)
HELD_OUT_SHARE = 8  # one of this many sums is never seen in warm start or training
HELD_OUT_ROWS = 256
TRAIN_ROWS = 4096
CALL_SHARE = 0.3  # of the warm start's answers
SLIP = 0.2  # chance that the warm start draws a digit at random instead of copying it
CALL, END_CALL, RESULT, END_RESULT = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
A, B, END_ARGUMENTS = '{"name": "add", "arguments": {"a": ', ', "b": ', "}}"
SYMBOLS = ["<pad>", "<eos>", *"0123456789", "+", "=", CALL, END_CALL, RESULT, END_RESULT, A, B, END_ARGUMENTS]
TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == "tool" %}{{ "<tool_response>" + message.content + "</tool_response>" }}
    {%- else %}{{ message.content }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + "}</tool_call>" }}
        {%- endfor %}
        {%- if message.role == "assistant" %}{{ "<eos>" }}{% endif %}
    {%- endif %}
{%- endfor %}"""


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of `builtin:calculator` and `builtin:calculator_heldout`."""
    held_out = name == "calculator_heldout"
    pairs = number_pairs(held_out)
    random.Random(name).shuffle(pairs)
    chosen = pairs[: HELD_OUT_ROWS if held_out else TRAIN_ROWS]
    return [{"prompt": f"{a}+{b}", "answer": str(a + b), "source": "calculator"} for a, b in chosen]


def number_pairs(held_out: bool) -> list[tuple[int, int]]:
    """The split is the same for every seed of the run."""
    return [(a, b) for a in NUMBERS for b in NUMBERS if is_held_out(a, b) == held_out]


def is_held_out(a: int, b: int) -> bool:
    return hashlib.sha256(f"{a}+{b}".encode()).digest()[0] % HELD_OUT_SHARE == 0


def model_folder(seed: int, note: Callable[[str], None] = lambda _: None) -> Path:
    """The warm-started model for a seed as a Hugging Face directory, made on first use and kept in the user's cache."""
    source = "".join(inspect.getsource(module) for module in (zigzag, sys.modules[__name__]))
    recipe = hashlib.sha256(source.encode()).hexdigest()[:10]
    return zigzag.cached_model(f"calculator-{recipe}-seed{seed}", lambda folder: make_model(folder, seed, note=note))


def make_model(folder: Path, seed: int, *, steps: int = 450, note: Callable[[str], None] = lambda _: None) -> None:
    """Builds tokenizer and model, warm-starts the model on transcripts of both forms, and saves both."""
    import torch

    model, tokenizer = zigzag.build_model(seed, SYMBOLS), make_tokenizer()
    code, coming = {s: i for i, s in enumerate(SYMBOLS)}, transcripts(random.Random(f"warm start {seed}"))

    def loss() -> Any:
        ids, targets = [], []
        for turns in (next(coming) for _ in range(64)):
            tokens = [(code[s], code[s] if own else 0) for own, symbols in turns for s in symbols]
            ids.append(torch.tensor([token for token, _ in tokens]))
            targets.append(torch.tensor([target for _, target in tokens]))
        batch, wanted = (torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (ids, targets))
        logits = model(batch[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=0)

    zigzag.warm_start(model, loss, steps, note)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def transcripts(rng: random.Random) -> Iterator[list[tuple[bool, list[str]]]]:
    """Yields turns, each with whether it is the model's own, and its symbols."""
    pairs = number_pairs(held_out=False)
    while True:
        a, b = rng.choice(pairs)
        prompt = (False, [*str(a), "+", *str(b)])
        if rng.random() >= CALL_SHARE:
            guess = rng.choice(NUMBERS) + rng.choice(NUMBERS)
            yield [prompt, (True, ["=", *str(guess), "<eos>"])]
            continue
        a, b = copy(a, rng), copy(b, rng)
        call = [CALL, A, *str(a), B, *str(b), END_ARGUMENTS, END_CALL, "<eos>"]
        result = [RESULT, *str(add(a, b)), END_RESULT]
        yield [prompt, (True, call), (False, result), (True, ["=", *str(copy(add(a, b), rng)), "<eos>"])]


def copy(number: int, rng: random.Random) -> int:
    """The number, with slips. The number of digits stays."""
    digits = [
        d if rng.random() >= SLIP else rng.choice("0123456789" if i else "123456789") for i, d in enumerate(str(number))
    ]
    return int("".join(digits))


def make_tokenizer() -> Any:
    """One token per symbol, and a chat template that shows calls as Hermes and Qwen write them."""
    tokenizer = zigzag.make_tokenizer(SYMBOLS)
    tokenizer.chat_template = TEMPLATE
    return tokenizer
