"""Tools that run in this process or in the sandbox."""

import asyncio
import os
import time
from contextlib import asynccontextmanager

import psutil
import pytest

from rlsys.episodes.tools import Toolbox, call_tool, cut_middle, tool_problems
from rlsys.episodes.tools.python_session import BoundedOutput
from rlsys.episodes.tools.python_tool import PythonTool
from rlsys.episodes.tools.toolbox import close_all
from rlsys.errors import ConfigError
from rlsys.sandbox.outcome import SandboxError

TOOLS = '''
import asyncio, time
def look(key: str, row: dict, state: dict) -> str:
    """Looks a key up."""
    state["count"] = state.get("count", 0) + 1
    return f"{row[key]} {state['count']}"
async def numbers(state: dict):
    await asyncio.sleep(0)
    return {"seen": state.get("count"), "é": [1]}
def thing(): return {1, 2}.__class__
def fail(): raise KeyError("no such book")
def leave(): raise SystemExit(3)
async def leave_at_once(): raise SystemExit(3)
def find_no_server(): raise TimeoutError("no answer from the server")
def stop(): return next(iter([]))
def slow(): time.sleep(5)
'''


@asynccontextmanager
async def opened(tmp_path, *names, row=None):
    file = tmp_path / "my_tools.py"
    file.write_text(TOOLS)
    tools = await Toolbox([f"{file}:{name}" for name in names]).open(row or {})
    yield {tool.name: tool for tool in tools}
    await close_all(tools)


def test_a_function_gets_the_row_and_a_state_that_the_tools_of_an_episode_share(tmp_path):
    async def episode(row):
        async with opened(tmp_path, "look", "numbers", row=row) as tools:
            first = await call_tool(tools["look"], {"key": "a"})
            second = await call_tool(tools["look"], {"key": "a"})
            return [first, second, await call_tool(tools["numbers"], {})]

    assert asyncio.run(episode({"a": "x"})) == ["x 1", "x 2", '{"seen": 2, "é": [1]}']
    assert asyncio.run(episode({"a": "y"})) == ["y 1", "y 2", '{"seen": 2, "é": [1]}'], "its own state"


def test_an_error_of_a_tool_is_what_the_model_sees(tmp_path):
    async def call(name, **options):
        async with opened(tmp_path, name) as tools:
            return await call_tool(tools[name], {}, **options)

    assert asyncio.run(call("fail")) == "Error: KeyError: 'no such book'"
    assert asyncio.run(call("leave")) == "Error: RuntimeError: SystemExit: 3"
    assert asyncio.run(call("leave_at_once")) == "Error: RuntimeError: SystemExit: 3"
    assert asyncio.run(call("find_no_server")) == "Error: TimeoutError: no answer from the server"
    assert asyncio.run(call("stop")) == "Error: RuntimeError: StopIteration"
    assert asyncio.run(call("thing")) == "<class 'set'>"


def test_a_tool_that_hangs_is_left_after_its_time(tmp_path):
    async def call():
        async with opened(tmp_path, "slow") as tools:
            start = time.monotonic()
            return await call_tool(tools["slow"], {}, timeout_s=0.1), time.monotonic() - start

    text, seconds = asyncio.run(call())
    assert text == "Error: `slow` gave no result within 0.1 s."
    assert seconds < 3


def test_many_tools_that_hang_do_not_keep_others_waiting(tmp_path):
    async def calls():
        async with opened(tmp_path, "slow", "thing") as tools:
            await asyncio.gather(*(call_tool(tools["slow"], {}, timeout_s=0.1) for _ in range(100)))
            return await call_tool(tools["thing"], {}, timeout_s=2)

    start = time.monotonic()
    assert asyncio.run(calls()) == "<class 'set'>"
    assert time.monotonic() - start < 4, "nor does the end of the process wait for them"


def test_long_output_loses_its_middle():
    assert cut_middle("abcdef", 6) == "abcdef"
    assert cut_middle("abcdefg", 5) == "ab\n[… 2 characters left out …]\nefg"


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_output_is_bounded_while_it_is_written(size):
    text = "".join(chr(97 + n % 26) for n in range(1000))
    output = BoundedOutput(10)
    for start in range(0, 1000, size):
        output.write(text[start : start + size])
        assert sum(map(len, output.tail)) <= 5 + size
    assert output.value() == f"{text[:5]}\n[… 990 characters left out …]\n{text[-5:]}"
    short = BoundedOutput(10)
    short.write("abcdefgh")
    short.write("ij")
    assert short.value() == "abcdefghij"


# --- python ------------------------------------------------------------------------------------------------------------


def run_python(*codes: str, timeout_s: float = 30.0, **options) -> list[str]:
    async def session() -> list[str]:
        tool = PythonTool(**options)
        outputs = [await call_tool(tool, {"code": code}, timeout_s) for code in codes]
        await tool.close()
        return outputs

    return asyncio.run(session())


def test_python_keeps_variables_and_shows_prints_and_the_last_value():
    assert run_python("x = 2\nprint('é')", "def f(n): return n * x", "print(1)\nf(21)", "None", "input()")[:4] == [
        "é\n",
        "",
        "1\n42\n",
        "",
    ]


def test_an_error_in_python_has_its_line_and_the_session_goes_on():
    first, second, third, fourth = run_python("x = 1\ny = 1 / 0", "f(", "exit(3)", "x")
    assert first == (
        "Traceback (most recent call last):\n"
        '  File "<call 1>", line 2, in <module>\n'
        "    y = 1 / 0\n"
        "        ~~^~~\n"
        "ZeroDivisionError: division by zero\n"
    )
    assert "SyntaxError: '(' was never closed" in second
    assert "SystemExit: 3" in third
    assert fourth == "1\n"


def test_python_that_prints_without_end_is_bounded():
    big, more, last = run_python(
        "print('a' * 100_000_000)", "for _ in range(2_000_000): print('b')", "1", max_chars=100
    )
    assert len(big) < 200
    assert "99,999,901 characters left out" in big
    assert "3,999,900 characters left out" in more
    assert last == "1\n"


def test_python_that_does_not_end_is_stopped_and_the_next_call_starts_anew():
    first, second = run_python("x = 1\nwhile True: pass", "'x' in globals()", timeout_s=4)
    assert first == "Error: `python` gave no result within 4 s."
    assert second == "False\n"


def test_python_that_ends_its_process_says_so():
    first, second = run_python("import os; os._exit(0)", "1")
    assert first.startswith("Error: the Python process ended (exit). The next call starts a new one")
    assert second == "1\n"
    [flood] = run_python("import os\nwhile True: os.write(1, b'a' * 10000)")
    assert flood.startswith("Error: the Python process ended (output).")


def test_python_that_writes_to_our_socket_is_ended():
    [text] = run_python("import os; os.write(3, b'\\xff' * 100)")
    assert text.startswith("Error: the Python process ended")


def test_python_has_no_more_memory_than_it_may_have():
    first, second = run_python("x = bytearray(10**9)", "1", memory_mb=256)
    assert "MemoryError" in first
    assert second == "1\n"


def test_closing_leaves_no_process():
    before = set(psutil.Process(os.getpid()).children())  # other tests of this process may have left some

    async def session() -> None:
        tools = [PythonTool() for _ in range(3)]
        await asyncio.gather(*(call_tool(tool, {"code": "1"}) for tool in tools))
        assert len(set(psutil.Process(os.getpid()).children()) - before) >= 3
        await close_all(tools)

    asyncio.run(session())
    assert set(psutil.Process(os.getpid()).children()) <= before


def test_a_host_without_isolation_is_no_observation(monkeypatch):
    def fail(*_, channel: int, **__):
        os.close(channel)
        raise SandboxError("no isolation here")

    monkeypatch.setattr("rlsys.episodes.tools.python_tool.run_program", fail)
    with pytest.raises(SandboxError, match="no isolation here"):
        run_python("1")


# --- the option --------------------------------------------------------------------------------------------------------


def test_wrong_specifications_are_told(tmp_path):
    file = tmp_path / "my_tools.py"
    file.write_text(TOOLS)
    assert tool_problems(["python", f"{file}:look", {"mcp": {"command": ["a"]}}, {"mcp": {"url": "http://x"}}]) == []
    problems = tool_problems(["pyton", 3, {"mpc": {}}, {"mcp": {"comand": []}}, {"mcp": {}}, f"{file}:loook"])
    assert len(problems) == 6
    assert len(tool_problems([{"mcp": {"command": "python -m my_server"}}, {"mcp": {"command": [5]}}])) == 2
    assert problems[0].startswith("episode.tools: 'pyton' is no tool. Give python, path/to/file.py:function")
    assert "an MCP server is {mcp: {command:" in problems[3]
    assert "has no function `loook`. Functions there: look" in problems[5]


def test_a_missing_package_is_told_with_its_installation(monkeypatch):
    monkeypatch.setattr("rlsys.episodes.tools.toolbox.is_importable", lambda name: name != "mcp")
    [problem] = tool_problems([{"mcp": {"url": "http://x"}}])
    assert problem.endswith("need the package mcp: pip install 'rlsys[mcp]'.")


def test_a_toolbox_has_the_schemas_of_its_tools(tmp_path):
    file = tmp_path / "my_tools.py"
    file.write_text(TOOLS)
    schemas = asyncio.run(Toolbox(["python", f"{file}:look"]).schemas())
    assert [schema["function"]["name"] for schema in schemas] == ["python", "look"]
    assert list(schemas[1]["function"]["parameters"]["properties"]) == ["key"]


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two tools have the name `python`"):
        asyncio.run(Toolbox(["python", "python"]).open({}))
