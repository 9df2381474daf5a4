"""A conversation in tokens: what the model wrote stays as it was sampled, and the rest is tokenized once.

open(content)            tokens of the first ask ─────────┐
add_reply(tokens, …)     own tokens, as they are          ├──▶ laid end to end: what the model saw and wrote
continue_with(content)   end of turn, messages, opening ──┘
"""

from collections.abc import Sequence
from typing import Any

from rlsys.episodes.ask import Message, Reply
from rlsys.episodes.continuation import continuation_notes
from rlsys.episodes.template import ConversationTemplate, TemplateError, Tools

__all__ = ["Conversation", "ConversationTemplate", "TemplateError", "continuation_notes"]


class Conversation:
    """The turns of one episode. `messages` is its transcript."""

    def __init__(self, template: ConversationTemplate, tools: Tools = ()):
        self.template, self.tools = template, tools
        self.messages: list[Message] = []
        self._history: list[Message] = []  # what the template has been given, before the last answer
        self._own: Sequence[int] = ()
        self._asked = False  # and not yet answered

    def copy(self) -> "Conversation":
        """Returns the same conversation, to go on in another way."""
        other = Conversation(self.template, self.tools)
        other.messages, other._history = list(self.messages), list(self._history)
        other._own, other._asked = self._own, self._asked
        return other

    def open(self, content: str | Sequence[Message]) -> list[int]:
        """Returns the tokens of the first ask, with the opening of an answer."""
        assert not self.messages, "a conversation is opened once"
        messages = read_messages(content)
        self.template.require_shown(messages, first=True)
        tokens = self.template.open_tokens(messages, self.tools)
        self.messages, self._history = list(messages), list(messages)
        self._asked = True
        return tokens

    def add_reply(self, tokens: Sequence[int], reply: Reply) -> None:
        """Notes the model's turn, and the tokens it consists of."""
        assert self._asked, "a reply follows an ask"
        self._own, self._asked = tokens, False
        self.messages.append(reply_message(reply))

    def continue_with(self, content: str | Sequence[Message]) -> list[int]:
        """Returns the tokens that follow the model's own: its end of turn if missing, messages, the next opening."""
        assert self.messages, "a conversation is opened first"
        assert not self._asked, "an ask follows a reply"
        new = read_messages(content)
        continuation = self.template.continuation(self._history, self.messages[-1], new, self.tools)
        tokens = self.template.tokens_after(self._own, continuation)
        self.messages += new
        self._history += continuation.messages
        self._asked = True
        return tokens


def reply_message(reply: Reply) -> Message:
    message: Message = {"role": "assistant", "content": reply.text}
    if reply.finish == "length":
        message["finish"] = "length"
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            | ({"error": call.error} if call.error else {})
            for call in reply.calls
        ]
    return message


def read_messages(content: str | Sequence[Message]) -> list[Message]:
    """Returns what was asked as messages whose contents are texts."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if not isinstance(content, list | tuple) or not content:
        raise TypeError(f"ask takes a text or a list of messages, not {describe(content)}")
    messages = [read_message(message) for message in content]
    if messages[-1]["role"] == "assistant":
        raise TemplateError("the last message is the assistant's, and the model answers next: ask without that message")
    return messages


def read_message(message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise TypeError(f'a message is a dict such as {{"role": "user", "content": "hello"}}, not {describe(message)}')
    if not all(map(is_call, message.get("tool_calls") or ())):
        raise TypeError(f"tool_calls of a message are as OpenAI's API has them, not {describe(message['tool_calls'])}")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part_text(part) for part in content)
    if content is None and message["role"] == "assistant":
        return message
    if not isinstance(content, str):
        raise TypeError(f"the content of a message is a text, not {describe(content)}")
    return message | {"content": content}


def is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise TypeError(f"a part of a message is a text, not {describe(part)}")
    return text


def describe(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"
