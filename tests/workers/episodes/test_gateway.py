"""Programs that ask the model at a web address, through OpenAI's and Anthropic's own clients, in a real episode process."""

from pathlib import Path

import pytest
from byte_model import write_byte_model
from written_engines import play_all, texts

from rlsys.episodes.figures import describe_unknown, episode_figures

SYSTEM = "<|im_start|>system\nYou help.<|im_end|>\n"
OPENS, CLOSES = "<|im_start|>assistant\n", "<|im_end|>"


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("model"), tiny_model)


def count(before: str) -> str:
    """Writes which turn it is, by what it sees."""
    return f"reply {before.count(OPENS)}"


CLIENTS = {
    "chat": """
import openai
async def play(row, session):
    client = openai.AsyncOpenAI(base_url=session.openai_url, api_key=session.key, max_retries=0)
    history = []
    for n in range(3):
        history.append({"role": "user", "content": f"question {n}"})
        reply = await client.chat.completions.create(model=session.model, messages=history, logprobs=True)
        choice = reply.choices[0]
        assert choice.finish_reason == "stop", choice
        assert [t.logprob for t in choice.logprobs.content] == [-i / 8 for i in range(len("reply 1") + 1)], choice
        history.append({"role": "assistant", "content": choice.message.content})
    return float(len(history))
""",
    "blocking": """
import openai
def play(row, session):
    client = openai.OpenAI(base_url=session.openai_url, api_key=session.key, max_retries=0)
    history = []
    for n in range(3):
        history.append({"role": "user", "content": f"question {n}"})
        reply = client.chat.completions.create(model=session.model, messages=history)
        history.append(reply.choices[0].message.model_dump(exclude_none=True))
    return float(len(history))
""",
    "streamed": """
import openai
async def play(row, session):
    client = openai.AsyncOpenAI(base_url=session.openai_url, api_key=session.key, max_retries=0)
    history = []
    for n in range(3):
        history.append({"role": "user", "content": [{"type": "text", "text": f"question {n}"}]})
        stream = await client.chat.completions.create(model=session.model, messages=history, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        history.append({"role": "assistant", "content": text + " "})
    return float(len(history))
""",
    "responses": """
import openai
async def play(row, session):
    client = openai.AsyncOpenAI(base_url=session.openai_url, api_key=session.key, max_retries=0)
    history = []
    for n in range(3):
        history.append({"role": "user", "content": f"question {n}"})
        reply = await client.responses.create(model=session.model, input=history)
        history += [item.model_dump(exclude_none=True) for item in reply.output]
        assert reply.output_text == f"reply {n + 1}", reply
    return 6.0
""",
    "messages": """
import anthropic
async def play(row, session):
    client = anthropic.AsyncAnthropic(base_url=session.anthropic_url, api_key=session.key, max_retries=0)
    history = []
    for n in range(3):
        history.append({"role": "user", "content": f"question {n}"})
        length = await client.messages.count_tokens(model=session.model, messages=history)
        reply = await client.messages.create(model=session.model, messages=history, max_tokens=100)
        assert reply.usage.input_tokens == length.input_tokens, (reply.usage, length)
        history.append({"role": "assistant", "content": reply.content})
    return float(len(history))
""",
    "streamed messages": """
import anthropic
async def play(row, session):
    client = anthropic.AsyncAnthropic(base_url=session.anthropic_url, api_key=session.key, max_retries=0)
    history = []
    for n in range(3):
        history.append({"role": "user", "content": f"question {n}"})
        async with client.messages.stream(model=session.model, messages=history, max_tokens=100) as stream:
            text = "".join([text async for text in stream.text_stream])
        history.append({"role": "assistant", "content": text})
    return float(len(history))
""",
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_conversation_is_one_episode_in_every_dialect(tmp_path: Path, byte_model: Path, client: str) -> None:
    [sample], engines = play_all(tmp_path, byte_model, CLIENTS[client], count, [{}])
    assert sample.episode
    assert sample.episode.verdict
    assert sample.episode.verdict.score == 6, sample.episode.verdict.detail
    assert texts(sample) == [
        (SYSTEM + user("question 0") + OPENS, -1, "reply 1" + CLOSES),
        ("\n" + user("question 1") + OPENS, 0, "reply 2" + CLOSES),
        ("\n" + user("question 2") + OPENS, 1, "reply 3" + CLOSES),
    ]
    assert len({request.seed for request in engines.requests}) == 3
    history = [(m["role"], m["content"].strip()) for m in sample.episode.messages]
    assert history == [(role, f"{text} {n + (role == 'assistant')}") for n in range(3) for role, text in
                    (("user", "question"), ("assistant", "reply"))]  # fmt: skip


TOOL = """
import json, openai
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}
"""
WITH_TOOLS = {
    "chat": TOOL
    + """
async def play(row, session):
    client = openai.AsyncOpenAI(base_url=session.openai_url, api_key=session.key, max_retries=0)
    history = [{"role": "user", "content": "2+2?"}]
    while True:
        reply = (await client.chat.completions.create(model=session.model, messages=history, tools=[{"type": "function", "function": ADD}])).choices[0]
        history.append(reply.message.model_dump(exclude_none=True))
        if not reply.message.tool_calls:
            return float(reply.message.content)
        assert reply.finish_reason == "tool_calls"
        for call in reply.message.tool_calls:
            result = sum(json.loads(call.function.arguments).values())
            history.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
""",
    "streamed chat": TOOL
    + """
async def play(row, session):
    client = openai.AsyncOpenAI(base_url=session.openai_url, api_key=session.key, max_retries=0)
    history = [{"role": "user", "content": "2+2?"}]
    for turn in range(2):
        stream = await client.chat.completions.create(model=session.model, messages=history, tools=[{"type": "function", "function": ADD}], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        text = "".join(delta.content or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        if not calls:
            return float(text)
        [call] = calls
        arguments = json.dumps(json.loads(call.function.arguments), indent=1)
        function = {"name": call.function.name, "arguments": arguments}
        history.append({"role": "assistant", "content": text or None, "tool_calls": [{"id": call.id, "type": "function", "function": function}]})
        history.append({"role": "tool", "tool_call_id": call.id, "content": "4"})
""",
    "responses": TOOL
    + """
async def play(row, session):
    client = openai.AsyncOpenAI(base_url=session.openai_url, api_key=session.key, max_retries=0)
    history = [{"role": "user", "content": "2+2?"}]
    while True:
        reply = await client.responses.create(model=session.model, input=history, tools=[{"type": "function"} | ADD])
        history += [item.model_dump(exclude_none=True) for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return float(reply.output_text)
        for call in calls:
            result = sum(json.loads(call.arguments).values())
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": str(result)})
""",
    "messages": TOOL
    + """
import anthropic
async def play(row, session):
    client = anthropic.AsyncAnthropic(base_url=session.anthropic_url, api_key=session.key, max_retries=0)
    history = [{"role": "user", "content": "2+2?"}]
    tools = [{"name": "add", "input_schema": ADD["parameters"]}]
    while True:
        reply = await client.messages.create(model=session.model, messages=history, tools=tools, max_tokens=200)
        history.append({"role": "assistant", "content": [part.model_dump(exclude_none=True) for part in reply.content]})
        calls = [part for part in reply.content if part.type == "tool_use"]
        if not calls:
            return float(reply.content[0].text)
        assert reply.stop_reason == "tool_use"
        history.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": str(sum(call.input.values()))} for call in calls]})
""",
}


def call_then_answer(before: str) -> str:
    return "4" if "<tool_response>" in before else CALL


CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


@pytest.mark.parametrize("client", WITH_TOOLS)
def test_tools_that_a_program_brings(tmp_path: Path, byte_model: Path, client: str) -> None:
    """The model's call stays as it was sampled, whatever the program makes of its text."""
    [sample], _ = play_all(tmp_path, byte_model, WITH_TOOLS[client], call_then_answer, [{}], tool_parser="hermes")
    assert sample.episode
    assert sample.episode.verdict
    assert sample.episode.verdict.score == 4, sample.episode.verdict.detail
    [(first, _, call), (result, after, answer)] = texts(sample)
    assert '"name": "add"' in first
    assert (call, answer, after) == (CALL + CLOSES, "4" + CLOSES, 0)
    assert result == "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n" + OPENS
    [called] = [message for message in sample.episode.messages if message.get("tool_calls")]
    assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 2}}


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_the_calculators_programs(tmp_path: Path, byte_model: Path, client: str) -> None:
    plays = (f"rlsys.tasks.calculator_agents:with_{client}",)
    rows = [{"prompt": "2+2"}, {"prompt": "wrong"}]

    def writes(before: str) -> str:
        return call_then_answer(before).replace('"b": 2', '"c": 2' if "wrong" in before else '"b": 2')

    right, wrong = play_all(tmp_path, byte_model, "", writes, rows, plays=plays, tool_parser="hermes")[0]
    for sample, result in ((right, "4"), (wrong, "add() got an unexpected keyword argument 'c'")):
        assert sample.episode
        assert sample.episode.verdict is None, "reward functions score it"
        assert [message["content"] for message in sample.episode.messages if message["role"] == "tool"] == [result]
        assert sample.continued_turns == [-1, 0]


def test_a_call_that_cannot_be_read_is_text(tmp_path: Path, byte_model: Path) -> None:
    """The program gets it without the tokens that end a turn, and the conversation goes on with what was sampled."""
    code = WITH_TOOLS["chat"].replace(
        "return float(reply.message.content)", 'return {"score": 1.0, "answer": reply.message.content}'
    )
    broken = CALL.replace("2}}", "2")
    [sample], _ = play_all(tmp_path, byte_model, code, lambda before: broken, [{}], tool_parser="hermes")
    assert sample.episode
    assert sample.episode.verdict
    assert sample.episode.verdict.answer == broken, sample.episode.verdict.detail
    assert [own for *_, own in texts(sample)] == [broken + CLOSES]


CUTS = """
import asyncio, openai
async def play(row, session):
    client = openai.AsyncOpenAI(base_url=session.openai_url, api_key=session.key, max_retries=0)

    async def ask(*history, **more):
        messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(history)]
        reply = await client.chat.completions.create(model=session.model, messages=messages, **more)
        return reply.choices[0].message.content
"""
PROGRAMS = {
    "compacts": """
    first = await ask("a")
    second = await ask("a", first, "b")
    summary = await ask("a", first, "b", second, "sum up")
    third = await ask(f"so far: {summary}. c")
    await ask(f"so far: {summary}. c", third, "d")
    return 1.0
""",
    "has branches": """
    first = await ask("a")
    b, c, d = await asyncio.gather(ask("a", first, "b"), ask("a", first, "c"), ask("other"))
    await asyncio.gather(ask("a", first, "c", c, "e"), ask("other", d, "f"), ask("a", first, "b", b, "g"))
    return 1.0
""",
    "asks again": """
    first, again = await asyncio.gather(ask("a"), ask("a"))
    assert first == again == await ask("a")
    second = await ask("a", first, "b")
    assert second == await ask("a", first, "b")
    return 1.0
""",
    "changes what it said": """
    first = await ask("a")
    await ask("a", first, "b")
    await ask("a", first.upper(), "b")
    await ask("changed", first, "b")
    return 1.0
""",
    "stops at strings": """
    first = await ask("a", stop=["ly"])
    assert first == "rep", first
    second = await ask("a", first, "b", stop="2")
    assert second == "reply ", second
    third = await ask("a", first, "b", second, "c", max_tokens=3)
    assert third == "rep", third
    return 1.0
""",
}


def question(text: str, after: int = -1) -> tuple[str, int]:
    return (SYSTEM if after < 0 else "\n") + user(text) + OPENS, after


def anew(*history: str) -> str:
    """A conversation that begins anew, with replies that no turn is known for."""
    turns = [user(text) if n % 2 == 0 else OPENS + text + CLOSES + "\n" for n, text in enumerate(history)]
    return SYSTEM + "".join(turns) + OPENS


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_conversation_may_be_cut_in_any_way(tmp_path: Path, byte_model: Path, program: str) -> None:
    [sample], engines = play_all(tmp_path, byte_model, CUTS + PROGRAMS[program], count, [{}], max_turns=10)
    assert sample.episode
    assert sample.episode.verdict
    assert sample.episode.verdict.score == 1, sample.episode.verdict.detail
    turns = texts(sample)
    asked = [(observation, after) for observation, after, _ in turns]
    if program == "compacts":
        assert sorted(own for *_, own in turns) == [f"reply {n}{CLOSES}" for n in (1, 1, 2, 2, 3)]
        assert {question("a"), question("b", 0), question("sum up", 1), question("so far: reply 3. c")} < {*asked}
    elif program == "has branches":
        assert len(turns) == 7
        assert sorted(after for _, after in asked if after < 0) == [-1, -1]
        place = {observation: n for n, (observation, _) in enumerate(asked)}
        root, b, c, other = (
            place[question(text, -1 if text in "a other" else 0)[0]] for text in ("a", "b", "c", "other")
        )
        assert {text: asked[place[question(text, 0)[0]]][1] for text in "bcefg"} == {
            "b": root, "c": root, "e": c, "f": other, "g": b,
        }  # fmt: skip
    elif program == "asks again":
        assert asked == [question("a"), question("b", 0)]
    elif program == "changes what it said":
        sentence = "2 replies in what programs say are not as the model has written them: it saw these conversations"
        assert describe_unknown([sample]).startswith(sentence)
        assert episode_figures([sample])["episode/unknown_replies"] == 2
        assert {*asked} == {question("a"), question("b", asked.index(question("a"))),
                            (anew("a", "REPLY 1", "b"), -1), (anew("changed", "reply 1", "b"), -1)}  # fmt: skip
    else:
        assert [own for *_, own in turns] == ["reply", "reply 2", "rep"]
        assert asked == [question("a"), (CLOSES + question("b", 0)[0], 0), (CLOSES + question("c", 1)[0], 1)]
        assert [request.stop for request in engines.requests] == [("ly",), ("2",), ()]
    assert len(engines.requests) == len(turns), "each is sampled once"
    assert bool(describe_unknown([sample])) == (program == "changes what it said")
    assert len({request.seed for request in engines.requests}) == len(turns)


def test_the_order_of_replies_changes_nothing(tmp_path: Path, byte_model: Path) -> None:
    """The same requests in another order have the same seeds, and give the same sample."""
    code = (
        CUTS
        + """
    async def later(seconds, *history):
        await asyncio.sleep(seconds)
        return await ask(*history)
    first = await ask("a")
    waits = row["waits"]
    await asyncio.gather(*(later(waits[n], "a", first, text) for n, text in enumerate("bcd")))
    return 1.0
"""
    )
    rows = [{"waits": waits} for waits in ([0, 0.3, 0.6], [0.6, 0.3, 0], [0.3, 0, 0.6], [0, 0, 0])]
    samples, engines = play_all(tmp_path, byte_model, code, lambda before: f"{len(before)} {before[-40:]}", rows)
    assert len({str(texts(sample)) for sample in samples}) == 1
    assert len({str(sample.episode and sample.episode.messages) for sample in samples}) == 1
    seeds = [{(*r.tokens, r.seed) for r in engines.requests if r.uid == sample.uid} for sample in samples]
    assert seeds == [seeds[0]] * 4
