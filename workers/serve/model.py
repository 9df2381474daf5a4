"""What generates, seen from the front: tokens go in, and what was sampled comes out.

    client ─▶ app.py ─▶ dialects.py ─▶ vLLM's serving classes ─▶ ModelClient ─▶ Model.generate(tokens, …)
           ◀─ body or server-sent events ◀───────┘ ◀──────────── outputs ◀────────────┘

vLLM's classes render messages, parse tool calls and reasoning, and write replies. They need no engine in their process.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config


class Model(Protocol):
    def generate(
        self, tokens: list[int], params: SamplingParams, request_id: str, **reasoning: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yields outputs as `params.output_kind` asks for. It is cancelled if the client goes away.

        `reasoning`: what vLLM's engine needs to apply a JSON schema behind the reasoning alone.
        """
        ...


class ModelClient:
    """What vLLM's serving classes need of an engine: its configuration and tokenizer, and tokens that are sampled."""

    errored = False  # an engine that has died raises an error in `generate`
    input_processor = None  # for beam search

    def __init__(self, model: Model, config: VllmConfig):
        self.model, self.vllm_config, self.model_config = model, config, config.model_config
        self.renderer = renderer_from_config(config)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Admits any number of requests: an engine lets those wait for which it has no room."""

    def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        reasoning = {name: options.get(name) for name in ("reasoning_ended", "reasoning_parser_kwargs")}
        return self.model.generate(list(prompt["prompt_token_ids"]), params, request_id, **reasoning)
