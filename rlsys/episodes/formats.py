"""The names of vLLM's parsers, and which of them reads the format of a model."""

import ast
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlsys.models.families import family_of

# What a chat template writes, and the parser that reads it. The first that fits is taken.
TOOL_FORMATS = (
    (("<|channel|>", "<|call|>"), "openai"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<function_calls>",), "olmo3"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>",), "gemma4"),
    (("functools[",), "phi4_mini_json"),
    (("<|python_tag|>",), "llama3_json"),
    (("ipython", '"parameters": '), "llama3_json"),
)


@dataclass(frozen=True)
class Brackets:
    """Calls are in brackets behind a mark: each in its own, or in a list. Brackets("<tool_calls>", "[", "</tool_calls>")"""

    mark: str = ""  # a pattern
    opening: str = "[{"
    close: str | None = ""  # stands behind the `]` of a list. None: the parser cannot read every list of whole calls


# What ends a call, by its parser. Between two lines may be blanks. A stop string may hide the second.
CALL_ENDS: dict[str, str | Brackets] = {
    **dict.fromkeys(("hermes", "qwen3_json", "granite4", "ernie45", "poolside_v1"), "</tool_call>"),
    **dict.fromkeys(("glm45", "glm47", "ling3"), "</tool_call>"),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "step3p5", "mimo"), "</function>\n</tool_call>"),
    **dict.fromkeys(("llama3_json", "llama4_json"), Brackets("", "{")),
    **dict.fromkeys(("pythonic", "llama4_pythonic", "xlam"), Brackets("", "[")),
    **dict.fromkeys(("jamba", "hunyuan_a13b"), Brackets("<tool_calls>", "[", "</tool_calls>")),
    "mistral": Brackets(r"\[TOOL_CALLS\]"),
    "granite": Brackets(r"<\|?tool_call\|?>"),
    "granite-20b-fc": Brackets("<function_call>", "{"),
    "phi4_mini_json": Brackets("functools", "[", None),
    "lfm2": Brackets(r"<\|tool_call_start\|>", "[", "<|tool_call_end|>"),
    "apertus": Brackets(r"<\|tools_prefix\|>", "[", "<|tools_suffix|>"),
    "gigachat3": Brackets(r"<\|function_call\|>|function call<\|role_sep\|>", "{"),
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), "<｜tool▁call▁end｜>"),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4"), "</｜DSML｜invoke>"),
    "deepseek_v41": "</｜DSML｜ invoke>",
    "kimi_k2": "<|tool_call_end|>",
    "kimi_k3": "<|close|>call<|sep|>",
    "openai": "<|call|>",
    "seed_oss": "</function>\n</seed:tool_call>",
    "minimax_m2": "</invoke>",
    "minimax_m3": "]<]minimax[>[</invoke>",
    "minicpm5": "</function>",
    "olmo3": "</function_calls>",
    "functiongemma": "<end_function_call>",
    "gemma4": "<tool_call|>",
    "longcat": "</longcat_tool_call>",
    "dots": "</dots_function_call>",
    "plamo3": "<|plamo:end_tool_request:plamo|>",
    "muse_glimmer": "</atem:invoke>",
    "inkling": "<|end_message|>",
    "internlm": "<|action_end|>",
}


def suggest_tool_parser(model_config: dict[str, Any], chat_template: str) -> str:
    """Returns the name of the parser for a model's tool calls, or an empty text if its template shows no calls."""
    named = family_of(model_config.get("model_type")).tool_parser
    if named and "tool" in chat_template:
        return named
    return next((parser for marks, parser in TOOL_FORMATS if all(mark in chat_template for mark in marks)), "")


def known_tool_parsers() -> list[str]:
    """Returns the parsers of the installed vLLM, which is read and not imported. Empty if there is none."""
    return read_names("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER")


def known_reasoning_parsers() -> list[str]:
    return read_names("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER")


def read_names(file: str, table: str) -> list[str]:
    """Returns the keys of a table in a file of vLLM."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return []
    path = Path(spec.submodule_search_locations[0]) / file
    for node in ast.parse(path.read_text()).body if path.exists() else []:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == [table]:
            return sorted(ast.literal_eval(node.value))
    return []
