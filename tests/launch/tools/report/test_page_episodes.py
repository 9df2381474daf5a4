"""Episodes on the page, in a real Chromium: turns of both sides, calls and results, scores, and why they ended."""

import json

import numpy as np
import pytest
from browsing import HOSTILE, search, wait_for_text
from made_run import make_run
from reports import make_report

from launch.tools.report.sample_pieces import sample_files, sample_texts, sample_tokens
from rlsys.runs.samples import write_samples
from rlsys.tasks.zigzag import SYMBOLS
from rlsys.types import Batch, Episode, Observation, Prompt, Sample, Verdict


def ids(text: str) -> np.ndarray:
    return np.array([SYMBOLS.index(c) for c in text], np.int32)


def play(index: int, turns: list[str], observed: list[str], messages, scores, finish="stop") -> Sample:
    """An episode whose environment spoke before each turn, and perhaps once more."""
    starts = np.cumsum([0, *map(len, turns)])
    observations = tuple(Observation(int(at), ids(text)) for at, text in zip(starts, observed, strict=False))
    tokens = ids("".join(turns))
    logprobs = -np.linspace(0, 4, len(tokens), dtype=np.float32)
    episode = Episode(None, messages, scores)
    return Sample("calc:1#0", index, "".join(turns), tokens, logprobs, finish, 1, (), observations, episode)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str, *calls: dict, **more) -> dict:
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {}) | more


def call(name: str, arguments: dict, error: str = "") -> dict:
    made = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return made | ({"error": error} if error else {})


def result(text: str) -> dict:
    return {"role": "tool", "name": "add", "tool_call_id": "c", "content": text}


WITH_TOOLS = [
    user("1 + 2?"),
    answer("", call("add", {"a": 1, "b": [2]}), call("", {}, "It is no JSON."), reasoning_content="adding is best"),
    result("3"),
    result("It is no JSON."),
    answer("34"),
]
WITH_EXAMPLES = [user("0?"), answer("an example"), user("1?"), answer("56")]


@pytest.fixture
def run(tmp_path):
    """One step, with a group of four episodes and one of a single answer."""
    folder = make_run(tmp_path / "calc", 1, prompts=1, samples=1)
    samples = [
        play(0, ["12", "34"], ["7>", "8>"], WITH_TOOLS, [0.5, 0.25]),
        play(1, ["56"], ["7>"], WITH_EXAMPLES, [0.0], "turns"),
        play(2, ["98"], ["6>"], [user(HOSTILE), answer("98")], [0.0], "window"),
        Sample("calc:2#0", 0, "4321", ids("4321"), np.full(4, -1, np.float32), "stop", 1),
    ]
    crashed = play(3, ["78", "90"], ["1>", "2>", "3>"], [], [])
    batch = Batch(
        [Prompt("calc:1#0", "calc", "", [], {}), Prompt("calc:2#0", "calc", "1234>", [1], {})],
        samples,
        np.array([0, 0, 0, 1]),
        np.array([1, 0.5, 0, 1], np.float32),
        [{} for _ in samples],
        failed=[(crashed, Verdict(None, failure="crash", detail="the process ended"))],
    )
    write_samples(folder / "samples" / "step-000001.parquet", batch, np.array([1, 0, -1, 0], np.float32))
    return folder


def episode(page, index: int):
    return page.locator(".completion").nth(index)


def turns(card) -> list[str]:
    return [" ".join(turn.inner_text().split()) for turn in card.locator(".turn").all()]


def test_both_sides_are_apart_with_calls_results_and_scores(open_page, run):
    page = open_page(make_report(run))
    search(page, set="step")
    page.locator(".list .row").first.click()
    wait_for_text(page, "#opened", "calc:1#0")
    assert turns(episode(page, 0)) == [
        "user 2 tokens 1 + 2?",
        "turn 1 2 tokens score 0.5 12 add(a: 1, b: [2]) It is no JSON.",
        "tool add 2 tokens 3",
        "tool add It is no JSON.",
        "turn 2 2 tokens score 0.25 34",
    ]
    own = episode(page, 0).locator(".turn.own .t")
    assert [t.inner_text() for t in own.all()] == ["1", "2", "3", "4"]
    assert episode(page, 0).locator(".turn:not(.own) .t").count() == 0, "only own tokens are colored"
    titles = [t.get_attribute("title").split(" · ")[2] for t in own.all()]
    assert titles == ["log-prob 0", "log-prob -1.33", "log-prob -2.67", "log-prob -4"]
    assert episode(page, 0).locator(".turn header span").first.get_attribute("title") == '"7>"'
    assert episode(page, 0).locator(".call.bad").inner_text() == "It is no JSON."
    assert "ended by itself · sum of its turns 0.75" in episode(page, 0).inner_text()


def test_without_colors_a_turn_has_its_reasoning_and_its_text(open_page, run):
    page = open_page(make_report(run))
    search(page, set="step")
    page.get_by_role("button", name="plain text").click()
    wait_for_text(page, ".turn.own >> nth=0", "adding is best")
    assert turns(episode(page, 0))[4] == "turn 2 score 0.25 34"


def test_examples_of_the_environment_are_not_the_models_turns(open_page, run):
    page = open_page(make_report(run))
    search(page, set="step")
    assert turns(episode(page, 1)) == ["user 2 tokens 0?", "assistant an example", "user 1?", "turn 1 2 tokens 56"]
    assert "its turns were used up (episode.max_turns)" in episode(page, 1).inner_text()


def test_a_crashed_episode_is_shown_by_its_tokens(open_page, run):
    page = open_page(make_report(run))
    search(page, set="step")
    assert turns(episode(page, 3)) == [
        "environment 2 tokens 1>",
        "turn 1 2 tokens 78",
        "environment 2 tokens 2>",
        "turn 2 2 tokens 90",
        "environment 2 tokens 3>",
    ]
    assert "failed: crash" in episode(page, 3).inner_text()


def test_single_answers_stay_as_they_are(open_page, run):
    page = open_page(make_report(run))
    search(page, set="step")
    page.locator(".list .row").nth(1).click()
    wait_for_text(page, "#opened", "calc:2#0")
    assert page.locator(".turn").count() == 0
    assert page.locator(".completion .said").inner_text() == "4321"


def test_what_an_environment_says_is_text_and_can_be_searched(open_page, run):
    page = open_page(make_report(run))
    assert search(page, set="step", words="right to left") == "1 sample in 1 group"
    assert "onerror" in turns(episode(page, 2))[0]
    assert page.title() == "calc"
    assert page.locator("main img").count() == 0
    assert search(page, words="adding is best") == "1 sample in 1 group"
    assert search(page, words="") == "5 samples in 2 groups"
    assert search(page, finish="window") == "1 sample in 1 group"
    options = [o.get_attribute("value") for o in page.locator("#finishes option").all()]
    assert options == ["", "stop", "length", "turns", "window"]


def test_secrets_of_a_transcript_are_hidden(run, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "tvQ8x-verysecret-8812")
    messages = [user("the key is tvQ8x-verysecret-8812"), answer("1", call("add", {"a": ["tvQ8x-verysecret-8812"]}))]
    one = play(0, ["1"], ["2>"], messages, [0.0])
    batch = Batch([Prompt("calc:1#0", "calc", "", [], {})], [one], np.array([0]), np.ones(1, np.float32), [{}])
    write_samples(run / "samples" / "step-000001.parquet", batch)
    [transcript] = sample_texts(run / "samples" / "step-000001.parquet")["transcript"]
    assert "verysecret" not in json.dumps(transcript)
    assert transcript[0]["content"] == "the key is ***"
    assert transcript[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": ["***"]}}


def test_observed_tokens_stand_behind_their_places(run):
    file = run / "samples" / "step-000001.parquet"
    tokens = sample_tokens(file, None, lambda known: [SYMBOLS[i] for i in known])
    read = [[at, "".join(tokens["words"][i] for i in entry)] for at, *entry in tokens["observed"][3]]
    assert read == [[0, "1>"], [2, "2>"], [4, "3>"]]
    assert tokens["observed"][4] == []
    assert sample_tokens(next(f for f in sample_files(run) if "eval" in f.name), None, None)["observed"] is None
