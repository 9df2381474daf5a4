"""The web server of an episode process. A program asks it for turns as it would ask OpenAI's or Anthropic's service.

program ──HTTP, the key of its episode──▶ workers/serve ──messages──▶ Session ──observation──▶ runner, driver, engines
        ◀───────────reply in its dialect─────────────── ◀───reply─── ◀──────────turn───────────

vLLM's classes read requests and write replies; which tokens they stand for is the session's matter.
"""

import asyncio
import contextlib
import json
import resource
import secrets
import socket
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.requests import Request
from vllm import SamplingParams
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall, FunctionCall
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.abstract_parser import Parser
from vllm.renderers.chat_utils import parse_chat_messages_async
from vllm.renderers.online_renderer import OnlineRenderer

from rlsys.episodes.ask import EpisodeOver, Reply
from rlsys.episodes.asking import Question
from rlsys.episodes.session import MODEL, Session
from rlsys.episodes.settings import EpisodeSettings
from workers.episodes.step_threads import EPISODE
from workers.processes.child import close_in_children
from workers.serve.app import App
from workers.serve.dialects import Dialect
from workers.serve.front import Front
from workers.serve.model import ModelClient
from workers.serve.parameters import refuse
from workers.serve.refusals import Refusal
from workers.serve.settings import Settings

KEEP_ALIVE_S = 24 * 3600  # longer than any client: at the 5 s of uvicorn and httpx, requests would cross the end
UNLIMITED = 1 << 30  # tokens: the session has the limits
# What a request may say although the run decides it, if it says the same.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "include_reasoning": True,
    "response_format": {"type": "text"},
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
}
MAY_ASK = {
    *("model", "messages", "input", "instructions", "system", "stream", "stream_options", "tools", "tool_choice"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences", "logprobs", "include"),
}
TOOL_CHOICES = ("auto", "none", {"type": "auto"}, {"type": "none"})
WISHES = {"required": "auto", "any": "auto"}  # the model is free all the same; agents that must have a call ask again


@dataclass(eq=False)
class Asking:
    """A request that is being answered."""

    session: Session
    question: Question | None = None
    reply: Reply | None = None


ASKING: ContextVar[Asking] = ContextVar("asking")


class Gateway(App):
    """Answers requests of the episodes that are played."""

    def __init__(self, settings: EpisodeSettings, template: str, tool_parser: str):
        config = VllmConfig(model_config=ModelConfig(settings.model, trust_remote_code=settings.trust_remote_code))
        client = ModelClient(SessionModel(), config)
        client.model_config.max_model_len = UNLIMITED
        front = Front(client, Settings(MODEL, template, settings.template_options, tool_parser), SessionRenderer)
        front.chat.parser_cls = front.messages.parser_cls = front.responses.parser = SessionParser
        front.window = settings.window
        self.decided = NEUTRAL | {"temperature": settings.temperature}
        super().__init__(front, "", lambda: len(self.sessions))
        self.sessions: dict[str, tuple[int, Session]] = {}  # with the number of the episode, by key
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    async def serve(self) -> None:
        close_in_children(self.listener.fileno())
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a program may ask many times at once
        config = uvicorn.Config(self.asgi, log_level="warning", lifespan="off", timeout_keep_alive=KEEP_ALIVE_S)
        await Server(config).serve(sockets=[self.listener])

    def open(self, number: int, session: Session) -> None:
        session.address, session.key = self.address, secrets.token_urlsafe(16)
        self.sessions[session.key] = number, session

    def close(self, session: Session) -> None:
        self.sessions.pop(session.key, None)

    # --- what differs from a server of its own ------------------------------------------------------------------------

    def check_key(self, request: Request) -> None:
        """From here on the request belongs to an episode."""
        number, session = self.sessions.get(self.sent_key(request), (0, None))
        if session is None:
            raise Refusal(401, "The key is missing, wrong, or of an episode that is over.", code="invalid_api_key")
        EPISODE.set(number)
        ASKING.set(Asking(session))

    def check_parameters(self, body: dict[str, Any], dialect: Dialect) -> None:
        """The run decides how turns are sampled: all else would be trained with log-probs that are not the model's."""
        decided = self.decided | ASKING.get().session.sampling  # an evaluation has its own
        for name in [name for name in body if name in decided]:
            if body[name] not in (decided[name], self.decided[name]):
                refuse(name, f"is {json.dumps(decided[name])} in this run, for every request. Leave it out.")
            del body[name]
        choice = body.get("tool_choice", "auto")
        if isinstance(choice, dict) and choice.get("type") in WISHES:
            body["tool_choice"] = {"type": "auto"}
        elif isinstance(choice, str) and choice in WISHES:
            body["tool_choice"] = "auto"
        elif choice not in TOOL_CHOICES:
            refuse("tool_choice", "names a tool: what the model writes is not forced. Leave it out.")
        for name in sorted(set(dialect.supported) - MAY_ASK):
            if body.get(name):
                refuse(name, "cannot be chosen by a request: the run decides how turns are sampled. Leave it out.")
        super().check_parameters(body, dialect)


class SessionRenderer(OnlineRenderer):
    """Has the session find the tokens of a conversation."""

    async def preprocess_chat(
        self, request: Any, messages: list[Any], *_: Any, tool_dicts: Any = None, **__: Any
    ) -> Any:
        asking = ASKING.get()
        conversation, *_ = await parse_chat_messages_async(messages, self.model_config, "string")
        asking.question = asking.session.find([dict(message) for message in conversation], tool_dicts or [])
        return conversation, [tokens_input(asking.session.tokens(asking.question))]


class SessionModel:
    """A `Model` whose answers are turns of an episode."""

    async def generate(
        self, tokens: list[int], params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncIterator[RequestOutput]:
        asking = ASKING.get()
        session, question, stop = asking.session, asking.question, list(params.stop or ())
        assert question, "the renderer has found it"
        try:
            turn = await session.answer(question, params.max_tokens or UNLIMITED, stop)
        except EpisodeOver as over:
            raise VLLMValidationError(describe_end(session, question, over)) from None
        except asyncio.CancelledError:
            if session.closed:
                raise VLLMValidationError("The episode has ended.") from None
            raise
        asking.reply, own = turn.reply, turn.turn
        assert own.logprobs is not None, "sessions ask for them"
        logprobs = [{token: Logprob(value, 1)} for token, value in zip(own.tokens, own.logprobs, strict=True)]
        reason = next((string for string in stop if string in turn.reply.raw), None)
        output = CompletionOutput(
            0, turn.reply.text, own.tokens, None, logprobs, finish_reason=own.finish, stop_reason=reason
        )
        yield RequestOutput(request_id, None, tokens, None, [output], finished=True)


def describe_end(session: Session, question: Question, over: EpisodeOver) -> str:
    limits = session.limits
    return {
        "turns": f"The episode is over: it has had its {limits.max_turns} turns (episode.max_turns).",
        "tokens": f"The episode is over: the model has written its {limits.max_tokens:,} tokens (episode.max_tokens).",
        "window": f"This conversation has {question.length:,} tokens and leaves no room for a reply: the maximum context "
        f"length is {limits.window:,} tokens (episode.window). Go on with a shorter one.",
    }.get(over.reason, "The episode has ended.")


class SessionParser(Parser):
    """Gives vLLM's classes the reply as the episode has it. Its calls have the ids that the model gets to see."""

    tool_parser_cls = object  # type: ignore[assignment]  # there may be calls

    def __init__(self, *_: Any, **__: Any):
        self._reasoning_parser = self._tool_parser = None

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        return True

    def parse(self, *_: Any, **__: Any) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        reply = ASKING.get().reply
        assert reply
        calls = [FunctionCall(id=c.id, name=c.name, arguments=json.dumps(c.arguments)) for c in reply.calls]
        return reply.reasoning or None, reply.text, calls

    def parse_delta(self, *_: Any, **__: Any) -> DeltaMessage:
        reasoning, content, calls = self.parse()
        return DeltaMessage(
            reasoning=reasoning,
            content=content or None,
            tool_calls=[
                DeltaToolCall(
                    index=i, id=c.id, type="function", function=DeltaFunctionCall(name=c.name, arguments=c.arguments)
                )
                for i, c in enumerate(calls or [])
            ],
        )


class Server(uvicorn.Server):
    """Runs in an event loop that is not its own."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()
