"""What OpenAI's and Anthropic's own clients get from the front. No engine is started: the model says what a test tells it to."""

import json
import time

import anthropic
import httpx
import openai
import pytest

QUESTION = [{"role": "user", "content": "2+2?"}]
CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [2]}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}
ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
CHAT_TOOL, RESPONSES_TOOL = {"type": "function", "function": ADD}, {"type": "function"} | ADD
CLAUDE_TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
ARGUMENTS = {"a": 2, "b": [2]}


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_chat_completions_answer_at_once_and_in_pieces(chat):
    reply = chat.chat.completions.create(model="demo", messages=QUESTION)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("hello", "stop")
    assert (reply.usage.completion_tokens, reply.model) == (5, "demo")
    options = {"include_usage": True}
    chunks = list(chat.chat.completions.create(model="demo", messages=QUESTION, stream=True, stream_options=options))
    assert [c.choices[0].delta.content for c in chunks if c.choices] == ["", *"hello"]
    assert chunks[-1].usage == reply.usage


def test_responses_answer_at_once_and_in_pieces(chat):
    reply = chat.responses.create(model="demo", input="2+2?")
    assert (reply.output_text, reply.status, reply.usage.output_tokens) == ("hello", "completed", 5)
    with chat.responses.stream(model="demo", input="2+2?") as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(pieces) == stream.get_final_response().output_text == "hello"
    assert len(pieces) > 1


def test_messages_answer_at_once_and_in_pieces(claude):
    reply = claude.messages.create(model="demo", messages=QUESTION, max_tokens=9)
    assert (reply.content[0].text, reply.stop_reason, reply.usage.output_tokens) == ("hello", "end_turn", 5)
    with claude.messages.stream(model="demo", messages=QUESTION, max_tokens=9) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert pieces == list("hello")
    assert (final.content[0].text, final.stop_reason, final.usage) == ("hello", "end_turn", final.usage)


def test_tool_calls_reach_every_client(chat, claude, script):
    script.text = CALL
    reply = chat.chat.completions.create(model="demo", messages=QUESTION, tools=[CHAT_TOOL])
    [call] = reply.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", ARGUMENTS)
    assert (reply.choices[0].message.content.strip(), reply.choices[0].finish_reason) == ("Let me see.", "tool_calls")
    item = chat.responses.create(model="demo", input="2+2?", tools=[RESPONSES_TOOL]).output[-1]
    assert (item.type, item.name, json.loads(item.arguments)) == ("function_call", "add", ARGUMENTS)
    message = claude.messages.create(model="demo", messages=QUESTION, max_tokens=9, tools=[CLAUDE_TOOL])
    block = message.content[-1]
    assert (block.type, block.name, block.input, message.stop_reason) == ("tool_use", "add", ARGUMENTS, "tool_use")


def test_streamed_tool_calls_reach_every_client(chat, claude, script):
    script.text = CALL
    with chat.chat.completions.stream(model="demo", messages=QUESTION, tools=[CHAT_TOOL]) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", ARGUMENTS)
    with chat.responses.stream(model="demo", input="2+2?", tools=[RESPONSES_TOOL]) as stream:
        item = stream.get_final_response().output[-1]
    assert (item.type, item.name, json.loads(item.arguments)) == ("function_call", "add", ARGUMENTS)
    with claude.messages.stream(model="demo", messages=QUESTION, max_tokens=9, tools=[CLAUDE_TOOL]) as stream:
        message = stream.get_final_message()
    assert (message.content[-1].name, message.content[-1].input, message.stop_reason) == ("add", ARGUMENTS, "tool_use")


def test_without_tools_a_call_is_text_of_the_reply(chat, claude, script):
    script.text = CALL
    assert chat.chat.completions.create(model="demo", messages=QUESTION).choices[0].message.content == CALL
    chunks = chat.chat.completions.create(model="demo", messages=QUESTION, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == CALL
    assert chat.responses.create(model="demo", input="2+2?").output_text == CALL
    with chat.responses.stream(model="demo", input="2+2?") as stream:
        assert stream.get_final_response().output_text == CALL
    assert claude.messages.create(model="demo", messages=QUESTION, max_tokens=9).content[0].text == CALL
    with claude.messages.stream(model="demo", messages=QUESTION, max_tokens=9) as stream:
        assert "".join(stream.text_stream) == CALL


def test_a_conversation_with_tools_is_the_same_prompt_in_every_dialect(chat, claude, script):
    function = {"name": "add", "arguments": json.dumps(ARGUMENTS)}
    calls = [{"id": "c1", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "c1", "content": "4"}
    asked = [{"role": "system", "content": "Be brief."}, *QUESTION]
    answered = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    chat.chat.completions.create(model="demo", messages=[*asked, answered, result], tools=[CHAT_TOOL])
    chat.responses.create(
        model="demo",
        instructions="Be brief.",
        input=[
            *QUESTION,
            {"role": "assistant", "content": "Let me see."},
            {"type": "function_call", "call_id": "c1", **function},
            {"type": "function_call_output", "call_id": "c1", "output": "4"},
        ],
        tools=[RESPONSES_TOOL],
    )
    used = {"type": "tool_use", "id": "c1", "name": "add", "input": ARGUMENTS}
    claude.messages.create(
        model="demo",
        max_tokens=9,
        system="Be brief.",
        messages=[
            *QUESTION,
            {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, used]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "4"}]},
        ],
        tools=[CLAUDE_TOOL],
    )
    prompts = [prompt for prompt, _ in script.asked]
    assert prompts[0].count("<tool_call>\n{") == 1
    assert "<tool_response>\n4\n</tool_response>" in prompts[0]
    assert "Be brief." in prompts[0]
    assert prompts[0] == prompts[1] == prompts[2]


def test_tokens_of_a_prompt_are_counted_and_not_sampled(claude, script):
    counted = claude.messages.count_tokens(model="demo", messages=QUESTION).input_tokens
    assert script.asked == []
    reply = claude.messages.create(model="demo", messages=QUESTION, max_tokens=9)
    assert reply.usage.input_tokens == counted


def test_what_a_request_leaves_open_is_sampled_as_in_the_run(chat, claude, script):
    chat.chat.completions.create(model="demo", messages=QUESTION)
    chat.responses.create(model="demo", input="2+2?")
    claude.messages.create(model="demo", messages=QUESTION, max_tokens=7)
    for _, params in script.asked:
        assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 5, 7)
        assert params.stop == ["END"]


def test_what_a_request_asks_for_counts(chat, claude, script):
    sampling = {"temperature": 0.0, "top_p": 0.25}
    more = {"top_k": 3}
    chat.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=70, stop=["a", "b"], seed=5, **sampling, extra_body=more
    )
    chat.responses.create(
        model="demo", input="2+2?", max_output_tokens=70, **sampling, extra_body=more | {"stop": ["a", "b"]}
    )
    claude.messages.create(
        model="demo", messages=QUESTION, max_tokens=70, stop_sequences=["a", "b"], extra_body=sampling | more
    )
    for _, params in script.asked:
        assert (params.temperature, params.max_tokens, params.stop) == (0.0, 70, ["a", "b"])
    assert script.asked[0][1].seed == 5


def test_log_probs_are_the_models(chat, script):
    expected = [-n / 8 for n in range(5)]
    reply = chat.chat.completions.create(model="demo", messages=QUESTION, logprobs=True)
    assert [token.logprob for token in reply.choices[0].logprobs.content] == expected
    assert [token.token for token in reply.choices[0].logprobs.content] == list("hello")
    chunks = chat.chat.completions.create(model="demo", messages=QUESTION, logprobs=True, stream=True)
    streamed = [token.logprob for c in chunks if c.choices[0].logprobs for token in c.choices[0].logprobs.content]
    assert streamed == expected
    reply = chat.responses.create(model="demo", input="2+2?", include=["message.output_text.logprobs"])
    assert [token.logprob for token in reply.output[0].content[0].logprobs] == expected


def test_reasoning_is_kept_apart_from_the_reply(serve, chat, script):
    address = serve(reasoning_parser="deepseek_r1")
    chat = chat.with_options(base_url=f"{address}/v1")
    claude = anthropic.Anthropic(base_url=address, api_key="a key", max_retries=0)
    script.text = "<think>It is four.</think>4"
    message = chat.chat.completions.create(model="demo", messages=QUESTION, reasoning_effort="low").choices[0].message
    assert (message.reasoning, message.content) == ("It is four.", "4")
    thought, spoken = chat.responses.create(model="demo", input="2+2?").output
    assert (thought.type, thought.content[0].text, spoken.content[0].text) == ("reasoning", "It is four.", "4")
    with claude.messages.stream(model="demo", messages=QUESTION, max_tokens=9) as stream:
        thought, spoken = stream.get_final_message().content
    assert (thought.type, thought.thinking, spoken.text) == ("thinking", "It is four.", "4")


def test_a_client_that_goes_away_ends_the_request(address, chat, script):
    script.waits = True
    stream = chat.chat.completions.create(model="demo", messages=QUESTION, stream=True)
    next(iter(stream))
    wait_until(lambda: script.running == 1)
    assert httpx.get(f"{address}/health").json() == {"requests": 1}
    stream.close()
    wait_until(lambda: script.running == 0)
    with pytest.raises(openai.APITimeoutError):
        chat.with_options(timeout=0.5).chat.completions.create(model="demo", messages=QUESTION)
    wait_until(lambda: len(script.asked) == 2 and script.running == 0)


def ways_to_ask(chat, claude, **more):
    yield lambda: chat.chat.completions.create(model="demo", messages=QUESTION, **more)
    yield lambda: chat.responses.create(model="demo", input="2+2?", **more)
    yield lambda: claude.messages.create(model="demo", messages=QUESTION, max_tokens=9, **more)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_before_the_first_token_is_an_answer_with_a_status(chat, claude, script, streamed):
    for ask in ways_to_ask(chat, claude, stream=streamed):
        script.error = RuntimeError("the engine is gone")
        with pytest.raises((openai.InternalServerError, anthropic.InternalServerError), match="the engine is gone"):
            ask()
        script.error = ValueError("at most 20")
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match="at most 20"):
            ask()


def test_an_error_in_the_middle_of_a_stream_reaches_the_client(chat, claude, script):
    script.error, script.fails_at = RuntimeError("the engine is gone"), 3
    for ask in ways_to_ask(chat, claude, stream=True):
        stream = ask()
        with pytest.raises((openai.APIError, anthropic.APIError), match="the engine is gone"):
            list(stream)


def post(address: str, path: str, body: object, key: str = "a key", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body)
    return httpx.post(address + path, content=content, headers={"authorization": f"Bearer {key}"} | headers)


def message_of(path: str, answer: httpx.Response) -> str:
    """The sentence in an error, if all of the error is in the form of the dialect."""
    error = answer.json()
    if path.startswith("/v1/messages"):
        assert (error["type"], set(error["error"])) == ("error", {"type", "message"})
    else:
        assert set(error) == {"error"}
        assert set(error["error"]) == {"message", "type", "param", "code"}
    return error["error"]["message"]


BODIES = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/responses": {"input": "2+2?"},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": QUESTION},
}


@pytest.mark.parametrize("path", BODIES)
def test_what_cannot_be_answered_is_refused_in_the_form_of_its_dialect(address, chat, path, script):
    good = BODIES[path] | {"model": "demo"}

    def refusal(body: object, status: int, path_asked: str = path, key: str = "a key") -> str:
        answer = post(address, path_asked, body, key)
        assert answer.status_code == status
        return message_of(path, answer)

    assert "The key is missing or wrong" in refusal(good, 401, key="another")
    assert refusal(good | {"model": "gpt"}, 404) == "There is no model `gpt`. This server has `demo`."
    assert "not valid JSON" in refusal(b'{"model": ', 400)
    assert refusal([1], 400) == "The body must be a JSON object, not [1]."
    assert refusal(b" " * (17 << 20), 413) == "The body is longer than 16 MiB. Send a shorter conversation."
    assert refusal(good | {"colour": 1}, 400) == "The parameter `colour` is not supported. Leave it out."
    assert "maximum context length is 4096 tokens" in refusal(
        good | ({"input": "a" * 5000} if "input" in good else {"messages": [{"role": "user", "content": "a" * 5000}]}),
        400,
    )
    wrong = "input" if "input" in good else "messages"
    assert refusal(good | {wrong: 5}, 400).startswith((f"`{wrong}`: ", "The body cannot be read: "))
    assert refusal({"model": "demo"}, 400) == f"`{next(iter(BODIES[path]))}`: Field required."
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    assert "and this model takes text alone" in refusal(good | {wrong: image}, 400)
    tool = {"type": "web_search", "name": "search"}
    if "max_tokens" in good:
        assert "a tool of the type `web_search`" in refusal(good | {"tools": [tool]}, 400)
        assert "episode.reasoning_parser" in refusal(good | {"thinking": {"type": "adaptive"}}, 400)
    assert script.asked == []


def test_harmless_parameters_and_those_that_ask_for_nothing_are_taken(address, chat):
    more = {"user": "me", "metadata": {"a": "b"}, "store": True, "tools": [], "stop": None, "background": False}
    for path in ("/v1/chat/completions", "/v1/responses"):
        assert post(address, path, BODIES[path] | {"model": "demo"} | more).status_code == 200
    assert post(address, "/v1/messages", BODIES["/v1/messages"] | {"model": "demo", "tools": []}).status_code == 200


def test_a_route_that_is_not_there_is_named_with_those_that_are(address, chat, claude):
    with pytest.raises(openai.NotFoundError, match=r"POST /v1/embeddings here\. POST to /v1/chat/completions"):
        chat.embeddings.create(model="demo", input="a")
    with pytest.raises(anthropic.NotFoundError) as error:
        claude.models.retrieve("gpt")
    assert error.value.body["error"]["type"] == "not_found_error"
    assert post(address, "/v1/models", {}).status_code == 405


def test_both_clients_list_the_model(chat, claude):
    assert [model.id for model in chat.models.list()] == ["demo"]
    assert [model.display_name for model in claude.models.list()] == ["demo"]
    assert chat.models.retrieve("demo").owned_by == "rlsys"


def test_only_health_needs_no_key(address, chat):
    assert httpx.get(f"{address}/health").json() == {"requests": 0}
    assert httpx.get(f"{address}/v1/models").status_code == 401
    assert httpx.get(f"{address}/v1/models", headers={"x-api-key": "a key"}).status_code == 200
