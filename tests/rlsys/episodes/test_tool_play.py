"""Episodes of tools alone, with a scripted model."""

import asyncio
import time

import pytest
from chat_families import FAMILIES, family_tokenizer

from rlsys.episodes.ask import EpisodeOver, Reply, ToolCall
from rlsys.episodes.conversation import Conversation, ConversationTemplate
from rlsys.episodes.tool_play import play
from rlsys.episodes.tools.function_tool import FunctionTool


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def repeat(text: str, times: int) -> str:
    return text * times


def nap(seconds: float) -> None:
    time.sleep(seconds)


def tools():
    return [FunctionTool(function, {}, {}) for function in (add, repeat, nap)]


def run(*replies: Reply, prompt="What is 1 + 2?", **options) -> list:
    """Plays with a model that gives these replies; returns what it was asked."""
    asked, left = [], list(replies)

    async def ask(content):
        asked.append(content)
        if not left:
            raise EpisodeOver("turns")
        return left.pop(0)

    assert asyncio.run(play({"prompt": prompt}, ask, tools=tools(), **options)) is None
    return asked


def calls(*made: ToolCall) -> Reply:
    return Reply("", "stop", calls=list(made))


ANSWER = Reply("3", "stop")


def test_an_answer_without_calls_ends_the_episode():
    assert run(ANSWER) == ["What is 1 + 2?"]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2?"}]
    assert run(ANSWER, prompt=chat) == [chat]


def test_calls_are_made_one_after_the_other_and_their_results_are_tool_messages():
    first = calls(ToolCall("add", {"a": 1, "b": 2}, "c1"), ToolCall("repeat", {"text": "ab", "times": 2}, "c2"))
    asked = run(first, calls(ToolCall("add", {"a": 3, "b": 4}, "c3")), ANSWER)
    assert asked[1:] == [
        [
            {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "3"},
            {"role": "tool", "name": "repeat", "tool_call_id": "c2", "content": "abab"},
        ],
        [{"role": "tool", "name": "add", "tool_call_id": "c3", "content": "7"}],
    ]


def test_a_bad_call_is_observed_or_ends_the_episode():
    bad = calls(ToolCall("", {}, "c1", "The tool call cannot be read."), ToolCall("add", {"a": 1, "b": 2}, "c2"))
    [_, results] = run(bad, ANSWER)
    assert [message["content"] for message in results] == ["The tool call cannot be read.", "3"]
    assert run(bad, ANSWER, on_bad_call="end") == ["What is 1 + 2?"]


def test_results_have_a_limit_of_length_and_time():
    [_, [long], [late]] = run(
        calls(ToolCall("repeat", {"text": "abc", "times": 9}, "c1")),
        calls(ToolCall("nap", {"seconds": 0.5}, "c2")),
        ANSWER,
        max_chars=4,
        timeout_s=0.05,
    )
    assert long["content"] == "ab\n[… 23 characters left out …]\nbc"
    assert late["content"].startswith("Er\n[… ")


def test_the_calls_of_a_reply_share_its_time():
    nap, add = ToolCall("nap", {"seconds": 0.5}, "c1"), ToolCall("add", {"a": 1, "b": 2}, "c2")
    began = time.monotonic()
    [_, results, after] = run(calls(*[nap] * 20), calls(add), ANSWER, timeout_s=0.2)
    assert [message["content"][:29] for message in results] == ["Error: `nap` gave no result wi"[:29]] * 20
    assert after[0]["content"] == "3"
    assert time.monotonic() - began < 2


def test_the_end_of_the_episode_ends_the_play():
    with pytest.raises(EpisodeOver):
        run(calls(ToolCall("add", {"a": 1, "b": 2}, "c1")))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_shows_the_result_of_a_call(name):
    tokenizer, seen = family_tokenizer(name), []
    conversation = Conversation(ConversationTemplate(tokenizer), [tool.schema for tool in tools()])
    replies = [calls(ToolCall("add", {"a": 17, "b": 25}, "call00000")), ANSWER]

    async def ask(content):
        tokens = conversation.continue_with(content) if seen else conversation.open(content)
        seen.append(tokenizer.decode(tokens))
        reply = replies.pop(0)
        conversation.add_reply([tokenizer.eos_token_id], reply)
        return reply

    asyncio.run(play({"prompt": "What is 17 + 25?"}, ask, tools=tools()))
    assert "42" in seen[1]
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "tool", "assistant"]
