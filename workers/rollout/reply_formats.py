"""vLLM's own parsers of tool calls and reasoning.

Their import takes as long as vLLM's, so it happens only if a parser is named.
"""

import logging
from collections.abc import Sequence
from typing import Any

from rlsys.episodes.calls import Schema
from rlsys.episodes.formats import known_reasoning_parsers, known_tool_parsers
from rlsys.episodes.parsing import FormatParser, RawCall, ReplyParser, ReplyParts
from rlsys.errors import ConfigError
from workers.rollout.function_gemma import FunctionGemmaParser


def make_reply_parser(
    tokenizer: Any,
    tool_parser: str = "",
    reasoning_parser: str = "",
    tools: Sequence[Schema] = (),
    template_options: dict[str, Any] | None = None,
) -> ReplyParser:
    require_known(tool_parser, known_tool_parsers(), "tool_parser")
    require_known(reasoning_parser, known_reasoning_parsers(), "reasoning_parser")
    parser: FormatParser | None = None
    if tool_parser or reasoning_parser:
        parser = VllmParser(tokenizer, tool_parser, reasoning_parser, tools, template_options or {})
    if parser and tool_parser == "functiongemma":
        parser = FunctionGemmaParser(parser)
    return ReplyParser(tokenizer, parser, tools, tool_parser)


def require_known(name: str, known: list[str], option: str) -> None:
    if name and known and name not in known:
        raise ConfigError(f"episode.{option}: vLLM has no parser `{name}`. It has {', '.join(known)}.")


class VllmParser:
    """Reads replies as vLLM's server would."""

    def __init__(
        self,
        tokenizer: Any,
        tool_parser: str,
        reasoning_parser: str,
        tools: Sequence[Schema],
        template_options: dict[str, Any],
    ):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tokenizers.hf import get_cached_tokenizer

        for name in ("vllm.parser", "vllm.reasoning", "vllm.tool_parsers"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # they log a traceback for each broken call
        self.tokenizer, self.options = get_cached_tokenizer(tokenizer), {"chat_template_kwargs": template_options}
        self.request = ChatCompletionRequest(
            model="", messages=[{"role": "user", "content": ""}], tools=list(tools) or None
        )
        try:
            self.parser = find_parser(tool_parser, reasoning_parser)
            self.parser(self.tokenizer, self.request.tools, **self.options)
        except Exception as error:  # each parser has its own demands on packages, files and the vocabulary
            names = " and ".join(name for name in (tool_parser, reasoning_parser) if name)
            raise ConfigError(f"vLLM's parser {names} cannot read this model's answers: {error}") from error

    def __call__(self, text: str, tokens: Sequence[int]) -> ReplyParts:
        parser = self.parser(self.tokenizer, self.request.tools, **self.options)  # it keeps the state of one reply
        try:
            reasoning, content, calls = parser.parse(
                text, self.request, enable_auto_tools=True, model_output_token_ids=tokens
            )
        except Exception:  # the model may write anything, and a parser may fail in any way
            return ReplyParts(text)
        raw_calls = [RawCall(call.name, call.arguments, call.id or "") for call in calls or []]
        text = (content or "").lstrip("\n") if reasoning else content or ""
        return ReplyParts(text, (reasoning or "").strip("\n"), raw_calls)


def find_parser(tool_parser: str, reasoning_parser: str) -> Any:
    """Returns vLLM's class for both. The one of gpt-oss needs the vocabulary of that model, from a file."""
    from vllm.parser.parser_manager import ParserManager

    is_harmony = tool_parser == "openai" or reasoning_parser == "openai_gptoss"
    if is_harmony:
        from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

        get_encoding()  # without it the parser would return all as text, and say nothing
    return ParserManager.get_parser(
        tool_parser or None, reasoning_parser or None, enable_auto_tools=True, is_harmony=is_harmony
    )
