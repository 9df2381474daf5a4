"""vLLM's serving classes for one model, with the settings of a run."""

import json
from collections.abc import AsyncIterator
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest, AnthropicToolChoice
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.renderers.online_renderer import OnlineRenderer

from workers.serve.model import ModelClient
from workers.serve.settings import Settings

# The texts of messages one after the other, as episodes of a model without a chat template are.
PLAIN_TEXT = """{% for message in messages %}{% if message['role'] not in ['user', 'assistant', 'tool'] %}\
{{ raise_exception('the tokenizer has no chat template for a message of the role `' + message['role'] + '`') }}\
{% endif %}{{ message['content'] or '' }}{% endfor %}"""


class Messages(AnthropicServingMessages):
    """vLLM's, but an error of a stream keeps its message, and without tools what looks like a call stays in the text."""

    async def create_messages(self, request: AnthropicMessagesRequest, raw_request: Any = None) -> Any:
        if not request.tools:
            request.tool_choice = AnthropicToolChoice(type="none")
        return await super().create_messages(request, raw_request)

    async def message_stream_converter(self, generator: AsyncIterator[str]) -> AsyncIterator[str]:
        async for event in super().message_stream_converter(raise_errors(generator)):
            yield event


async def raise_errors(events: AsyncIterator[str]) -> AsyncIterator[str]:
    async for event in events:
        if event.startswith('data: {"error"'):
            raise RuntimeError(json.loads(event.removeprefix("data: "))["error"]["message"])
        yield event


class Front:
    """What answers in each dialect."""

    def __init__(self, client: ModelClient, settings: Settings, renderer_class: type[OnlineRenderer] = OnlineRenderer):
        self.settings = settings
        models = OpenAIServingModels(client, [BaseModelPath(settings.name, client.model_config.model)])
        tokenizer = client.renderer.get_tokenizer()
        template = settings.template or (None if tokenizer.chat_template else plain_text_template(tokenizer))
        common: dict[str, Any] = {
            "request_logger": None,
            "chat_template": template,
            "chat_template_content_format": "auto",
            "default_chat_template_kwargs": settings.template_options,
            "enable_auto_tools": bool(settings.tool_parser),
            "tool_parser": settings.tool_parser or None,
            "reasoning_parser": settings.reasoning_parser,
        }
        renderer = renderer_class(client.model_config, client.renderer, **common)
        self.chat = OpenAIServingChat(client, models, "assistant", online_renderer=renderer, **common)
        self.responses = OpenAIServingResponses(client, models, renderer, **common)
        self.messages = Messages(client, models, "assistant", online_renderer=renderer, **common)
        for serving in (self.chat, self.responses, self.messages):
            serving.default_sampling_params = settings.sampling
        self.window = client.model_config.max_model_len


def plain_text_template(tokenizer: Any) -> str:
    """Returns the template of a model without one; a prompt begins as the tokenizer lets every text begin."""
    beginning = tokenizer.decode(tokenizer("").input_ids)
    return f"{{{{ {beginning!r} }}}}{PLAIN_TEXT}" if beginning else PLAIN_TEXT
