"""From a row to the text of its prompt.

    text                              as it is
    text, with as_chat or a system    a user message, after the system message ─┐
    messages                          after the system message ─────────────────┴▶ chat template

The chat template also opens the answer. It is the tokenizer's, or a Jinja file of the user's. Texts go through such a
file too.
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

from rlsys.config.schema import ConfigError

Message = dict[str, Any]
MISSING = object()
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
        prompt = find_prompt(fields, self.form.prompt_key)
        if isinstance(prompt, str) and not (self.form.as_chat or self.form.system or self.form.template):
            if self.form.template_options:
                raise ConfigError(
                    "data.template_options is set, and the prompt is a text, which goes through no template. "
                    "Use data.as_chat true, or no options for this set: template_options: {}."
                )
            return RenderedPrompt(prompt, None, True)
        messages = self.add_system_message([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        text = (
            self.apply_user_template(messages, prompt, fields)
            if self.user_template
            else self.apply_chat_template(messages, prompt)
        )
        _require_unicode(text)
        return RenderedPrompt(text, messages, False)

    def describe_row(self, fields: dict[str, Any]) -> RenderedPrompt:
        """The prompt of a row that an episode is played on, for people; without one, the row itself."""
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
        if messages[0]["role"] in ("system", "developer"):
            self.own_system += 1
            return messages
        return [{"role": "system", "content": self.form.system}, *messages]

    def apply_chat_template(self, messages: list[Message], prompt: str | list[Message]) -> str:
        if not self.tokenizer.chat_template and isinstance(prompt, list):
            raise ConfigError(
                "the prompt is a list of chat messages, but the tokenizer has no chat template. "
                "Use plain text prompts, or give a Jinja file in data.template."
            )
        if not self.tokenizer.chat_template:
            option = "data.system" if self.form.system else "data.as_chat"
            raise ConfigError(
                f"{option} makes chat messages of a text, but the tokenizer has no chat template. "
                "Leave it out, or give a Jinja file in data.template."
            )
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.form.template_options
            )
        except Exception as error:  # a template may raise any error
            raise UnusableRow(
                "refused by the template", f"the tokenizer's chat template refuses these messages: {error}"
            ) from error
        return str(text)

    def apply_user_template(self, messages: list[Message], prompt: str | list[Message], fields: dict[str, Any]) -> str:
        assert self.user_template
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        try:
            return self.user_template(messages=messages, prompt=text, system=self.form.system, row=fields)
        except Exception as error:  # a template may raise any error
            detail = f"{self.form.template} refuses this row: {type(error).__name__}: {error}"
            raise UnusableRow("refused by the template", detail) from error


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
        names = {"tools": None, "documents": None, **special_tokens, **form.template_options, **facts}
        return template.render(names, add_generation_prompt=True)

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
    if isinstance(prompt, list) and prompt and all(_is_message(m) for m in prompt):
        messages = [drop_nulls(m) | {"content": message_text(m)} for m in prompt]
        if any(m["content"] and m["content"].strip() for m in messages):
            return messages
    value = None if prompt is MISSING else prompt
    raise UnusableRow(
        "not a prompt",
        f"a prompt is a text or a list of {{role, content}} messages, and not empty; this one is {repr(value)[:80]}.",
    )


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
