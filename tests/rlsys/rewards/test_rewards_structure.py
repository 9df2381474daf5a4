import json

import pytest

from rlsys.rewards.structure import check_json_schema, json_schema

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ('{"age": 3}', 1),
        ('\n{"age": 3, "name": "Ann"}\n', 1),
        ('{"age": -3}', 0),
        ('{"age": "3"}', 0),
        ("{}", 0),
        ("[3]", 0),
        ('{"age": 3', 0),
        ('It is {"age": 3}', 0),
        ('Here it is:\n```json\n{"age": 3}\n```\nDone.', 1),
        ('```json\n{"age": 3}\n```\nNo:\n```json\n{"age": -3}\n```', 0),  # the last one counts
        ('```json\n{"age": -3}\n```\nNo:\n```json\n{"age": 3}\n```', 1),
        ('<think>{"age": -3}?</think>\n{"age": 3}', 1),
        ('{"age": NaN}', 0),
        ("", 0),
    ],
)
def test_json_schema_requires_json_of_the_right_shape(completion, score):
    assert json_schema(completion, schema=SCHEMA) == score


def test_a_schema_may_be_a_file(tmp_path):
    file = tmp_path / "person.json"
    file.write_text(json.dumps(SCHEMA))
    check_json_schema({"schema": str(file)})
    assert json_schema('{"age": 3}', schema=str(file)) == 1
    assert json_schema('{"age": -3}', schema=str(file)) == 0


@pytest.mark.parametrize(
    "completion", ["[" * 100_000, '{"age": ' + "9" * 10_000 + "}", '{"a":' * 50_000, "\x00", '"\\ud800"']
)
def test_no_text_makes_json_schema_raise(completion):
    assert json_schema(completion, schema=SCHEMA) == 0
