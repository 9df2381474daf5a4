"""How models write calls, by the parser of vLLM that reads them. A format has its parser's name, and more behind a `.`."""

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]  # name, arguments


def compact(value: Any, quote: str) -> str:
    """Objects without quotation marks around keys, as Gemma's models write them."""
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return "{" + ",".join(f"{name}:{compact(item, quote)}" for name, item in value.items()) + "}"
        case list():
            return "[" + ",".join(compact(item, quote) for item in value) + "]"
    return json.dumps(value)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def each(template: str, between: str = "\n", begin: str = "", end: str = "") -> Callable[[Sequence[Call]], str]:
    """Writes calls one after another. The template has NAME, JSON for the arguments, PYTHON for a whole call."""

    def write(calls: Sequence[Call]) -> str:
        texts = []
        for number, (name, arguments) in enumerate(calls):
            python = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
            text = template.replace("NAME", name).replace("NUMBER", str(number)).replace("PYTHON", python)
            texts.append(text.replace("JSON", json.dumps(arguments)))
        return begin + between.join(texts) + end

    return write


def tags(begin: str, argument: str, end: str, outer: tuple[str, str] = ("", "")) -> Callable[[Sequence[Call]], str]:
    """Writes each argument in tags: the template has KEY and VALUE."""

    def write(calls: Sequence[Call]) -> str:
        texts = [
            begin.replace("NAME", name)
            + "".join(argument.replace("KEY", k).replace("VALUE", plain(v)) for k, v in arguments.items())
            + end
            for name, arguments in calls
        ]
        return outer[0] + "\n".join(texts) + outer[1]

    return write


def gemma(begin: str, quote: str, end: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: "".join(f"{begin}call:{name}{compact(a, quote)}{end}" for name, a in calls)


OBJECT = '{"name": "NAME", "arguments": JSON}'
HERMES = each(f"<tool_call>\n{OBJECT}\n</tool_call>")
CODER = tags("<tool_call>\n<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n", "</function>\n</tool_call>")
GLM = tags("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", "</tool_call>")
PYTHON = each("PYTHON", ", ", "[", "]")
LLAMA = each('{"name": "NAME", "parameters": JSON}', "; ")
DSML = "｜DSML｜"
WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    **dict.fromkeys(("hermes", "granite4", "qwen3_json", "ernie45"), HERMES),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "step3p5"), CODER),
    **dict.fromkeys(("glm45", "glm47", "poolside_v1"), GLM),
    **dict.fromkeys(("pythonic", "llama4_pythonic"), PYTHON),
    **dict.fromkeys(("llama3_json", "llama4_json"), LLAMA),
    "llama3_json.tag": lambda calls: "<|python_tag|>" + LLAMA(calls),
    "seed_oss": tags(
        "<seed:tool_call>\n<function=NAME>\n", "<parameter=KEY>VALUE</parameter>\n", "</function>\n</seed:tool_call>"
    ),
    "mimo": tags("<tool_call>\n<function=NAME>\n", "<parameter=KEY>VALUE</parameter>\n", "</function>\n</tool_call>"),
    "minimax_m2": tags(
        '<invoke name="NAME">\n',
        '<parameter name="KEY">VALUE</parameter>\n',
        "</invoke>",
        ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    ),
    "mistral": each('{"name": "NAME", "arguments": JSON, "id": "abcdefghNUMBER"}', ", ", "[TOOL_CALLS] [", "]"),
    "mistral.v7": each("[TOOL_CALLS]NAME[ARGS]JSON", ""),
    "deepseek_v3": each(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": each(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": tags(
        f'<{DSML}invoke name="NAME">\n',
        f'<{DSML}parameter name="KEY" string="true">VALUE</{DSML}parameter>\n',
        f"</{DSML}invoke>",
        (f"<{DSML}function_calls>\n", f"\n</{DSML}function_calls>"),
    ),
    "kimi_k2": each(
        "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>JSON<|tool_call_end|>",
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "lfm2": each("PYTHON", ", ", "<|tool_call_start|>[", "]<|tool_call_end|>"),
    "olmo3": each("PYTHON", "\n", "<function_calls>", "</function_calls>"),
    "functiongemma": gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    "gemma4": gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    "phi4_mini_json": each(OBJECT, ", ", "functools[", "]"),
    "granite": each(OBJECT, ", ", "<|tool_call|>[", "]"),
    "jamba": each(OBJECT, ", ", "<tool_calls>[", "]</tool_calls>"),
    "hunyuan_a13b": each(OBJECT, ", ", "<tool_calls>[", "]</tool_calls>"),
    "xlam": each(OBJECT, ", ", "[", "]"),
    "longcat": each(f"<longcat_tool_call>\n{OBJECT}\n</longcat_tool_call>"),
    "apertus": each('{"NAME": JSON}', ", ", "<|tools_prefix|>[", "]<|tools_suffix|>"),
    "minicpm5": tags('<function name="NAME">', '<param name="KEY">VALUE</param>', "</function>"),
    "granite-20b-fc": each(f"<function_call>{OBJECT}"),
    "ling3": GLM,
    "deepseek_v4": tags(
        f'<{DSML}invoke name="NAME">\n',
        f'<{DSML}parameter name="KEY" string="false">VALUE</{DSML}parameter>\n',
        f"</{DSML}invoke>",
        (f"<{DSML}tool_calls>\n", f"\n</{DSML}tool_calls>"),
    ),
    "deepseek_v41": tags(
        f'<{DSML} invoke name="NAME">\n',
        f'<{DSML} parameter name="KEY" string="false">VALUE</{DSML} parameter>\n',
        f"</{DSML} invoke>",
        (f"<{DSML} calls>\n", f"\n</{DSML} calls>"),
    ),
    "dots": tags(
        '<dots_function_call>\n<invoke name="NAME">\n',
        '<parameter name="KEY">VALUE</parameter>\n',
        "</invoke>\n</dots_function_call>",
    ),
    "kimi_k3": tags(
        '<|open|>call tool="NAME" index="1"<|sep|>',
        '<|open|>argument key="KEY" type="object"<|sep|>VALUE<|close|>argument<|sep|>',
        "<|close|>call<|sep|>",
        ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    ),
    "minimax_m3": tags(
        ']<]minimax[>[<invoke name="NAME">\n',
        "]<]minimax[>[<KEY>VALUE]<]minimax[>[</KEY>\n",
        "]<]minimax[>[</invoke>",
        ("]<]minimax[>[<tool_call>\n", "\n]<]minimax[>[</tool_call>"),
    ),
    "muse_glimmer": tags(
        '<atem:invoke name="NAME">\n',
        '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
        "</atem:invoke>",
        (" to=tool<|message|><atem:function_calls>\n", "\n</atem:function_calls>"),
    ),
    "plamo3": each(
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>NAME<|plamo:end_tool_name:plamo|>"
        "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>JSON<|plamo:end_tool_arguments:plamo|>"
        "<|plamo:end_tool_request:plamo|>",
        "",
        "<|plamo:begin_tool_requests:plamo|>",
        "<|plamo:end_tool_requests:plamo|>",
    ),
    "inkling": each('<|message_model|><|content_invoke_tool_json|>{"name": "NAME", "args": JSON}<|end_message|>', ""),
    "internlm": each(f"<|action_start|><|plugin|>{OBJECT}<|action_end|>"),
    "gigachat3": each(f"function call<|role_sep|>\n{OBJECT}"),
}
MARKERS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>"),
    *("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>", "[TOOL_CALLS]", "<|python_tag|>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "<function_calls>", "</function_calls>", "｜DSML｜"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_start|>", "<start_function_call>", "<end_function_call>"),
    *("<escape>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call|>", "<longcat_tool_call>"),
    *("</longcat_tool_call>", "<tool_calls>", "</tool_calls>", "<|tools_prefix|>", "<|tools_suffix|>"),
    *("<function_call>", "<|open|>", "<|close|>", "<|sep|>", "<|message_model|>", "<|content_invoke_tool_json|>"),
    *("<|end_message|>", "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_text|>"),
    *("<|content_tool_error|>", "<|content_model_end_sampling|>", "<|plamo:tag|>", "]<]minimax[>["),
)
