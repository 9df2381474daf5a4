import asyncio
import functools
import inspect
import math
from dataclasses import replace

import numpy as np
import pytest

from rlsys import rewards
from rlsys.config.shorthand import parse_functions
from rlsys.errors import ConfigError
from rlsys.rewards import REWARDS
from rlsys.rewards.judge import WeightedReward, combine_verdicts, reward_inputs
from rlsys.types import Episode, Observation, Prompt, Sample, Verdict

FACTS = {"prompt": "2+2=", "completion": "4", "finish": "stop", "source": "sums", "answer": "4", "level": 3}


def Judge(given, **limits):
    """Makes a judge of functions as a configuration file has them."""
    return rewards.Judge(parse_functions("reward.functions", given), **limits)


def judge(tmp_path, source: str, weight: float = 1.0, facts: dict | None = None) -> Verdict:
    """Returns the verdict of a user's function `f`."""
    file = tmp_path / "mine.py"
    file.write_text(source)
    return Judge({f"{file}:f": weight})(facts or FACTS)


def test_a_verdict_is_the_weighted_sum_and_keeps_its_parts():
    verdict = Judge({"exact": 2.0, "contains": 0.5})(FACTS)
    assert verdict == Verdict(2.5, {"exact": 1.0, "contains": 1.0}, answer="4")


def test_a_function_gets_what_it_asks_for(tmp_path):
    assert judge(tmp_path, "def f(prompt, completion, level): return len(prompt) + int(completion) + level").score == 11


def test_of_an_episode_a_function_gets_the_transcript():
    chat = [{"role": "user", "content": "1 + 2?"}]
    prompt = Prompt("p", "sums", "1 + 2?", [], {"answer": "3"}, messages=chat)
    single = Sample("p", 0, "4", np.array([7, 8]), np.zeros(2), "length", 0)
    observations = Observation(0, np.array([3, 4, 5])), Observation(1, np.array([6]))
    transcript = [*chat, {"role": "assistant", "content": "4"}]
    played = replace(single, finish="turns", observations=observations, episode=Episode(None, transcript, [0.0]))
    common = {"answer": "3", "prompt": "1 + 2?", "completion": "4", "source": "sums", "tokens": 2}
    assert reward_inputs(prompt, single) == common | {"finish": "length", "messages": chat}
    expected = common | {"finish": "turns", "messages": transcript, "transcript": transcript}
    assert reward_inputs(prompt, played) == expected


def test_a_function_may_take_all_fields(tmp_path):
    assert judge(tmp_path, "def f(**facts): return len(facts)").score == len(FACTS)
    assert judge(tmp_path, "def f(level, **rest): return level * ('level' not in rest)").score == 3


def test_a_field_with_a_default_may_be_missing(tmp_path):
    assert judge(tmp_path, "def f(completion, bonus=0.25): return bonus").score == 0.25


def test_a_missing_field_is_named_with_the_available_ones(tmp_path):
    verdict = judge(tmp_path, "def f(completion, solution): return 1")
    assert verdict.score is None
    assert verdict.failure == "exception"
    assert "asks for solution" in verdict.detail
    assert "answer, completion, finish, level, prompt, source" in verdict.detail


def test_an_answer_that_the_row_does_not_have_is_none(tmp_path):
    facts = {name: value for name, value in FACTS.items() if name != "answer"}
    assert judge(tmp_path, "def f(prompt, completion, answer, **row): return answer is None", facts=facts).score == 1
    assert judge(tmp_path, "def f(completion, answer='4'): return answer == completion", facts=facts).score == 1
    assert judge(tmp_path, "def f(completions, answers): return [answers == [None]]", facts=facts).score == 1
    verdict = Judge({"exact": 1.0})(facts)
    assert verdict.failure == "exception"
    assert "ValueError" in verdict.detail


def test_named_components_are_added_up_and_kept(tmp_path):
    verdict = judge(tmp_path, "def f(): return {'form': 0.25, 'content': 0.5}", weight=2.0)
    assert verdict == Verdict(1.5, {"f/form": 0.25, "f/content": 0.5})


def test_an_async_function_is_awaited(tmp_path):
    source = "import asyncio\nasync def f(completion):\n    await asyncio.sleep(0)\n    return int(completion)"
    assert judge(tmp_path, source).score == 4


def test_booleans_are_rewards(tmp_path):
    assert judge(tmp_path, "def f(): return True").score == 1.0


@pytest.mark.parametrize(
    "error", ["ValueError('no')", "KeyError('no')", "SystemExit(3)", "KeyboardInterrupt('no')", "RecursionError('no')"]
)
def test_anything_a_function_raises_is_a_failed_verdict(tmp_path, error):
    verdict = judge(tmp_path, f"def f(): raise {error}")
    assert verdict.score is None
    assert verdict.failure == "exception"
    assert f"f: {error.partition('(')[0]}" in verdict.detail
    assert "mine.py" in verdict.detail, "the traceback leads into the user's file"


def test_an_error_after_the_first_await_is_a_failed_verdict(tmp_path):
    assert judge(tmp_path, "async def f(): raise OSError('gone')").failure == "exception"


@pytest.mark.parametrize(
    "value",
    [
        "float('nan')",
        "float('inf')",
        "-float('inf')",
        "None",
        "'good'",
        "[1.0]",
        "10 ** 400",
        "{'part': None}",
        "{'part': 1e999}",
        "object()",
    ],
)
def test_a_value_that_is_not_a_finite_number_is_a_failed_verdict(tmp_path, value):
    verdict = judge(tmp_path, f"def f(): return {value}")
    assert verdict.score is None
    assert verdict.failure == "invalid"
    assert verdict.detail.startswith("f")


def test_a_value_that_raises_in_float_is_a_failed_verdict(tmp_path):
    source = "class Odd:\n    def __float__(self): raise RuntimeError('no')\ndef f(): return Odd()"
    assert judge(tmp_path, source).failure == "invalid"


def test_one_failed_function_fails_the_sample_whatever_the_others_say(tmp_path):
    (tmp_path / "mine.py").write_text("def f(): return float('nan')")
    verdict = Judge({"exact": 1.0, f"{tmp_path}/mine.py:f": 0.0})(FACTS)
    assert verdict.score is None


def test_numbers_of_other_libraries_are_numbers(tmp_path):
    assert judge(tmp_path, "import numpy\ndef f(): return numpy.float32(0.5)").score == 0.5
    assert isinstance(judge(tmp_path, "import numpy\ndef f(): return numpy.float32(0.5)").score, float)


def test_a_dict_has_at_most_a_hundred_numbers_because_each_is_a_metric(tmp_path):
    source = "def f(answer): return {f'part {i}': 0.5 for i in range(%d)}"
    assert judge(tmp_path, source % 100).score == 50.0
    verdict = judge(tmp_path, source % 20_000)
    assert (verdict.score, verdict.failure) == (None, "invalid")
    assert verdict.detail == "f returned a dict of 20,000 numbers. Each becomes a metric: return at most 100."


def test_a_file_that_cannot_be_imported_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="NameError"):
        judge(tmp_path, "undefined_name")


def test_unknown_names_and_missing_files_are_configuration_errors():
    with pytest.raises(ConfigError, match="Built in: code, contains, countdown, exact"):
        Judge({"exakt": 1.0})
    with pytest.raises(ConfigError, match="does not exist"):
        Judge({"no_such_file.py:f": 1.0})


def test_a_judge_survives_a_failure(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(level): return 1 / level")
    judge = Judge({f"{file}:f": 1.0})
    assert judge(FACTS | {"level": 0}).failure == "exception"
    assert math.isclose(judge(FACTS | {"level": 4}).score, 0.25)


def test_options_reach_the_function(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completion, *, times, plus=0): return times * int(completion) + plus")
    judge = Judge({f"{tmp_path}/mine.py:f": {"weight": 0.5, "times": 3}})
    assert judge(FACTS).score == 6.0


def test_an_option_that_the_function_does_not_take_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completion): return 1.0")
    with pytest.raises(ConfigError, match=r"functions\.f has no argument `times`; it has completion"):
        Judge({f"{tmp_path}/mine.py:f": {"times": 3}})


@pytest.mark.parametrize("name", REWARDS)
def test_a_row_cannot_set_an_option_of_a_built_in_reward(monkeypatch, name):
    received = {}

    @functools.wraps(REWARDS[name])
    def record(*_, **given):
        received.update(given)

    monkeypatch.setitem(REWARDS, name, record)
    parameters = inspect.signature(record).parameters.values()
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    facts = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    must = {p.name: "configured" for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    row = dict.fromkeys([*facts, "level", "prompt", "completion", "answer", *options], "of the row")
    WeightedReward(name, record, 1.0, must, 0.0).call([row])
    assert {option: received[option] for option in options if option in received} == must
    assert set(facts) <= set(received), "what is no option is still a fact of the row"


def test_a_row_cannot_rename_the_tags_of_format():
    facts = FACTS | {"completion": "<think>2+2</think><answer>4</answer>", "think": "of it"}
    assert Judge({"format": 1.0})(facts).score == 1
    assert Judge({"format": {"think": "reason"}})(facts).score == 0


def test_a_row_cannot_choose_the_isolation_of_its_program(tmp_path):
    (tmp_path / "secret").write_text("3")
    program = f"```python\nprint(open({str(tmp_path / 'secret')!r}).read())\n```"
    row = {"tests": {"inputs": [""], "outputs": ["3"]}, "isolation": "limits", "timeout_s": "2 s", "memory_mb": None}
    verdict = Judge({"code": 1.0})(FACTS | row | {"completion": program})
    assert (verdict.score, verdict.failure) == (0, "")
    assert Judge({"code": {"isolation": "limits"}})(FACTS | row | {"completion": program}).score == 1


def test_a_users_function_gets_row_fields_by_any_argument(tmp_path):
    assert judge(tmp_path, "def f(completion, *, level): return level").score == 3
    (tmp_path / "mine.py").write_text("def f(completion, *, level): return level")
    assert Judge({f"{tmp_path}/mine.py:f": {"level": 5}})(FACTS).score == 5


def test_the_answer_of_a_function_is_not_a_component(tmp_path):
    verdict = judge(tmp_path, "def f(): return {'score': 0.5, 'answer': 42}", weight=2.0)
    assert verdict == Verdict(1.0, {"f": 0.5}, answer="42")
    verdict = judge(tmp_path, "def f(): return {'form': 0.5, 'score': 0.25, 'answer': None}")
    assert verdict == Verdict(0.75, {"f/form": 0.5, "f/score": 0.25})


def test_a_numeric_text_is_not_a_reward(tmp_path):
    assert judge(tmp_path, "def f(): return '1'").failure == "invalid"
    assert judge(tmp_path, "def f(): return {}").failure == "invalid"


def test_running_out_of_memory_has_a_reason_of_its_own(tmp_path):
    assert judge(tmp_path, "def f(): raise MemoryError").failure == "memory"


BATCHED = """
def f(prompts, completions, answers, level):
    assert len(prompts) == len(completions) == len(answers) == len(level)
    if "bad" in completions:
        raise ValueError("bad")
    return [len(completions) + int(c == a) / 2 for c, a in zip(completions, answers)]
"""


def judge_all(tmp_path, source: str, *completions: str) -> list[Verdict]:
    (tmp_path / "mine.py").write_text(source)
    judge = Judge({f"{tmp_path}/mine.py:f": 1.0}, timeout_s=0.5)
    facts = [FACTS | {"completion": c} for c in completions]
    parts = judge.judge_sync(facts)
    return [judge.combine(p) for p in asyncio.run(judge.judge_async(facts, parts))]


def test_a_batched_function_judges_lists(tmp_path):
    assert [v.score for v in judge_all(tmp_path, BATCHED, "4", "5", "4")] == [3.5, 3.0, 3.5]
    assert judge(tmp_path, BATCHED).score == 1.5


def test_a_failing_sample_does_not_fail_its_batch(tmp_path):
    verdicts = judge_all(tmp_path, BATCHED, "4", "bad", "5")
    assert [(v.score, v.failure) for v in verdicts] == [(1.5, ""), (None, "exception"), (1.0, "")]
    verdicts = judge_all(tmp_path, "async " + BATCHED.lstrip(), "4", "bad", "5")
    assert [(v.score, v.failure) for v in verdicts] == [(1.5, ""), (None, "exception"), (1.0, "")]


@pytest.mark.parametrize("returned", ["1.0", "[1.0] * (len(completions) + 1)", "None", "[]"])
def test_a_batched_function_returns_a_reward_for_each_sample(tmp_path, returned):
    verdicts = judge_all(tmp_path, f"def f(completions): return {returned}", "4", "5")
    assert [v.failure for v in verdicts] == ["invalid", "invalid"]


def test_an_async_function_past_its_deadline_fails_alone(tmp_path):
    source = """
import asyncio
async def f(completion):
    await asyncio.sleep(float(completion))
    return 1.0
"""
    verdicts = judge_all(tmp_path, source, "0", "10", "0.1")
    assert [v.failure for v in verdicts] == ["", "timeout", ""]
    assert "0.5 s" in verdicts[1].detail


def test_a_functions_own_timeout_error_is_an_exception(tmp_path):
    assert judge_all(tmp_path, "async def f(completion): raise TimeoutError('theirs')", "4")[0].failure == "exception"


def test_a_failed_sample_is_not_judged_by_the_next_function(tmp_path):
    (tmp_path / "mine.py").write_text(
        "seen = []\ndef f(completion):\n    if completion == 'bad': raise ValueError\n    return 0\n"
        "def g(completion):\n    seen.append(completion)\n    return len(seen)\n"
    )
    judge = Judge({f"{tmp_path}/mine.py:f": 1.0, f"{tmp_path}/mine.py:g": 1.0})
    parts = judge.judge_sync([FACTS | {"completion": c} for c in ("ok", "bad", "ok")])
    assert [judge.combine(p).score for p in parts] == [1, None, 2]


def test_verdicts_of_several_services_are_added_up():
    verdict = combine_verdicts([Verdict(1.0, {"a": 1.0}), Verdict(-0.5, {"b": -1.0}, answer="7")])
    assert verdict == Verdict(0.5, {"a": 1.0, "b": -1.0}, answer="7")
    assert combine_verdicts([Verdict(1.0, {"a": 1.0}), Verdict(None, failure="crash")]).failure == "crash"
    assert combine_verdicts([Verdict(1e308, {"a": 1e308})] * 2).failure == "invalid"
    assert combine_verdicts([Verdict(-1e39, {"a": -1e39})]).failure == "invalid", "float32 holds no such number"


def test_positional_only_arguments_are_passed_by_position(tmp_path):
    assert judge(tmp_path, "def f(prompt, completion, /, level, **rest): return int(completion) + level").score == 7
    assert judge(tmp_path, "def f(completion, bonus=2, /): return bonus").score == 2
    (tmp_path / "listed.py").write_text("def f(completions, /): return [int(c) for c in completions]")
    listed = Judge({f"{tmp_path}/listed.py:f": 1.0}).judge_sync([FACTS, FACTS])
    assert [parts["f"].score for parts in listed] == [4, 4]


def test_an_exception_whose_text_raises_is_still_a_failure(tmp_path):
    source = "class Bad(Exception):\n    def __str__(self): raise SystemExit\ndef f(): raise Bad"
    assert judge(tmp_path, source).failure == "exception"


def test_the_detail_of_a_failure_can_be_written_to_a_file(tmp_path):
    odd = "'" + chr(92) + "ud800'"
    assert judge(tmp_path, f"def f(): raise ValueError({odd})").detail.encode()
    assert judge(tmp_path, f"def f(): return {{'score': 1, 'answer': {odd}}}").answer == "?"
    assert "".join(judge(tmp_path, f"def f(): return {{{odd}: 1}}").components).encode()


def test_a_long_traceback_keeps_its_beginning_and_its_end(tmp_path):
    detail = judge(tmp_path, "def f(): raise ValueError('begin' + 'x' * 10**7 + 'end')").detail
    assert len(detail) < 100_000
    assert "begin" in detail[:100]
    assert detail.strip().endswith("end")


def test_bytes_are_not_a_reward(tmp_path):
    assert judge(tmp_path, "def f(): return bytearray(b'1')").failure == "invalid"
