"""Tools in a real episode process: the test writes the model's turns in the format of a model family."""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from chat_families import FAMILIES, family_tokenizer
from test_runner import make_answer, settings

from rlsys.episodes.settings import TOOL_PLAY, EpisodeSettings
from rlsys.errors import ConfigError
from workers.episodes.runner import EpisodeRunner
from workers.turns.messages import Asked, Ended, Start

TOOLS = '''
import time

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b

def hang():
    time.sleep(600)
'''

SERVER = """
import time
from mcp.server.mcpserver import MCPServer
server = MCPServer("stubborn")

@server.tool()
async def block() -> str:
    "Keeps the server from seeing that its client is gone."
    time.sleep(600)

server.run(transport="stdio")
"""


def tool_settings(folder: Path, tools: list[Any], **changes: Any) -> EpisodeSettings:
    model = folder / "model"
    family_tokenizer("qwen2_5").save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"} | changes.pop("config", {})))
    (folder / "tools.py").write_text(TOOLS)
    limits = {"window": 4000, "max_turns": 6, "tools": tools, "plays": (TOOL_PLAY,), "step_timeout_s": 20.0}
    return settings(folder, str(model), **limits | changes)


def talk(s: EpisodeSettings, texts: list[str]) -> tuple[Ended, list[str]]:
    """Plays one episode in which the model writes these texts. Returns what it was told before each."""
    tokenizer, observations = family_tokenizer("qwen2_5"), []
    with closing(EpisodeRunner(s)) as episodes:
        episodes.begin_line("rollout-0", 0)
        row = {"prompt": "What is 19 + 23?"}
        episodes.send([Start(1, TOOL_PLAY, row, 200)])
        for events in episodes.events(0):
            for event in events:
                if isinstance(event, Ended):
                    return event, observations
                assert isinstance(event, Asked)
                observations.append(tokenizer.decode(event.observation))
                tokens = tokenizer.encode(texts[event.turn] + FAMILIES["qwen2_5"].eos, add_special_tokens=False)
                episodes.send([make_answer(1, event.turn, tokens, [-1.0] * len(tokens))])
    raise AssertionError


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_the_model_calls_a_function_and_python_and_reads_their_results(tmp_path: Path) -> None:
    texts = [call("add", a=19, b=23), call("python", code="x = 42\nprint(x * 2)"), call("python", code="print(x + 1)")]
    s = tool_settings(tmp_path, [f"{tmp_path}/tools.py:add", "python"])
    ended, observations = talk(s, [*texts, "It is 42."])
    assert ended.finish == "stop"
    assert ended.episode.verdict is None, "reward functions score it"
    results = [m["content"].strip() for m in ended.episode.messages if m["role"] == "tool"]
    assert results == ["42", "84", "43"]
    assert [m["tool_calls"][0]["function"]["name"] for m in ended.episode.messages if m.get("tool_calls")] == [
        "add",
        "python",
        "python",
    ]
    assert "Adds two numbers." in observations[0], "the template tells the model of its tools"
    assert "<tool_response>\n42\n</tool_response>" in observations[1]
    assert observations[1].endswith("<|im_start|>assistant\n")


def test_a_call_that_cannot_be_read_is_told_to_the_model_or_ends_the_episode(tmp_path: Path) -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>'
    s = tool_settings(tmp_path, [f"{tmp_path}/tools.py:add"])
    ended, observations = talk(s, [broken, call("subtract", a=1), call("add", a=1), "Sorry."])
    assert len(observations) == 4
    results = [m["content"] for m in ended.episode.messages if m["role"] == "tool"]
    assert "subtract" in results[1]
    assert "b" in results[2]
    ended, observations = talk(tool_settings(tmp_path, [f"{tmp_path}/tools.py:add"], on_bad_call="end"), [broken])
    assert (len(observations), ended.finish) == (1, "stop")


def test_the_model_is_told_of_a_tool_that_hangs_before_the_step_is_over(tmp_path: Path) -> None:
    s = tool_settings(tmp_path, [f"{tmp_path}/tools.py:add", f"{tmp_path}/tools.py:hang"], step_timeout_s=4.0)
    ended, _ = talk(s, [call("hang"), call("add", a=19, b=23), "It is 42."])
    results = [m["content"].strip() for m in ended.episode.messages if m["role"] == "tool"]
    assert results == ["Error: `hang` gave no result within 3.2 s.", "42"]
    assert (ended.finish, ended.episode.verdict) == ("stop", None)


def test_a_server_ends_with_its_process_even_if_it_hangs(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "stubborn.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "stubborn.py")]
    talk(tool_settings(tmp_path, [{"mcp": {"command": command}}], step_timeout_s=4.0), [call("block"), "Sorry."])
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == command]


def test_a_model_of_no_known_family_needs_the_name_of_a_parser(tmp_path: Path) -> None:
    s = tool_settings(tmp_path, ["python"], config={"model_type": "gpt2"})
    s = EpisodeSettings(**{**vars(s), "template": str(tmp_path / "plain.jinja")})
    (tmp_path / "plain.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    with closing(EpisodeRunner(s)) as episodes, pytest.raises(ConfigError, match=r"episode\.tool_parser.*hermes"):
        episodes.ready.result()
