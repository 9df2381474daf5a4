"""The chat template of an episode: it renders messages, and finds what to write between two answers of the model.

    history, answer=▮, new messages ──▶ chat template ──▶ …<|im_start|>assistant\\n▮<|im_end|>\\n<|im_start|>user\\n…
                                                                                  └────────── continuation ──────────▶

A mark stands for the answer, so the template cannot change what the model wrote. After tool calls, the mark is an
argument of the calls, and the continuation begins where the template ends the turn.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from rlsys.data.tokens import tokenize_prompts
from rlsys.episodes.ask import Message
from rlsys.text import replace_surrogates

MARK = "MARKq7x2"
PROBE = "PROBEk9d4"
Tools = Sequence[dict[str, Any]]  # JSON schemas, as chat templates take them
PROBE_CALL = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": {}}}
PROBE_RESULT = {"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": PROBE}
QUESTION = {"role": "user", "content": "a"}


class TemplateError(ValueError):
    """The chat template refuses messages, or drops them."""


@dataclass(frozen=True)
class Continuation:
    """What follows an answer. `Continuation("<|im_end|>\\n<|im_start|>user\\n…", "<|im_end|>\\n", [answer, message])`"""

    text: str
    turn_end: str  # the beginning of the text, if it ends the answer
    messages: list[Message]  # the answer and the new messages, in a form that the template takes


class ConversationTemplate:
    """The chat template of a tokenizer, or another one. Without any, a conversation is plain text."""

    def __init__(
        self,
        tokenizer: Any,
        template_options: dict[str, Any] | None = None,
        chat_template: str = "",
        vocabulary: int = sys.maxsize,
    ):
        self.tokenizer, self.options = tokenizer, template_options or {}
        self.vocabulary = vocabulary  # tokens of the model; the tokenizer may have more
        named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
        default = named.get("default") if named else tokenizer.chat_template
        self.chat_template = str(chat_template or default or "")
        self.tools_template = self.chat_template if chat_template else str(named.get("tool_use", self.chat_template))

    def render(self, messages: Sequence[Message], tools: Tools = (), *, opens_answer: bool = True) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self.tools_template if tools else self.chat_template,
                tokenize=False,
                add_generation_prompt=opens_answer,
                **self.options,
            )
        except Exception as error:  # a template may raise any error
            raise TemplateError(f"the chat template refuses these messages: {error}") from error
        return replace_surrogates(str(text))

    def open_text(self, messages: Sequence[Message], tools: Tools) -> str:
        return self.render(messages, tools) if self.chat_template else plain_text(messages)

    def continuation(
        self, history: Sequence[Message], answer: Message, new: Sequence[Message], tools: Tools
    ) -> Continuation:
        """Returns what to write after an answer, so that the new messages and the next answer follow."""
        if not self.chat_template:
            return Continuation(plain_text(new), "", [answer, *new])
        if new[0]["role"] == "tool":
            if self.shows_results_of_calls and answer.get("tool_calls"):
                for form in call_forms(answer):
                    if continuation := self._after_calls(history, form, new, tools):
                        return continuation
            if not self.shows_results_without_calls:
                new = as_user_message(new)
        return self._after_text(history, answer, new, tools)

    def _after_text(
        self, history: Sequence[Message], answer: Message, new: Sequence[Message], tools: Tools
    ) -> Continuation:
        self.require_shown([message for message in new if message["role"] != "tool"])
        mark = unused_mark([*history, *new])
        text = self.render([*history, {"role": "assistant", "content": mark}, *new], tools)
        _, marked, after = text.partition(mark)
        if not marked:
            raise TemplateError("the chat template does not write earlier answers, so no turn can follow one")
        return Continuation(after, self.turn_end, [{"role": "assistant", "content": answer["content"]}, *new])

    def _after_calls(
        self, history: Sequence[Message], answer: Message, new: Sequence[Message], tools: Tools
    ) -> Continuation | None:
        """Returns None if the template does not take the calls in this form."""
        mark = unused_mark([*history, *new])
        marked = answer | {"tool_calls": [replace_arguments(call, mark) for call in answer["tool_calls"]]}
        try:
            text = self.render([*history, marked, *new], tools)
            without_new = self.render([*history, marked], tools, opens_answer=False)
        except TemplateError:
            return None
        (_, shown, after), (_, shown_last, tail) = text.rpartition(mark), without_new.rpartition(mark)
        if not (shown and shown_last and after.startswith(tail)):
            return None
        turn_end = tail[self._find_turn_end(tail) :]
        return Continuation(turn_end + after[len(tail) :], turn_end, [answer, *new])

    def _find_turn_end(self, tail: str) -> int:
        """Returns where the closing syntax of a call ends, and the end of the turn begins."""
        if tail.endswith(self.turn_end):
            return len(tail) - len(self.turn_end)
        place = max((tail.rfind(token) for token in self.special_tokens.values()), default=-1)
        return place if place >= 0 else len(tail)

    # --- facts about the template, from short conversations ---------------------------------------------------------

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        tokens = self.tokenizer.added_tokens_decoder
        return {number: token.content for number, token in tokens.items() if token.special}

    @cached_property
    def turn_end(self) -> str:
        """What the template writes after an answer, before the next turn: `<|im_end|>\\n`. May be empty."""
        answer = {"role": "assistant", "content": MARK}
        after = self.render([QUESTION, answer, QUESTION]).partition(MARK)[2]
        opening = self.render([QUESTION]).removeprefix(self.render([QUESTION], opens_answer=False))
        for opens_answer in (True, False):
            try:
                tail = self.render([QUESTION, answer], opens_answer=opens_answer).partition(MARK)[2]
            except TemplateError:
                continue
            end = tail.removesuffix(opening)
            if end and after.startswith(end):
                return end
        return ""

    def require_shown(self, messages: Sequence[Message], first: bool = False) -> None:
        """Raises `TemplateError` if the template leaves out one of the messages. `first`: no answer is before them."""
        for role in {message["role"] for message in messages} - {"user"}:
            if self.chat_template and self.drops(role, first):
                raise TemplateError(f"the chat template drops messages of the role `{role}`: use the role `user`")

    def drops(self, role: str, first: bool = False) -> bool:
        """Returns whether the template leaves out messages of this role, without an error."""
        if (role, first) not in self._dropped:
            probe, answer = {"role": role, "content": PROBE}, {"role": "assistant", "content": "b"}
            try:
                text = self.render([probe, QUESTION] if first else [QUESTION, answer, probe])
            except TemplateError:
                text = PROBE  # it says so itself
            self._dropped[role, first] = PROBE not in text
        return self._dropped[role, first]

    @cached_property
    def _dropped(self) -> dict[tuple[str, bool], bool]:
        return {}

    @cached_property
    def shows_results_of_calls(self) -> bool:
        answer = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
        continuations = (self._after_calls([QUESTION], form, [PROBE_RESULT], ()) for form in call_forms(answer))
        return any(continuation is not None and PROBE in continuation.text for continuation in continuations)

    @cached_property
    def shows_results_without_calls(self) -> bool:
        """True if the template shows a tool's result after an answer without calls, and takes further turns."""
        answer = {"role": "assistant", "content": "b"}
        try:
            return PROBE in self.render([QUESTION, answer, PROBE_RESULT, answer, QUESTION])
        except TemplateError:
            return False

    # --- tokens -----------------------------------------------------------------------------------------------------

    def open_tokens(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        text = self.open_text(messages, tools)
        return self._tokenize(text, add_special_tokens=not self.chat_template)

    def tokens_after(self, own: Sequence[int], continuation: Continuation) -> list[int]:
        """Tokenizes a continuation, less the end of turn that the model has written itself."""
        tokens = self._tokenize(continuation.text)
        turn_end = common_prefix(self._tokenize(continuation.turn_end), tokens)
        last = own[-1] if own else None
        if last in self._turn_ends and last in turn_end:
            return tokens[turn_end.index(last) + 1 :]
        if last == self.tokenizer.eos_token_id and continuation.turn_end == self.turn_end != "":
            return tokens[1:]  # the model has ended its turn by another token than the template
        if continuation.turn_end != self.turn_end and turn_end and turn_end[0] in own:
            return tokens[len(turn_end) :]  # it ends a call, not the turn, and the model has written more behind it
        # Some templates end a turn by the token that opens the next, and the model stops there: <|user|> of GLM.
        opens_next = not turn_end and last in self._turn_ends and tokens[:1] == [last]
        return tokens[1:] if opens_next else tokens

    @cached_property
    def _turn_ends(self) -> set[int]:
        """Tokens that may end a turn. One that the model wrote is not written again."""
        return {*self.special_tokens, self.tokenizer.eos_token_id}

    def _tokenize(self, text: str, add_special_tokens: bool = False) -> list[int]:
        [tokens] = tokenize_prompts(self.tokenizer, [text], add_special_tokens=add_special_tokens)
        if (unknown := max(tokens, default=0)) >= self.vocabulary:
            raise ValueError(
                f"the model has no token for `{self.tokenizer.convert_ids_to_tokens(unknown)}`: its {self.vocabulary:,} "
                "tokens are fewer than the tokenizer's. Leave it out of what you ask."
            )
        return tokens


def common_prefix(first: list[int], second: list[int]) -> list[int]:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return first[:count]


def plain_text(messages: Sequence[Message]) -> str:
    for message in messages:
        if message["role"] not in ("user", "tool"):
            raise TemplateError(
                f"the tokenizer has no chat template for a message of the role `{message['role']}`. "
                "Ask with a plain text, or give a Jinja file in data.template."
            )
    return replace_surrogates("".join(message["content"] for message in messages))


def call_forms(answer: Message) -> Iterator[Message]:
    """Yields an answer with tool calls in the forms that templates want: one call or all, JSON or objects, no text."""
    calls = answer["tool_calls"]
    for chosen, as_text, content in product((calls, calls[-1:]), (False, True), ("", None)):
        encoded = [encode_arguments(call) for call in chosen] if as_text else chosen
        yield {"role": "assistant", "content": content, "tool_calls": encoded}


def encode_arguments(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}


def replace_arguments(call: dict[str, Any], mark: str) -> dict[str, Any]:
    marked: Any = {"value": mark}
    if isinstance(call["function"]["arguments"], str):
        marked = json.dumps(marked)
    return call | {"function": call["function"] | {"arguments": marked}}


def as_user_message(new: Sequence[Message]) -> list[Message]:
    """Makes one user message of the tool results at the beginning, and of user messages that follow them."""
    count = next((n for n, m in enumerate(new) if m["role"] not in ("tool", "user")), len(new))
    content = "\n\n".join(message["content"] for message in new[:count])
    return [{"role": "user", "content": content}, *new[count:]]


def unused_mark(messages: Sequence[Message]) -> str:
    text, mark = str(messages), MARK
    while mark in text:
        mark += "x"
    return mark
