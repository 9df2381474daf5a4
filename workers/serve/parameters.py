"""Which parameters a request may have. Each other one is refused, unless it asks for nothing."""

from collections.abc import Collection, Sequence
from typing import Any

from workers.serve.refusals import Refusal
from workers.serve.settings import Settings

OPENAI = {
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "top_logprobs"),
    *("tools", "tool_choice", "parallel_tool_calls", "structured_outputs", "chat_template_kwargs"),
    *("include_reasoning", "skip_special_tokens", "include_stop_str_in_output"),
}
CHAT = OPENAI | {
    *("messages", "max_tokens", "max_completion_tokens", "n", "logprobs", "response_format", "reasoning_effort"),
    *("stream_options", "min_tokens", "bad_words", "allowed_token_ids", "prompt_logprobs", "return_token_ids"),
    *("continue_final_message", "add_generation_prompt"),
}
RESPONSES = OPENAI | {"input", "instructions", "max_output_tokens", "text", "include", "reasoning", "truncation"}
COUNT_TOKENS = {
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs"),
}
MESSAGES = COUNT_TOKENS | {"max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k"}

# They change no reply: names for a service's own records, its caches and queues.
HARMLESS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "cache_control"),
}
HINTS = {
    "previous_response_id": "This server keeps no responses: send the whole conversation as `input`.",
    "conversation": "This server keeps no conversations: send the whole one as `input`.",
    "background": "This server keeps no responses: wait for the reply, or use `stream`.",
    "functions": "Use `tools`.",
    "function_call": "Use `tool_choice`.",
}
FOR_REASONING = {"reasoning_effort", "reasoning", "thinking"}
NO_REASONING = ("none", {"effort": "none"}, {"type": "disabled"})
PARTS = {  # of contents that are lists
    *(
        "text",
        "input_text",
        "output_text",
        "refusal",
        "thinking",
        "redacted_thinking",
        "reasoning_text",
        "summary_text",
    ),
    *("tool_use", "tool_result", "tool_reference", "tool_addition", "tool_removal"),
}


def check_parameters(
    body: dict[str, Any], supported: Collection[str], tool_types: Sequence[str], settings: Settings
) -> None:
    """Raises a `Refusal` of what would have no effect. False and an empty text ask for nothing."""
    asked = {name: value for name, value in body.items() if value is not False and value != ""}
    for name in asked:
        if name not in {*supported, *HARMLESS}:
            refuse(name, f"is not supported. {HINTS.get(name, 'Leave it out.')}")
        if asks_to_reason(name, asked[name]) and not settings.reasoning_parser:
            refuse(name, "needs a model whose reasoning can be read: serve with episode.reasoning_parser=NAME.")
    tools = asked.get("tools")
    if tools and not settings.tool_parser:
        refuse("tools", "needs a known format of calls, and this model's is not: serve with episode.tool_parser=NAME.")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and (kind := tool.get("type") or tool_types[0]) not in tool_types:
            refuse(
                "tools", f"has a tool of the type `{kind}`, which this server cannot run. Describe a function instead."
            )
    for name in ("messages", "input"):
        for message in body[name] if isinstance(body.get(name), list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and (kind := part.get("type", "text")) not in PARTS:
                    refuse(name, f"has a part of the type `{kind}`, and this model takes text alone.")


def asks_to_reason(name: str, value: Any) -> bool:
    if name == "output_config":  # it may also ask for a format
        return isinstance(value, dict) and bool(value.get("effort"))
    return name in FOR_REASONING and value not in NO_REASONING


def refuse(name: str, why: str) -> None:
    raise Refusal(400, f"The parameter `{name}` {why}", name, "unsupported_parameter")
