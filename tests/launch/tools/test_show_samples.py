"""`rlsys eval --show`: samples as text."""

import io

import numpy as np
from rich.console import Console

from launch.tools.show_samples import print_samples
from rlsys.types import Batch, Episode, Observation, Prompt, Sample, Verdict


def call(name: str, arguments: dict, error: str = "") -> dict:
    made = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return made | ({"error": error} if error else {})


TRANSCRIPT = [
    {"role": "user", "content": "Examples:"},
    {"role": "assistant", "content": "an example"},
    {"role": "user", "content": "1 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I add.",
        "tool_calls": [call("add", {"a": 1, "b": "x"}), call("", {}, "It is no JSON.")],
    },
    {"role": "tool", "name": "add", "content": "3"},
    {"role": "assistant", "content": "It is 3.\x1b[2J"},
]


def sample(uid: str, index: int, text: str, finish: str = "stop", episode: Episode | None = None) -> Sample:
    tokens = np.array([5, 6, 7], np.int32)
    observed = (Observation(0, tokens), Observation(2, tokens)) if episode else ()
    return Sample(uid, index, text, tokens, np.zeros(3, np.float32), finish, 0, (), observed, episode)


def shown(count: int, width: int = 100) -> list[str]:
    played = sample("calc:1", 0, "…", "turns", Episode(None, TRANSCRIPT, [0.5, 0.0]))
    plain = sample("zigzag:2", 0, "481625", "length")
    others = [sample("calc:1", 1, "not shown"), sample("zigzag:2", 1, "not shown")]
    failed = [(sample("late:3", 0, "a" * 3000), Verdict(None, failure="timeout"))]
    failed += [(sample("late:4", 0, "", episode=Episode(None, [], [])), Verdict(None, failure="crash"))]
    batch = Batch(
        [Prompt(uid, "s", f"prompt of {uid}", [1], {}) for uid in ("calc:1", "zigzag:2", "late:3", "late:4")],
        [others[0], played, plain, others[1]],
        np.array([0, 0, 1, 1]),
        np.array([0, 0.25, 1, 0], np.float32),
        [{}] * 4,
        failed=failed,
    )
    text = io.StringIO()
    print_samples(batch, count, Console(file=text, width=width, markup=False, highlight=False))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def test_an_episode_is_a_conversation_with_calls_results_and_scores():
    assert shown(1) == [
        "",
        "calc:1/0: reward 0.25, 2 turns, 3 tokens, cut by turns",
        "user          Examples:",
        "assistant     an example",
        "user          1 + 2?",
        "turn 1 (0.5)  I add.",
        "              → add(a=1, b='x')",
        "              → It is no JSON.",
        "tool add      3",
        "turn 2        It is 3.\\x1b[2J",
    ]


def test_a_single_answer_has_its_prompt_and_completion():
    assert shown(2)[-4:] == [
        "",
        "zigzag:2/0: reward 1, 3 tokens, cut by length",
        "prompt      prompt of zigzag:2",
        "completion  481625",
    ]


def test_a_sample_without_a_verdict_says_why_and_a_long_text_is_shortened():
    lines = shown(3, width=10_000)
    assert "late:3/0: failed: timeout, 3 tokens" in lines
    [first, left_out, last] = lines[-3:]
    assert first.split() == ["completion", "a" * 1000]
    assert left_out.strip() == "[… 1,000 characters left out …]"
    assert last.strip() == "a" * 1000


def test_an_episode_without_a_transcript_is_shown_as_an_answer():
    assert "late:4/0: failed: crash, 2 turns, 3 tokens" in shown(9)


def test_nothing_is_shown_unless_it_is_asked_for():
    assert shown(0) == []
