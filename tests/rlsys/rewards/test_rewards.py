import inspect
import subprocess
import sys

import pytest

from rlsys.config.shorthand import parse_functions
from rlsys.errors import ConfigError
from rlsys.rewards import REWARDS
from rlsys.rewards.functions import CHECKS
from rlsys.rewards.settings import function_deadline


def test_every_reward_has_a_first_line():
    for name, function in REWARDS.items():
        assert function.__name__ == name
        assert inspect.getdoc(function).splitlines()[0].endswith((".", ":"))


def test_every_check_belongs_to_a_built_in_reward():
    assert set(CHECKS) <= set(REWARDS)


def test_importing_the_rewards_loads_none_of_their_libraries():
    heavy = "{'sympy', 'math_verify', 'httpx', 'jsonschema', 'jinja2', 'torch', 'transformers'}"
    code = f"import sys, rlsys.rewards; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("completion", "finish", "score"),
    [
        ("481625", "stop", 1),
        ("184256", "stop", 0),  # 2 < 5 < 6
        ("481625", "length", 0),  # right, but did not end
        ("481620", "stop", 0),  # other digits
        ("48162", "stop", 0),  # not all digits
        ("", "stop", 0),
    ],
)
def test_zigzag_requires_the_same_digits_rising_and_falling_in_turn(completion, finish, score):
    assert REWARDS["zigzag"]("864152>", completion, finish) == score


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("regex", {}, "`pattern` is None"),
        ("regex", {"pattern": "(a"}, "not a regular expression: missing \\)"),
        ("regex", {"pattern": "(a)", "group": 2}, "has the groups 0, 1"),
        ("regex", {"pattern": "(?P<n>a)", "group": "m"}, "has the groups 0, 1, n"),
        ("json_schema", {}, "`schema` is None"),
        ("json_schema", {"schema": "no_such_file.json"}, "cannot be read .*No such file"),
        ("json_schema", {"schema": {"type": "text"}}, "not a JSON schema: 'text' is not valid .* at \\$.type"),
        ("format", {"think": "<think>"}, "without its brackets"),
        ("format", {"think": ""}, "without its brackets"),
        ("length", {}, "`at_most` is None"),
        ("length", {"at_most": 0}, "`at_most` is 0"),
        ("length", {"at_most": 10, "zero_at": 10}, "more than `at_most` \\(10\\)"),
        ("length", {"at_most": 10, "by": "words"}, "tokens or characters"),
        ("repetition", {"ngram": 0}, "1 or more"),
        ("repetition", {"max_penalty": 1.0}, "0 or less"),
        ("repetition", {"by": "letters"}, "words or characters"),
        ("http", {}, "`url` is None"),
        ("http", {"url": "localhost:8000"}, "give the service's address"),
        ("http", {"url": "http://x", "retrys": 3}, "no option `retrys`; it has url, batch"),
        ("http", {"url": "http://x", "batch": 0}, "`batch` is 0; it must be a number of 1 or more"),
        ("http", {"url": "http://x", "timeout_s": "soon"}, "`timeout_s` is 'soon'"),
        ("judge", {"url": "http://x/v1"}, "`model` is missing"),
        ("judge", {"url": "http://x", "model": "m"}, "must end in /v1"),
        ("judge", {"url": "http://x/v1", "model": "m", "pattern": "Score"}, "must have one group"),
        ("judge", {"url": "http://x/v1", "model": "m", "pattern": "(a"}, "not a regular expression"),
        ("judge", {"url": "http://x/v1", "model": "m", "template": "no_such.jinja"}, "cannot be read"),
    ],
)
def test_invalid_options_are_refused_in_a_sentence(name, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        CHECKS[name](options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("regex", {"pattern": "^(?P<n>\\d+)$", "group": "n"}),
        ("json_schema", {"schema": {"type": "object"}}),
        ("format", {}),
        ("format", {"think": "|think|", "answer": ""}),
        ("length", {"at_most": 10}),
        ("length", {"at_most": 10, "zero_at": 15, "by": "characters"}),
        ("repetition", {}),
        ("http", {"url": "http://localhost:8000/score", "retries": 0, "token_env": "SCORE_TOKEN"}),
        ("judge", {"url": "https://host/v1/", "model": "m", "scale": 5}),
    ],
)
def test_valid_options_are_accepted(name, options):
    CHECKS[name](options)


@pytest.mark.parametrize(("name", "more"), [("http", {}), ("judge", {"model": "m"})])
def test_a_token_in_place_of_its_variable_is_refused_and_not_shown(name, more):
    with pytest.raises(ConfigError, match="not the token itself") as refused:
        CHECKS[name]({"url": "http://x/v1", "token_env": "hf_abc123"} | more)
    assert "abc123" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({"exact": 1}, 10),
        ({"exact": {"deadline_s": 3}}, 3),
        ({"judge": {"url": "u", "model": "m"}}, 245),
        ({"http": {"url": "u", "timeout_s": 1}}, 10),
        ({"http": {"url": "u", "deadline_s": 5}}, 5),
        ({"model": {"path": "m"}}, 120),
    ],
)
def test_a_deadline_leaves_room_for_a_functions_own_time_limit(given, seconds):
    [function] = parse_functions("reward.functions", given).values()
    assert function_deadline(function, 10.0) == seconds
