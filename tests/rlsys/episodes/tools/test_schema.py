"""Functions as chat templates describe them."""

import asyncio
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator

from rlsys.episodes.tools.function_tool import FunctionTool
from rlsys.episodes.tools.schema import function_schema
from rlsys.errors import ConfigError


async def search(
    query: str, limit: int = 5, kinds: list[Literal["a", "b"]] | None = None, *, row: dict, state: dict
) -> str:
    """Searches the library.

    It is slow.

    Args:
        query: words to look for,
            in any order
        limit (int): how many results: at most

    Returns:
        kinds: not a parameter
    """


def test_a_function_is_described_by_its_signature_and_docstring():
    assert function_schema(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches the library.\n\nIt is slow.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "words to look for, in any order"},
                    "limit": {"type": "integer", "description": "how many results: at most"},
                    "kinds": {"anyOf": [{"type": "array", "items": {"enum": ["a", "b"]}}, {"type": "null"}]},
                },
                "required": ["query"],
            },
        },
    }


def untyped(a, b: Any, c: dict[str, float], d: bool | None = None): ...


def test_a_function_without_types_or_docstring_has_a_schema_too():
    function = function_schema(untyped)["function"]
    assert function["description"] == ""
    assert function["parameters"]["required"] == ["a", "b", "c"]
    validator = Draft202012Validator(function["parameters"])
    assert validator.is_valid({"a": [1], "b": None, "c": {"x": 0.5}})
    assert not validator.is_valid({"a": [1], "b": None, "c": {"x": "y"}})
    assert not validator.is_valid({"a": 1, "b": 1, "c": {}, "d": "yes"})


class Adder:
    """Adds."""

    async def __call__(self, a: "int") -> int:
        return a + 1


def test_an_object_that_can_be_called_is_a_tool():
    function = function_schema(Adder())["function"]
    assert (function["name"], function["description"]) == ("Adder", "Adds.")
    assert function["parameters"]["properties"] == {"a": {"type": "integer"}}
    assert asyncio.run(FunctionTool(Adder(), {}, {}).call({"a": 1})) == "2"


def many(*words: str): ...


def unknown(when: "Whenever"): ...  # noqa: F821


def strange(when: type[int]): ...


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (many, r"the tool `many` has a parameter `\*words: str`, which has no name for the model to use"),
        (unknown, "the parameters of the tool `unknown` cannot be read: name 'Whenever' is not defined"),
        (strange, r"the parameter `when` of the tool `strange` has the type type\[int\], which a model cannot write"),
    ],
)
def test_a_parameter_that_a_model_cannot_write_is_refused(function, sentence):
    with pytest.raises(ConfigError, match=sentence):
        function_schema(function)
