"""From a row to the text of its prompt.

    text                              as it is
    text, with as_chat or a system    a user message, after the system message ─┐
    messages                          after the system message ─────────────────┴▶ chat template

The chat template also opens the answer, or with `continue_final_message` leaves the assistant's last message open. It
is the tokenizer's, or a Jinja file of the user's. Texts go through such a file too.
"""

import difflib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlsys.errors import ConfigError

Message = dict[str, Any]
MISSING = object()
SYSTEM_ROLES, ANSWER_ROLES = ("system", "developer"), ("assistant", "model")
MARK = "MARKq7x2"  # stands behind a message that is to be continued
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class PromptFormat:
    """How rows become prompts. PromptFormat(prompt_key="question", answer_key="label", system="Think first.")"""

    prompt_key: str = "prompt"
    answer_key: str = "answer"
    system: str = ""
    template: str = ""  # a Jinja file
    as_chat: bool = False
    required: bool = True  # false: a row without a prompt is good too, as an episode's function may make its own
    template_options: dict[str, Any] = field(default_factory=dict, hash=False)
    continue_final_message: bool = False  # of the assistant
    supervised: bool = False  # the row also shows what to write, see `demonstrations`


class UnusableRow(ValueError):
    """A row cannot become a prompt: the reason it is counted under, and a sentence."""

    def __init__(self, reason: str, detail: str):
        self.reason, self.detail = reason, detail
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    text: str
    messages: list[Message] | None  # the chat it was rendered from
    add_special_tokens: bool  # a template has written its own
    rest: list[Message] | None = None  # of a conversation that supervised training learns


class PromptRenderer:
    """Renders rows. `PromptRenderer(form, tokenizer)(fields)` returns the prompt, or raises `UnusableRow`."""

    def __init__(self, form: PromptFormat, tokenizer: Any):
        self.form, self.tokenizer = form, tokenizer
        self.user_template = compile_template(form, tokenizer.special_tokens_map) if form.template else None
        require_known_options(form, tokenizer)
        self.own_system = 0  # rows whose own system message was kept

    def __call__(self, fields: dict[str, Any]) -> RenderedPrompt:
        if not self.form.required:
            return self.describe_row(fields)
        prompt, rest = find_prompt(fields, self.form.prompt_key), None
        if isinstance(prompt, str) and not (self.form.as_chat or self.form.system or self.form.template):
            if self.form.template_options:
                raise ConfigError(
                    "data.template_options is set, and the prompt is a text, which goes through no template. "
                    "Use data.as_chat true, or no options for this set: template_options: {}."
                )
            return RenderedPrompt(prompt, None, True)
        if isinstance(prompt, list):
            if self.form.supervised:
                prompt, rest = split_conversation(prompt)
            require_no_answer(prompt, self.form)
            self.require_template("the prompt is a list of chat messages", "Use plain text prompts")
        else:
            option = "data.system" if self.form.system else "data.as_chat"
            self.require_template(f"{option} makes chat messages of a text", "Leave it out")
        messages = self.add_system_message([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        text = self.render_open(messages, fields)
        _require_unicode(text)
        self.require_system_shown(messages, text)
        return RenderedPrompt(text, messages, False, rest)

    def render_open(self, messages: list[Message], fields: dict[str, Any]) -> str:
        """Renders messages so that the model goes on: with the opening of its answer, or within its last message."""
        *before, last = messages
        if last["role"] not in ANSWER_ROLES:
            return self.render(messages, fields)
        content = last["content"] or ""
        marked = [*before, last | {"content": content + MARK}]
        text, shown, _ = self.render(marked, fields, opens_answer=False).rpartition(MARK)
        if not shown or not without_spaces(text).endswith(without_spaces(content)):
            raise UnusableRow(
                "changed by the template",
                f"the template does not print the final message as it is, {content[:80]!r}, so it cannot be continued. Use "
                "another, or give a Jinja file in data.template that prints it.",
            )
        return text

    def describe_row(self, fields: dict[str, Any]) -> RenderedPrompt:
        """Returns the prompt of a row that an episode is played on, for people; without one, the row itself."""
        try:
            prompt = find_prompt(fields, self.form.prompt_key)
        except UnusableRow:
            return RenderedPrompt(json.dumps(fields, default=str, ensure_ascii=False), None, False)
        if isinstance(prompt, str) and not self.form.system:
            return RenderedPrompt(prompt, None, False)
        messages = self.add_system_message([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        return RenderedPrompt(str(messages[-1]["content"]), messages, False)

    def add_system_message(self, messages: list[Message]) -> list[Message]:
        if not self.form.system:
            return messages
        if messages[0]["role"] in SYSTEM_ROLES:
            self.own_system += 1
            return messages
        return [{"role": "system", "content": self.form.system}, *messages]

    def require_template(self, why: str, way_out: str) -> None:
        if not (self.user_template or self.tokenizer.chat_template):
            raise ConfigError(
                f"{why}, but the tokenizer has no chat template. {way_out}, or give a Jinja file in data.template."
            )

    def render(self, messages: list[Message], fields: dict[str, Any], *, opens_answer: bool = True) -> str:
        try:
            if self.user_template:
                facts = {"prompt": messages[-1]["content"], "system": self.form.system, "row": fields}
                return self.user_template(messages=messages, add_generation_prompt=opens_answer, **facts)
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=opens_answer, **self.form.template_options
                )
            )
        except Exception as error:  # a template may raise any error
            detail = f"the tokenizer's chat template refuses these messages: {error}"
            if self.user_template:
                detail = f"{self.form.template} refuses this row: {type(error).__name__}: {error}"
            elif self.adds_system(messages):
                detail += ". If it takes no system message, leave data.system out, or write it into the prompts."
            raise UnusableRow("refused by the template", detail) from error

    def adds_system(self, messages: list[Message]) -> bool:
        return bool(self.form.system) and messages[0] == {"role": "system", "content": self.form.system}

    def require_system_shown(self, messages: list[Message], text: str) -> None:
        """Refuses a template that leaves out system messages. A user's own file may do so with those of rows."""
        which = self.form.template or "the tokenizer's chat template"
        if self.adds_system(messages) and not shows(text, self.form.system):
            raise ConfigError(
                f"data.system is {self.form.system[:80]!r}, and {which} does not print it: the model would never see it. "
                "Leave it out, write it into the prompts, or give a Jinja file in data.template that prints it."
            )
        lost = [m["content"] for m in messages if m["role"] in SYSTEM_ROLES and not shows(text, m["content"] or "")]
        if lost and not self.user_template:
            raise UnusableRow(
                "without its system message",
                f"the tokenizer's chat template does not print the system message {lost[0][:80]!r}: the model would never see "
                "it. Write it into the user's message, or give a Jinja file in data.template that prints it.",
            )


def require_no_answer(prompt: list[Message], form: PromptFormat) -> None:
    """Raises `UnusableRow` if messages end with the assistant's: it may be the answer, or the beginning of one."""
    last = prompt[-1]
    if last["role"] not in ANSWER_ROLES:
        return
    if not form.continue_final_message:
        raise UnusableRow(
            "ending with an assistant message",
            f"the messages end with the assistant's, {(last['content'] or '')[:80]!r}. If it is the answer, the model would "
            f"read it: remove it from `{form.prompt_key}`, and put what rewards compare with into `{form.answer_key}`. If the "
            "model should continue it, set data.continue_final_message to true.",
        )
    if last.get("tool_calls"):
        raise UnusableRow(
            "ending with tool calls", "the messages end with the assistant's calls of tools, which cannot be continued."
        )


def shows(text: str, part: str) -> bool:
    """Returns whether a text contains another, whatever spaces a template trims or adds, and however it quotes it."""
    quoted = json.dumps(part, ensure_ascii=False)[1:-1]
    return any(without_spaces(form) in without_spaces(text) for form in (part, quoted))


def without_spaces(text: str) -> str:
    return "".join(text.split())


def require_known_options(form: PromptFormat, tokenizer: Any) -> None:
    """Raises `ConfigError` for a template option whose name the template does not have."""
    template = read_template(form.template) if form.template else tokenizer.chat_template
    if not template:
        return
    names = sorted(set(re.findall(r"\b[A-Za-z_]\w*\b", str(template))))
    for option in form.template_options:
        if option not in names:
            close = difflib.get_close_matches(option, names, 1)
            hint = f" Did you mean `{close[0]}`?" if close else " Leave it out."
            which = form.template or "the tokenizer's chat template"
            raise ConfigError(f"data.template_options: {which} has no name `{option}`.{hint}")


def compile_template(form: PromptFormat, special_tokens: dict[str, str]) -> Callable[..., str]:
    """Compiles a user's Jinja file, in a sandbox, with the names that chat templates of tokenizers expect."""
    from jinja2 import TemplateSyntaxError, Undefined
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> str:
        raise ValueError(message)

    class StrictUndefinedText(Undefined):
        """An unknown name may be tested, but not printed: a misspelled one would leave a hole in the prompt."""

        def __str__(self) -> str:
            return str(self._fail_with_undefined_error())

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], undefined=StrictUndefinedText
    )
    environment.globals |= {"raise_exception": raise_exception, **dict.fromkeys(SPECIAL_TOKENS, "")}
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes for web pages
    try:
        template = environment.from_string(read_template(form.template))
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"data.template: {form.template}:{error.lineno}: not a Jinja template: {error.message}"
        ) from None

    def render(**facts: Any) -> str:
        return template.render({"tools": None, "documents": None, **special_tokens, **form.template_options, **facts})

    return render


def read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        raise ConfigError(f"data.template: {path} cannot be read: {error.strerror} (from {Path.cwd()}).") from None
    except UnicodeDecodeError:
        raise ConfigError(f"data.template: {path} is not UTF-8 text.") from None


def get_field(fields: dict[str, Any], key: str) -> Any:
    """Returns the field called `a.b`, or field b of field a. Returns `MISSING` if it does not exist or is null."""
    value: Any = fields
    for part in [key] if key in fields else key.split("."):
        if not isinstance(value, dict) or value.get(part) is None:
            return MISSING
        value = value[part]
    return value


def find_prompt(fields: dict[str, Any], key: str) -> str | list[Message]:
    """Returns a row's prompt: a text, or messages whose contents are texts. Raises `UnusableRow` if there is none."""
    prompt = get_field(fields, key)
    if prompt is MISSING and key not in fields:
        raise UnusableRow(
            "without a prompt",
            f"the row has no field `{key}`; it has {', '.join(map(str, fields)) or 'none'}. "
            "Set data.prompt_key to the field with the prompt.",
        )
    if isinstance(prompt, str) and prompt.strip():
        _require_unicode(prompt)
        return prompt
    if isinstance(prompt, list) and (messages := find_messages(prompt)):
        return messages
    value = None if prompt is MISSING else prompt
    raise UnusableRow(
        "not a prompt",
        f"a prompt is a text or a list of {{role, content}} messages, and not empty; this one is {repr(value)[:80]}.",
    )


def find_messages(values: list[Any]) -> list[Message]:
    """Returns a list of messages whose contents are texts; empty if the values are no messages, or all are empty."""
    if not all(_is_message(value) for value in values):
        return []
    messages = [drop_nulls(m) | {"content": message_text(m)} for m in values]
    return messages if any(m["content"] and m["content"].strip() for m in messages) else []


def split_conversation(messages: list[Message]) -> tuple[list[Message], list[Message] | None]:
    """Splits messages that end with the assistant's before the first answer to a question. Others are a prompt as a whole."""
    if messages[-1]["role"] not in ANSWER_ROLES:
        return messages, None
    asked = False
    for i, message in enumerate(messages):
        if asked and message["role"] in ANSWER_ROLES:
            return messages[:i], messages[i:]
        asked = asked or message["role"] not in (*SYSTEM_ROLES, *ANSWER_ROLES)
    raise UnusableRow("without a question", "the assistant's messages answer nobody: there is no message of the user.")


def drop_nulls(value: Any) -> Any:
    """Drops nulls at any depth: parquet gives every message all the keys that any message has."""
    if isinstance(value, dict):
        return {k: drop_nulls(v) for k, v in value.items() if v is not None}
    return [drop_nulls(v) for v in value] if isinstance(value, list) else value


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str | list) or (content is None and bool(message.get("tool_calls")))


def message_text(message: Message) -> str | None:
    """Returns the text of a message. A list of text parts becomes one text, as many templates would print the list."""
    content = message.get("content")
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type", "text") == "text"
        text = part.get("text") if is_text else part
        if not isinstance(text, str):
            kind = f"`{part['type']}`" if isinstance(part, dict) and part.get("type") else repr(part)[:40]
            raise UnusableRow("not text", f"a message has a part that is not text: {kind}. Prompts are text only.")
        texts.append(text)
    return "".join(texts)


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableRow(
            "not Unicode", f"the prompt has half of a surrogate pair at character {error.start + 1}."
        ) from None


def reward_fields(fields: dict[str, Any], form: PromptFormat) -> dict[str, Any]:
    """Returns what reward functions may ask for: the row without prompt and source, and the answer as `answer`."""
    row = {k: v for k, v in fields.items() if k not in (form.prompt_key, "source")}
    answer = get_field(fields, form.answer_key)
    if isinstance(answer, float) and math.isnan(answer):
        raise UnusableRow(
            "answer not a number", f"the answer (`{form.answer_key}`) is NaN; no completion could be right."
        )
    row.pop("answer", None)
    prompt = MISSING if form.required else get_field(fields, form.prompt_key)
    return row | {name: value for name, value in (("answer", answer), ("prompt", prompt)) if value is not MISSING}
