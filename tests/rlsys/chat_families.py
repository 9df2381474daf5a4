"""Chat formats of model families: how the template writes a turn, and how the model writes its own."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "episodes/templates"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
SAMPLE = [
    "the user adds one and two, and the assistant answers with a tool call",
    '{"name": "add", "arguments": {"a": 1}}',
]


@dataclass(frozen=True)
class Turn:
    """What a model means to say in a turn. Turn("It is 3.", "1 + 2", [])"""

    text: str
    reasoning: str
    arguments: list[int]  # a call of `add` for each


@dataclass(frozen=True)
class Family:
    write: Callable[[Turn, str], str]  # a turn and its first call id → the model's own text, without the end of turn
    eos: str
    specials: tuple[str, ...]
    bos: str = "<bos>"
    call_end: str = ""  # after calls, if not `eos`
    earlier_end: str = ""  # what the template writes for `eos` where another turn follows, if not the same
    shown: frozenset[str] = frozenset()  # calls: the template shows calls and results; together: with text; parallel
    changes: frozenset[str] = (
        frozenset()
    )  # what it does to earlier turns: reasoning, space, opening of an answer, place of tools
    answer: Callable[[dict[str, Any]], dict[str, Any]] = lambda message: message
    next_role_ends: bool = False

    def end(self, calls: bool, next_role: str) -> str:
        if self.next_role_ends:
            return "<|observation|>" if next_role == "tool" and "calls" in self.shown else "<|user|>"
        return self.call_end if calls and self.call_end else self.eos


def call_id(turn: int, number: int) -> str:
    return f"call{turn:03}{number:02}"


def thought(turn: Turn) -> str:
    return f"<think>\n{turn.reasoning}\n</think>\n\n" if turn.reasoning else ""


def hermes(turn: Turn, _: str) -> str:
    calls = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}}}}}\n</tool_call>' for a in turn.arguments]
    return thought(turn) + "\n".join([turn.text, *calls] if turn.text else calls)


def llama(turn: Turn, _: str) -> str:
    if turn.arguments:
        return f'{{"name": "add", "parameters": {{"a": {turn.arguments[0]}}}}}'
    return thought(turn) + turn.text


def mistral_v3(turn: Turn, first_id: str) -> str:
    ids = [f"{first_id[:-1]}{n}" for n in range(len(turn.arguments))]
    calls = [{"name": "add", "arguments": {"a": a}, "id": i} for a, i in zip(turn.arguments, ids, strict=True)]
    return "[TOOL_CALLS] " + json.dumps(calls) if calls else " " + thought(turn) + turn.text


def mistral_v7(turn: Turn, _: str) -> str:
    return thought(turn) + turn.text + "".join(f'[TOOL_CALLS]add[ARGS]{{"a": {a}}}' for a in turn.arguments)


def deepseek(turn: Turn, _: str) -> str:
    calls = [
        f'<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{{"a": {a}}}\n```<｜tool▁call▁end｜>'
        for a in turn.arguments
    ]
    reasoning = f"{turn.reasoning}\n</think>\n\n" if turn.reasoning else ""
    return reasoning + (f"<｜tool▁calls▁begin｜>{chr(10).join(calls)}<｜tool▁calls▁end｜>" if calls else turn.text)


def harmony(turn: Turn, _: str) -> str:
    reasoning = f"<|channel|>analysis<|message|>{turn.reasoning}<|end|><|start|>assistant" if turn.reasoning else ""
    if not turn.arguments:
        return f"{reasoning}<|channel|>final<|message|>{turn.text}"
    call = f'{{"a": {turn.arguments[0]}}}'
    return f"{reasoning}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{call}"


def glm(turn: Turn, _: str) -> str:
    calls = [
        f"\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{a}</arg_value>\n</tool_call>" for a in turn.arguments
    ]
    return thought(turn) + turn.text + "".join(calls)


def plain(turn: Turn, _: str) -> str:
    return thought(turn) + turn.text


def spaced(turn: Turn, _: str) -> str:
    return " " + thought(turn) + turn.text


def texts_as_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"content": None, "tool_calls": calls}


def thinking_key(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"thinking": message["reasoning_content"]} if "reasoning_content" in message else message


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
DEEPSEEK = ("User", "Assistant", "end▁of▁sentence", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin")
DEEPSEEK += ("tool▁call▁end", "tool▁sep", "tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin")
MISTRAL = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
FAMILIES = {
    "qwen2_5": Family(hermes, "<|im_end|>", CHATML, shown=frozenset({"calls", "together", "parallel"})),
    "qwen3": Family(
        hermes,
        "<|im_end|>",
        CHATML,
        shown=frozenset({"calls", "together", "parallel"}),
        changes=frozenset({"reasoning"}),
    ),
    "llama3_1": Family(
        llama,
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        bos="<|begin_of_text|>",
        shown=frozenset({"calls"}),
        changes=frozenset({"space"}),
    ),
    "mistral_v3": Family(
        mistral_v3,
        "</s>",
        (*MISTRAL, "[/TOOL_RESULTS]"),
        bos="<s>",
        shown=frozenset({"calls", "parallel"}),
        changes=frozenset({"space", "tools"}),
    ),
    "mistral_v7": Family(
        mistral_v7,
        "</s>",
        (*MISTRAL, "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]"),
        bos="<s>",
        shown=frozenset({"calls", "together", "parallel"}),
    ),
    "gemma3": Family(
        plain, "<end_of_turn>", ("<start_of_turn>", "<end_of_turn>", "<eos>"), changes=frozenset({"space"})
    ),
    "phi4": Family(plain, "<|im_end|>", ("<|im_start|>", "<|im_sep|>", "<|im_end|>")),
    "deepseek_r1": Family(
        deepseek,
        "<｜end▁of▁sentence｜>",
        tuple(f"<｜{name}｜>" for name in (*DEEPSEEK, "tool▁output▁end")),
        bos="<｜begin▁of▁sentence｜>",
        shown=frozenset({"calls", "parallel"}),
        changes=frozenset({"reasoning", "opening"}),
        answer=texts_as_arguments,
    ),
    "harmony": Family(
        harmony,
        "<|return|>",
        tuple(f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")),
        call_end="<|call|>",
        earlier_end="<|end|>",
        shown=frozenset({"calls"}),
        changes=frozenset({"reasoning"}),
        answer=thinking_key,
    ),
    "olmo_tulu": Family(plain, "<|endoftext|>", ("<|endoftext|>",), bos="<|endoftext|>", shown=frozenset({"role"})),
    "glm4_5": Family(
        glm,
        "<|endoftext|>",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        shown=frozenset({"calls", "together", "parallel"}),
        changes=frozenset({"space"}),
        next_role_ends=True,
    ),
    "vicuna": Family(spaced, "</s>", ("</s>",), bos="<s>"),
}


@cache
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    template = (TEMPLATES / f"{name}.jinja").read_text().removesuffix("\n")
    return byte_level_tokenizer(template, family.eos, family.bos, family.specials)


def byte_level_tokenizer(
    template: str | None, eos: str = "<|im_end|>", bos: str = "<bos>", specials: tuple[str, ...] = CHATML
) -> PreTrainedTokenizerFast:
    """A small BPE tokenizer that knows every byte, with merges of a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SAMPLE, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    fast.add_special_tokens({"extra_special_tokens": [token for token in specials if token not in (eos, bos)]})
    fast.chat_template = template
    return fast
