"""A model that says what a test tells it to, behind the real front, on a loopback port."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
import uvicorn
from byte_model import byte_tokenizer, write_byte_model

KEY = "a key"


class Script:
    """A `Model`. It answers everything with `text`, whose token n has the log-prob -n / 8."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.text = tokenizer, "hello"
        self.error: Exception | None = None
        self.fails_at = 0  # which token
        self.waits = False  # for ever, before the last token
        self.asked: list[tuple[str, Any]] = []  # prompts and sampling parameters
        self.running = 0

    async def generate(self, tokens: list[int], params: Any, request_id: str, **reasoning: Any) -> AsyncIterator[Any]:
        from vllm.logprobs import Logprob
        from vllm.outputs import CompletionOutput, RequestOutput
        from vllm.sampling_params import RequestOutputKind

        self.asked.append((self.tokenizer.decode(tokens), params))
        reply = self.tokenizer(self.text, add_special_tokens=False).input_ids
        parts = [[token] for token in reply] if params.output_kind == RequestOutputKind.DELTA else [reply]
        self.running += 1
        try:
            for number, part in enumerate(parts):
                finish = "stop" if number == len(parts) - 1 else None
                if self.error and number == self.fails_at:
                    raise self.error
                if self.waits and finish:
                    await asyncio.Event().wait()
                logprobs = [{token: Logprob(-(number + n) / 8, 1)} for n, token in enumerate(part)]
                text = self.tokenizer.decode(part)
                output = CompletionOutput(0, text, part, None, logprobs, finish_reason=finish)
                yield RequestOutput(request_id, None, tokens, None, [output], finished=finish is not None)
        finally:
            self.running -= 1


class ThreadServer:
    def __init__(self, asgi: Any):
        self.server = uvicorn.Server(uvicorn.Config(asgi, port=0, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            self.thread.join(0.05)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def script() -> Script:
    return Script(byte_tokenizer())


@pytest.fixture(scope="module")
def serve(script: Script, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """`serve(reasoning_parser="qwen3")` returns the address of a front with these settings."""
    from vllm import EngineArgs

    from workers.serve.app import App
    from workers.serve.front import Front
    from workers.serve.model import ModelClient
    from workers.serve.settings import Settings

    folder = write_byte_model(tmp_path_factory.mktemp("model"), model)
    client = ModelClient(script, EngineArgs(model=str(folder)).create_engine_config())
    servers: list[ThreadServer] = []

    def start(**settings: Any) -> str:
        front = Front(client, Settings("demo", **settings))
        servers.append(ThreadServer(App(front, KEY, lambda: script.running).asgi))
        return servers[-1].address

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def address(serve: Callable[..., str]) -> str:
    sampling = {"temperature": 0.5, "max_tokens": 7, "top_p": 0.9, "top_k": 5}
    return serve(tool_parser="hermes", sampling=sampling, stop=["END"])


@pytest.fixture
def chat(address: str, script: Script) -> openai.OpenAI:
    """OpenAI's client, and a script from its beginning."""
    script.text, script.error, script.fails_at, script.waits = "hello", None, 0, False
    script.asked.clear()
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)


@pytest.fixture
def claude(address: str, chat: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0)
