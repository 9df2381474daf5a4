"""Programs that ask for what they cannot have, or behave badly: each gets a clear answer or fails alone, and others go on."""

import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from byte_model import write_byte_model
from written_engines import play_all, texts

from rlsys.types import Sample, Verdict


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("model"), tiny_model)


def verdict(sample: Sample) -> Verdict:
    assert sample.episode
    assert sample.episode.verdict
    return sample.episode.verdict


FORCED = {"type": "function", "function": {"name": "add"}}
REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "another model": ({"model": "gpt-5"}, 404, "There is no model `gpt-5`. This server has `policy`."),
    "two replies": ({"n": 2}, 400, "The parameter `n` is 1 in this run, for every request. Leave it out."),
    "a temperature": ({"temperature": 0.3}, 400, "The parameter `temperature` is 1.0 in this run, for every request."),
    "a nucleus": ({"top_p": 0.9}, 400, "The parameter `top_p` is 1.0 in this run"),
    "a seed": ({"seed": 3}, 400, "The parameter `seed` cannot be chosen by a request"),
    "a form": ({"response_format": {"type": "json_object"}}, 400, "The parameter `response_format` is"),
    "a bias": ({"logit_bias": {"5": 3}}, 400, "The parameter `logit_bias` cannot be chosen by a request"),
    "likelier tokens": ({"logprobs": True, "top_logprobs": 3}, 400, "The parameter `top_logprobs` is 0 in this run"),
    "a forced call": ({"tool_choice": FORCED}, 400, "The parameter `tool_choice` names a tool"),
    "a search": ({"tools": [{"type": "web_search"}]}, 400, "has a tool of the type `web_search`"),
    "no messages": ({"messages": []}, 400, "messages"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "takes text alone"),
    "a long one": ({"messages": [{"role": "user", "content": "a" * 5000}]}, 400, "episode.window is 4,096"),
    "something else": ({"wishes": 3}, 400, "The parameter `wishes` is not supported. Leave it out."),
}
REQUESTS = """
import asyncio, httpx
BODY = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
async def play(row, session):
    async with httpx.AsyncClient(base_url=session.openai_url, timeout=60) as client:
        async def post(body, key=session.key, path="/chat/completions", **more):
            content = {"json": body} if isinstance(body, dict) else {"content": body}
            return await client.post(path, **content, headers={"Authorization": f"Bearer {key}"} | more)
"""


def test_what_is_refused_says_why_and_how_to_go_on(tmp_path: Path, byte_model: Path) -> None:
    code = (
        REQUESTS
        + """
        refused = {}
        for name, change in row["bodies"].items():
            for stream in ({}, {"stream": True}):
                reply = await post(BODY | change | stream)
                refused[name] = [reply.status_code, reply.json()["error"]["message"]]
        refused["no JSON"] = await post(b"{")
        refused["a list"] = await post(b"[]")
        refused["a large one"] = await post(b" " * (17 << 20))
        refused["no key"] = await client.post("/chat/completions", json=BODY)
        refused["a foreign key"] = await post(BODY, key="abc")
        refused["another path"] = await post(BODY, path="/embeddings")
        for name, reply in refused.items():
            if not isinstance(reply, list):
                refused[name] = [reply.status_code, reply.json()["error"]["message"]]
        assert (await post(BODY | {"temperature": 1.0, "n": 1, "top_p": 1, "frequency_penalty": 0.0})).status_code == 200
        models = (await client.get("/models", headers={"x-api-key": session.key})).json()
        assert models["data"][0]["id"] == session.model == "policy", models
        assert models["data"][0]["max_model_len"] == 4096, models
        return {"score": 1.0, "answer": repr(refused)}
"""
    )
    rows = [{"bodies": {name: body for name, (body, _, _) in REFUSED.items()}}]
    [sample], _ = play_all(tmp_path, byte_model, code, lambda before: "reply", rows)
    assert verdict(sample).score == 1, verdict(sample).detail
    assert len(texts(sample)) == 1
    refused = eval(verdict(sample).answer or "")
    for name, (_, status, sentence) in REFUSED.items():
        assert refused[name][0] == status, name
        assert sentence in refused[name][1], name
    others = {name: tuple(reply) for name, reply in refused.items() if name not in REFUSED}
    assert {name: status for name, (status, _) in others.items()} == {
        "no JSON": 400, "a list": 400, "a large one": 413, "no key": 401, "a foreign key": 401, "another path": 404,
    }  # fmt: skip
    assert others["no key"][1] == "The key is missing, wrong, or of an episode that is over."


def test_a_thousand_requests_at_once(tmp_path: Path, byte_model: Path) -> None:
    code = """
import asyncio, collections, json
async def play(row, session):
    host, port = session.address.removeprefix("http://").split(":")
    async def post(n):
        reader, writer = await asyncio.open_connection(host, port)
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": str(n)}]})
        head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nX-Api-Key: {session.key}\\r\\nConnection: close\\r\\n"
        writer.write(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n{body}".encode())
        reply = (await reader.read()).decode()
        writer.close()
        return int(reply.split()[1]), json.loads(reply.partition("\\r\\n\\r\\n")[2])
    replies = await asyncio.gather(*map(post, range(1000)))
    sentences = {body["error"]["message"] for status, body in replies if status == 400}
    assert sentences == {"The episode is over: it has had its 30 turns (episode.max_turns)."}, sentences
    return float([status for status, _ in replies].count(200))
"""
    samples, _ = play_all(tmp_path, byte_model, code, lambda before: "reply", [{}, {}], max_turns=30)
    for sample in samples:
        assert verdict(sample).score == 30, verdict(sample).detail
        assert len(texts(sample)) == 30
        assert sample.finish == "turns"


def test_limits_end_an_episode_and_its_score_stays_open(tmp_path: Path, byte_model: Path) -> None:
    """The program hears of them as of an error of its request. After a window that is full it may go on with less."""
    code = (
        REQUESTS
        + """
        history = []
        for n in range(9):
            history.append({"role": "user", "content": f"{n} " + row["text"]})
            reply = await post(BODY | {"messages": history})
            if row["compacts"] and reply.status_code == 400:
                assert "maximum context length is 4,096 tokens" in reply.text, reply.text
                history = history[-1:]
                reply = await post(BODY | {"messages": history})
            reply.raise_for_status()
            history.append(reply.json()["choices"][0]["message"])
        return 1.0
"""
    )
    rows = [
        {"text": "a", "compacts": False},
        {"text": "a" * 900, "compacts": False},
        {"text": "a" * 900, "compacts": True},
    ]
    few, full, compacted = play_all(tmp_path, byte_model, code, lambda before: f"reply {len(before)}", rows)[0]
    assert (few.finish, few.turn_count, few.episode and few.episode.verdict) == ("turns", 8, None)
    assert (full.finish, full.turn_count, full.episode and full.episode.verdict) == ("window", 4, None)
    assert (compacted.finish, compacted.turn_count) == ("turns", 8)
    assert compacted.continued_turns.count(-1) == 2


CLIENTS = {
    "vanishes": """
        try:
            await asyncio.wait_for(post(BODY), 0.5)
        except TimeoutError:
            pass
        reply = await post(BODY)
        return float(reply.json()["choices"][0]["message"]["content"] == "reply")
""",
    "vanishes for ever": """
        try:
            await asyncio.wait_for(post(BODY), 0.5)
        except TimeoutError:
            await asyncio.sleep(1000)
""",
    "returns while it asks": """
        asyncio.ensure_future(post(BODY))
        await post(BODY | {"messages": [{"role": "user", "content": "b"}], "max_tokens": 2})
        asyncio.ensure_future(post(BODY | {"messages": [{"role": "user", "content": "c"}]}))
        await asyncio.sleep(0.05)
        return 1.0
""",
    "reads nothing": """
        request = client.build_request("POST", "/chat/completions", json=BODY | {"stream": True}, headers={"x-api-key": session.key})
        await client.send(request, stream=True)
        return 1.0
""",
    "asks after its end": """
        async def later():
            await asyncio.sleep(2.5)
            async with httpx.AsyncClient(base_url=session.openai_url) as another:
                reply = await another.post("/chat/completions", json=BODY, headers={"x-api-key": session.key})
                open(row["mark"], "w").write(f"{reply.status_code} {reply.text}")
        row["task"] = asyncio.ensure_future(later())
        await post(BODY)
        return 1.0
""",
}


def test_clients_that_come_and_go(tmp_path: Path, byte_model: Path) -> None:
    code = (
        REQUESTS.replace("async def play(row", "async def play(row")
        + "        return await globals()[row['name']](row, session, client, post)\n"
    )
    for name, body in CLIENTS.items():
        indented = re.sub("(?m)^    ", "", body)
        code += f"async def {name.replace(' ', '_')}(row, session, client, post):{indented}\n"
    rows = [{"name": name.replace(" ", "_"), "mark": str(tmp_path / "mark")} for name in CLIENTS]
    rows.append({"name": "asks_after_its_end", "mark": str(tmp_path / "mark")})
    samples, _ = play_all(tmp_path, byte_model, code, lambda before: "reply", rows, delay_s=1.5, step_timeout_s=4.0)
    by_name = dict(zip(CLIENTS, samples, strict=False))
    for name in ("vanishes", "returns while it asks", "reads nothing", "asks after its end"):
        assert verdict(by_name[name]).score == 1, (name, verdict(by_name[name]).detail)
    assert by_name["vanishes"].turn_count == 1, "it was sampled once"
    gone = verdict(by_name["vanishes for ever"])
    assert (gone.failure, by_name["vanishes for ever"].finish) == ("timeout", "time")
    assert "after turn 1 took more than 4 s (episode.step_timeout_s)" in gone.detail
    assert (tmp_path / "mark").read_text().startswith("401 "), "the episode is over"


PROGRAM = """
import json, os, subprocess, sys, time
from urllib.request import Request, urlopen
def ask(text):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return json.load(urlopen(Request(url, json.dumps(body).encode(), headers)))["choices"][0]["message"]["content"]
kind, task = sys.argv[1:]
print("I was given", task, flush=True)
"""
PROGRAMS = {
    "answers": "print(ask(task)); open(os.environ['RLSYS_FOLDER'] + '/answer.txt', 'w').write(ask(task + '!'))",
    "exits": "ask(task); sys.exit(3)",
    "never asks": "",
    "prints": "ask(task)\nfor _ in range(1024): sys.stdout.buffer.write(b'x' * (1 << 20))",
    "leaves a daemon": "ask(task); subprocess.Popen(['sleep', '@1'], start_new_session=True)",
    "hides a daemon": "ask(task); subprocess.Popen(['sleep', '@2'], env={}, stdout=None)",
    "forks": "\n[os.fork() for _ in range(3)]\nask(task)\ntime.sleep(0.5)",
    "hangs": "ask(task); time.sleep(1000)",
    "is no Python": "(",
}
GRADE = """
async def grade(row, program):
    answer = program.folder / "answer.txt"
    return {"score": float(answer.exists() and answer.read_text() == "reply"), "answer": f"{program.exit_code} {len(program.messages)} {program.output[-80:]}"}
def fails(row, program):
    raise ValueError("no grade")
"""


@pytest.mark.parametrize("grade", ["", "grade", pytest.param("fails", marks=pytest.mark.long)])
def test_programs_of_every_kind(tmp_path: Path, byte_model: Path, grade: str) -> None:
    for name, code in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(PROGRAM + code.replace("@", str(os.getpid())))
    (tmp_path / "grading.py").write_text(GRADE)
    rows = [{"kind": f"{tmp_path}/{name}.py", "task": "say 'it'; $HOME", "n": n} for n, name in enumerate(PROGRAMS)]
    options = {"command": "python {kind} {n} {task}"} | ({"grade": f"{tmp_path}/grading.py:{grade}"} if grade else {})
    samples, _ = play_all(
        tmp_path, byte_model, "", lambda before: "reply", rows, plays=("command",), options=options, step_timeout_s=8.0
    )
    assert not [p.pid for p in psutil.process_iter() if is_left(p)]
    of = dict(zip(PROGRAMS, samples, strict=True))
    never = "python ended with exit code 0, and never asked the model. Its last words: I was given say 'it'"
    assert never in verdict(of["never asks"]).detail
    assert verdict(of["hangs"]).failure == "timeout"
    asked = [texts(of[name])[-1][0] for name in PROGRAMS if name not in ("never asks", "is no Python")]
    assert set(asked) == {
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nsay 'it'; $HOME<|im_end|>\n<|im_start|>assistant\n"
    }
    assert len(texts(of["answers"])) == 2
    assert len(texts(of["forks"])) == 1, "all asked for the same"
    if grade == "fails":
        assert all(verdict(of[name]).failure for name in PROGRAMS)
        assert "no grade" in verdict(of["answers"]).detail
    elif grade:
        scores = {name: verdict(of[name]).score for name in ("answers", "exits", "prints", "leaves a daemon")}
        assert scores == {"answers": 1, "exits": 0, "prints": 0, "leaves a daemon": 0}
        assert (verdict(of["exits"]).answer or "").startswith("3 2 I was given say 'it'; $HOME")
        assert verdict(of["prints"]).answer == "0 2 " + "x" * 80
    else:
        assert of["answers"].episode
        assert of["answers"].episode.verdict is None, "reward functions score it"
        assert (
            "python ended with exit code 3. Its last words: I was given say 'it'; $HOME" in verdict(of["exits"]).detail
        )
        assert "SyntaxError" in verdict(of["is no Python"]).detail


def is_left(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[:1] == ["sleep"] and process.cmdline()[1] in (f"{os.getpid()}1", f"{os.getpid()}2")
    except psutil.Error:
        return False


IDLE = """
import asyncio, http.client, json

async def play(row, session):
    connection = http.client.HTTPConnection(session.openai_url.split("/")[2])
    def ask(text):
        body = {"model": session.model, "messages": [{"role": "user", "content": text}]}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Authorization": f"Bearer {session.key}"})
        return connection.getresponse().read()
    await asyncio.to_thread(ask, "1")
    first = connection.sock
    await asyncio.sleep(6)
    await asyncio.to_thread(ask, "2")
    return float(connection.sock is first)
"""


@pytest.mark.long
def test_a_connection_that_was_idle_still_serves(tmp_path: Path, byte_model: Path) -> None:
    """A client that reuses it at the moment in which the server gives it up would get an error."""
    [sample], _ = play_all(tmp_path, byte_model, IDLE, lambda before: "fine", [{}])
    assert sample.episode
    assert sample.episode.verdict
    assert sample.episode.verdict.score == 1.0, sample.episode.verdict
    assert sample.turn_count == 2


def test_a_row_without_the_column_of_the_command(tmp_path: Path, byte_model: Path) -> None:
    options = {"command": "python agent.py {question}"}
    [sample], _ = play_all(tmp_path, byte_model, "", str, [{"task": "a"}], plays=("command",), options=options)
    assert "episode.command: the row has no `question`. It has task." in verdict(sample).detail
    assert os.listdir(tmp_path)
