"""Tools of MCP servers: the official client against real servers of the same package."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from command_lines import command_of

from rlsys.episodes.tools import Toolbox, call_tool
from rlsys.episodes.tools.tool import ToolServerError
from rlsys.episodes.tools.toolbox import close_all

SERVER = """
import os, sys
from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, EmbeddedResource, ImageContent, ResourceLink, TextResourceContents
server = MCPServer("numbers")
total = 0

@server.tool()
def add(a: int, b: int = 1) -> str:
    "Adds two numbers."
    global total
    total += 1
    return f"{a + b}, call {total} of {os.environ.get('WHO', 'nobody')}"

@server.tool()
def fail(why: str) -> str:
    raise ValueError(why)

@server.tool()
def die() -> str:
    os._exit(3)

@server.tool()
def die_once(mark: str) -> str:
    if os.path.exists(mark):
        return "alive"
    open(mark, "w").close()
    os._exit(3)

@server.tool()
async def block() -> str:
    import time
    time.sleep(60)

@server.tool()
async def hang() -> str:
    import asyncio
    await asyncio.sleep(60)

@server.tool()
def data() -> CallToolResult:
    return CallToolResult(content=[], structured_content={"answer": [42]})

@server.tool()
def files() -> CallToolResult:
    text = TextResourceContents(uri="file:///a.txt", text="what is in it")
    link = ResourceLink(type="resource_link", uri="file:///b.txt", name="b")
    image = ImageContent(type="image", data="AAAA", mime_type="image/png")
    return CallToolResult(content=[EmbeddedResource(type="resource", resource=text), link, image])

@server.tool()
def write() -> str:
    while True:
        os.write(1, b"a" * 65536)

if len(sys.argv) > 1:
    server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run(transport="stdio")
"""


def left_servers() -> list[list[str]]:
    """Children that run a server of these tests; other tests of this process may have left other children."""
    commands = [command_of(process) for process in psutil.Process(os.getpid()).children()]
    return [command for command in commands if any("server.py" in word for word in command)]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return str(path)


async def calls(spec, *wanted, timeout_s=20.0, episodes=1):
    """Calls tools in each of some episodes; returns what they gave."""
    toolbox, outputs = Toolbox([{"mcp": spec}]), []
    for _ in range(episodes):
        tools = {tool.name: tool for tool in await toolbox.open({})}
        outputs += [await call_tool(tools[name], arguments, timeout_s) for name, arguments in wanted]
        await close_all(list(tools.values()))
    await toolbox.close()
    return outputs


def test_a_server_over_standard_input_shows_its_tools_and_runs_them(script):
    async def schemas():
        toolbox = Toolbox([{"mcp": {"command": [sys.executable, script]}}])
        tools = await toolbox.open({})
        await toolbox.close()
        return {tool.name: tool.schema["function"] for tool in tools}

    functions = asyncio.run(schemas())
    assert list(functions) == ["add", "fail", "die", "die_once", "block", "hang", "data", "files", "write"]
    assert functions["add"]["description"] == "Adds two numbers."
    assert functions["add"]["parameters"]["required"] == ["a"]
    spec = {"command": [sys.executable, script], "env": {"WHO": "me"}}
    [good, bad] = asyncio.run(calls(spec, ("add", {"a": 2}), ("fail", {"why": "too late"})))
    assert good == "3, call 1 of me"
    assert bad == "Error: Error executing tool fail"  # the server keeps the cause to itself
    assert left_servers() == []


def test_results_that_are_no_plain_text_are_shown_as_text(script):
    spec = {"command": [sys.executable, script]}
    data, files = asyncio.run(calls(spec, ("data", {}), ("files", {})))
    assert data == '{"answer": [42]}'
    assert files == "what is in it\n[resource_link file:///b.txt]\n[image]"


def test_a_server_that_answers_nothing_is_named(monkeypatch):
    monkeypatch.setattr("rlsys.episodes.tools.mcp_tool.START_S", 0.5)
    with pytest.raises(ConnectionError, match=r"no MCP server at .*sleep.*: no answer within 0\.5 s"):
        asyncio.run(calls({"command": [sys.executable, "-c", "import time; time.sleep(60)"]}))


def test_episodes_share_a_server_unless_each_has_its_own(script):
    spec = {"command": [sys.executable, script]}
    shared = asyncio.run(calls(spec, ("add", {"a": 2}), episodes=2))
    assert shared == ["3, call 1 of nobody", "3, call 2 of nobody"]
    own = asyncio.run(calls(spec | {"per_episode": True}, ("add", {"a": 2}), episodes=2))
    assert own == ["3, call 1 of nobody", "3, call 1 of nobody"]
    assert left_servers() == []


def test_a_call_that_ends_its_server_twice_fails_the_episode_and_not_the_next_one(script):
    async def session():
        toolbox = Toolbox([{"mcp": {"command": [sys.executable, script]}}])
        tools = {tool.name: tool for tool in await toolbox.open({})}
        first = await call_tool(tools["add"], {"a": 2})
        with pytest.raises(ToolServerError, match=r"server\.py ended during `die`, and a new one did too"):
            await call_tool(tools["die"], {})
        again = await call_tool(tools["add"], {"a": 2})
        await toolbox.close()
        return first, again

    assert asyncio.run(session()) == ("3, call 1 of nobody", "3, call 1 of nobody")
    assert left_servers() == []


def test_a_server_that_dies_once_is_not_seen_by_the_model(script, tmp_path):
    spec = {"command": [sys.executable, script]}
    [text] = asyncio.run(calls(spec, ("die_once", {"mark": str(tmp_path / "mark")})))
    assert text == "alive"


@pytest.mark.long
@pytest.mark.parametrize("per_episode", [False, True])
def test_a_call_that_blocks_the_server_is_not_seen_in_another_episode(script, monkeypatch, per_episode):
    monkeypatch.setattr("rlsys.episodes.tools.mcp_tool.ANSWER_S", 1.0)

    async def session():
        spec = {"command": [sys.executable, script], "per_episode": per_episode}
        toolbox = Toolbox([{"mcp": spec}])
        a, b = [{tool.name: tool for tool in await toolbox.open({})} for _ in range(2)]
        await call_tool(b["add"], {"a": 1})
        slow = asyncio.create_task(call_tool(a["block"], {}, 1.0))
        await asyncio.sleep(0.5)
        quick = await call_tool(b["add"], {"a": 2}, 30.0)
        await close_all([*a.values(), *b.values()])
        await toolbox.close()
        return await slow, quick

    number = 2 if per_episode else 1  # the shared server is a new one
    assert asyncio.run(session()) == ("Error: `block` gave no result within 1 s.", f"3, call {number} of nobody")
    assert left_servers() == []


def test_a_call_that_hangs_ends_and_the_server_goes_on(script):
    spec = {"command": [sys.executable, script]}
    hung, after = asyncio.run(calls(spec, ("hang", {}), ("add", {"a": 2}), timeout_s=4))
    assert hung == "Error: `hang` gave no result within 4 s."
    assert after == "3, call 1 of nobody"


def test_a_server_that_writes_without_end_is_ended(script, monkeypatch):
    monkeypatch.setattr("rlsys.episodes.tools.mcp_tool.ANSWER_S", 0.5)

    async def session():
        toolbox = Toolbox([{"mcp": {"command": [sys.executable, script]}}])
        tools = {tool.name: tool for tool in await toolbox.open({})}
        text = await call_tool(tools["write"], {}, 0.5)
        await asyncio.wait_for(toolbox.servers[0].check, 20)
        again = await call_tool(tools["add"], {"a": 2}, 20)
        await toolbox.close()
        return text, again

    assert asyncio.run(session()) == ("Error: `write` gave no result within 0.5 s.", "3, call 1 of nobody")
    assert left_servers() == []


@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        ({"command": [sys.executable, "-c", "raise SystemExit('no database')"]}, "no database"),
        ({"command": ["there-is-no-such-program"]}, "No such file"),
        ({"url": "http://127.0.0.1:9/mcp"}, "no MCP server at http://127.0.0.1:9/mcp"),
    ],
)
def test_a_server_that_does_not_start_says_why(spec, cause):
    with pytest.raises(ConnectionError, match=cause):
        asyncio.run(calls(spec))


@contextmanager
def http_server(script):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, script, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def test_a_server_over_http_runs_its_tools(script):
    with http_server(script) as url:
        outputs = asyncio.run(calls({"url": url}, ("add", {"a": 2}), ("fail", {"why": "late"})))
        with pytest.raises(ToolServerError, match=f"no MCP server at {url}"):
            asyncio.run(calls({"url": url}, ("die", {})))
    assert outputs[0] == "3, call 1 of nobody"
    assert outputs[1] == "Error: Error executing tool fail"
