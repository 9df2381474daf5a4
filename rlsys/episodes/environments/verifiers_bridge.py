"""Joins the package verifiers (`verifiers.v1`) to an episode's `ask`. `verifiers.py` imports this file when needed."""

import json
import sys
import time
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.clients import Client, EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment

from rlsys.episodes.ask import Ask, EpisodeOver, Message, Reply
from rlsys.episodes.conversation import part_text
from rlsys.errors import ConfigError

HARNESS = "rlsys_chat"  # the module name under which the package finds `ChatHarness`


class ChatHarness(Harness[HarnessConfig]):
    """Asks the model once per segment, in this process. Has no tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(message_to_wire, prompt)]
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=None, trust_env=False, verify=False) as http:
            body = {"model": ctx.model, "messages": messages}
            response = await http.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return ProgramResult(int(response.is_error), "", response.text if response.is_error else "")


class AskClient(Client):
    """The package's model client, which calls the `ask` of one episode. Earlier messages must not change."""

    def __init__(self, ask: Ask, server: "AskServer"):
        self.ask, self.server, self.over = ask, server, ""
        self.messages: list[Message] = []  # so far, replies included

    async def get_response(self, dialect: Any, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        messages = [{"role": m["role"], "content": text_of(m)} for m in body["messages"]]
        if body.get("tools"):
            raise RuntimeError("the environment offers tools to the model; rlsys plays environments without tools.")
        if messages[: len(self.messages)] != self.messages:
            raise RuntimeError("the environment has changed earlier messages; an episode is one conversation.")
        try:
            reply = await self.ask(messages[len(self.messages) :])
        except EpisodeOver as error:
            self.over = error.reason
            for session in self.server.sessions.values():
                session.trace.stop(f"max_{error.reason}")
            raise RuntimeError(str(error)) from None
        self.messages = [*messages, {"role": "assistant", "content": reply.text}]
        raw = completion(reply, body["model"], len(self.messages))
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


class AskServer(InterceptionServer):
    """The package's server of one episode, whose model is `ask`."""

    def __init__(self, ask: Ask):
        super().__init__()
        self.client = AskClient(ask, self)

    def _client(self, config: Any) -> Client:
        return self.client


def text_of(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(map(part_text, content))


def completion(reply: Reply, model: str, number: int) -> dict[str, Any]:
    """Returns a reply as OpenAI's API would return it."""
    message = {"role": "assistant", "content": reply.text}
    return {
        "id": f"turn-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "finish_reason": reply.finish, "message": message}],
        "usage": {"prompt_tokens": 0, "completion_tokens": len(reply.tokens), "total_tokens": len(reply.tokens)},
    }


async def run_episode(env: Any, task: Any, ask: Ask) -> tuple[Any, str]:
    """Returns the package's record of the episode, and the limit of ours that has ended it, if one has."""
    context = ModelContext(model="policy", client=EvalClientConfig(base_url="http://127.0.0.1:1/v1"))
    async with AskServer(ask) as server:
        env._interception = server
        await env.start()
        try:
            return await env.run_episode(task, context), server.client.over
        finally:
            await env.stop()


def make_task(env: Any, data: str) -> Any:
    kind = type(env.taskset).task_type()
    return kind(kind.data_type().model_validate_json(data), env.taskset.config.task)


def make_env(name: str, settings: str) -> vf.Env:
    sys.modules.setdefault(HARNESS, sys.modules[__name__])
    taskset = {"id": name} | json.loads(settings)
    seats = list(agent_config_fields(env_config_type(name)(taskset=taskset)))
    if problem := find_problem(name, seats):
        raise ConfigError(
            f"verifiers:{name} {problem}; rlsys plays environments of one agent that chats without tools."
        )
    seat = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
    env = load_environment(env_config_type(name).model_validate({"taskset": taskset, seats[0]: seat}))
    kind, config = type(env.taskset).task_type(), env.taskset.config
    if kind.toolsets(config.task) or type(env.taskset).toolsets(config):
        raise ConfigError(
            f"verifiers:{name} has tools; rlsys plays environments of one agent that chats without tools."
        )
    if kind.NEEDS_CONTAINER:
        raise ConfigError(f"verifiers:{name} needs a container; rlsys plays environments that run in a process.")
    return env


def find_problem(name: str, seats: list[str]) -> str:
    if len(seats) != 1:
        return f"has {len(seats)} agents ({', '.join(seats)})"
    return "brings a program of its own" if default_harness_id(name) == name else ""


__all__ = ["ChatHarness"]  # what the package looks for in a module
