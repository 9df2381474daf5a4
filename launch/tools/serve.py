"""`rlsys serve`: a checkpoint of a run, for clients and evaluation harnesses of OpenAI's and Anthropic's interfaces."""

import asyncio
import os
import secrets
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from launch.printing import print_line
from launch.tools.targets import find_run, merged_model, model_directory
from rlsys.config import loading
from rlsys.config.schema import Config
from rlsys.data.render import read_template
from rlsys.episodes.formats import suggest_tool_parser
from rlsys.errors import ConfigError, WorkerLost
from rlsys.runs.checkpoint import list_checkpoints
from workers.serve.settings import Settings

KEY_VARIABLE = "RLSYS_SERVE_KEY"
LAST_REPLIES_S = 5  # for replies that are being written when the server is ended


@dataclass(frozen=True)
class ServeOptions:
    run: str
    step: int | None = None  # of the checkpoint; None: the newest
    port: int = 8000  # 0: any
    overrides: tuple[str, ...] = ()


def serve(options: ServeOptions, console: Console) -> None:
    """Serves until Ctrl-C."""
    run = find_run(options.run)
    if run is None:
        raise ConfigError(
            f"{options.run} is no run, and belongs to none. Give the directory of a run, such as runs/demo."
        )
    config = loading.load_config(run / "config.yaml", options.overrides)
    checkpoint = find_checkpoint(run, options.step) if options.step is not None else Path(options.run).expanduser()
    listener = open_port(options.port)
    with listener, merged_model(str(model_directory(checkpoint)), console) as model:
        print_line(console, f"{run.name}: starting an engine of {model}")
        with tempfile.TemporaryDirectory(prefix="rlsys-serve-") as temporary:  # vLLM leaves sockets and caches
            os.environ["TMPDIR"] = tempfile.tempdir = temporary
            asyncio.run(serve_model(config, run.name, model, listener, console))


def find_checkpoint(run: Path, step: int) -> Path:
    checkpoints = dict(list_checkpoints(run / "checkpoints"))
    if step not in checkpoints:
        saved = ", ".join(map(str, checkpoints)) or "none"
        raise ConfigError(f"--step: {run} has no checkpoint of step {step}. It has {saved}.")
    return checkpoints[step]


def open_port(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise ConfigError(
            f"--port: {port} on 127.0.0.1 cannot be used: {error.strerror}. Choose another, or 0 for any free one."
        ) from None


async def serve_model(config: Config, name: str, model: str, listener: socket.socket, console: Console) -> None:
    from workers.serve.engine import ServingEngine, serving_environment

    os.environ.update(serving_environment(config))
    engine = ServingEngine(config, model)
    try:
        import uvicorn

        from workers.serve.app import App
        from workers.serve.front import Front
        from workers.serve.model import ModelClient

        key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(16)
        front = Front(ModelClient(engine, engine.engine.vllm_config), front_settings(config, name, model))
        app = App(front, key, engine.requests)
        server = uvicorn.Server(uvicorn.Config(app.asgi, log_level="warning", timeout_graceful_shutdown=LAST_REPLIES_S))
        print_addresses(listener.getsockname()[1], key, name, console)
        ended = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not ended.done() and engine.requests() is not None:
            await asyncio.wait([ended], timeout=1.0)
        server.should_exit = True
        await ended
        if engine.requests() is None:
            raise WorkerLost("the engine has died; its last words are above. Start the server again.")
    finally:
        engine.close()


def front_settings(config: Config, name: str, model: str) -> Settings:
    from transformers import AutoConfig, AutoTokenizer

    trust = {"trust_remote_code": config.model.trust_remote_code}
    template = read_template(config.data.template) if config.data.template else ""
    spoken = template or str(AutoTokenizer.from_pretrained(model, **trust).chat_template or "")
    known = suggest_tool_parser(AutoConfig.from_pretrained(model, **trust).to_dict(), spoken)
    r = config.rollout
    return Settings(
        name,
        template,
        config.data.template_options,
        config.episode.tool_parser or known,
        config.episode.reasoning_parser,
        {"temperature": r.temperature, "max_tokens": r.max_new_tokens},
        r.stop,
    )


def print_addresses(port: int, key: str, name: str, console: Console) -> None:
    address = f"http://127.0.0.1:{port}"
    print_line(console, f"{name} is served. The model's name is {name}. Ctrl-C ends this.")
    print_line(console, f"OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY={key}")
    print_line(console, f"ANTHROPIC_BASE_URL={address} ANTHROPIC_API_KEY={key}")
