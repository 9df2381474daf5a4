"""Which parameters are taken, and what is said of the others."""

import pytest

from workers.serve import parameters
from workers.serve.parameters import check_parameters
from workers.serve.refusals import Refusal
from workers.serve.settings import Settings

PLAIN, ABLE = Settings("demo"), Settings("demo", tool_parser="hermes", reasoning_parser="qwen3")
TOOL = {"type": "function", "name": "add"}


def refused(body, supported=parameters.CHAT, types=("function",), settings=PLAIN):
    with pytest.raises(Refusal) as error:
        check_parameters(body, supported, types, settings)
    assert (error.value.status, error.value.code) == (400, "unsupported_parameter")
    assert error.value.param in error.value.message
    return error.value.message


def taken(body, supported=parameters.CHAT, types=("function",), settings=PLAIN):
    check_parameters(body, supported, types, settings)
    return True


def test_what_would_have_no_effect_is_refused_with_what_to_do():
    assert refused({"modalities": ["audio"]}) == "The parameter `modalities` is not supported. Leave it out."
    assert refused({"max_tool_calls": 0}).startswith("The parameter `max_tool_calls` is not supported.")
    assert "send the whole conversation as `input`" in refused({"previous_response_id": "r"}, parameters.RESPONSES)
    assert "Use `tools`" in refused({"functions": [TOOL]})
    assert "not supported" in refused({"logprobs": True}, parameters.MESSAGES)


def test_what_asks_for_nothing_is_taken():
    assert taken({"background": False, "modalities": "", "echo": False})


@pytest.mark.parametrize("name", sorted(parameters.HARMLESS))
def test_harmless_parameters_are_taken_in_every_dialect(name):
    for supported in (parameters.CHAT, parameters.RESPONSES, parameters.MESSAGES, parameters.COUNT_TOKENS):
        assert taken({name: "a"}, supported)


def test_tools_need_a_known_format_of_calls():
    assert "episode.tool_parser=NAME" in refused({"tools": [TOOL]})
    assert taken({"tools": [TOOL]}, settings=ABLE)
    assert taken({"tools": [{"name": "add"}]}, types=("custom",), settings=ABLE)


def test_tools_that_a_service_would_run_are_refused():
    for types in (("function",), ("custom",)):
        assert "a tool of the type `web_search`" in refused(
            {"tools": [{"type": "web_search"}]}, types=types, settings=ABLE
        )


def test_reasoning_needs_a_parser_unless_none_is_wanted():
    effort = {"output_config": {"effort": "low"}}
    for body, supported in (
        ({"reasoning_effort": "low"}, parameters.CHAT),
        ({"reasoning": {"effort": "low"}}, parameters.RESPONSES),
        ({"thinking": {"type": "adaptive"}}, parameters.MESSAGES),
        (effort, parameters.MESSAGES),
    ):
        assert "episode.reasoning_parser=NAME" in refused(body, supported)
        assert taken(body, supported, settings=ABLE)
    assert taken({"reasoning_effort": "none"})
    assert taken({"reasoning": {"effort": "none"}}, parameters.RESPONSES)
    assert taken({"thinking": {"type": "disabled"}}, parameters.MESSAGES)
    assert taken({"output_config": {"format": {"type": "json_schema"}}}, parameters.MESSAGES)


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image", "input_audio", "document", "file"])
def test_contents_other_than_text_are_refused(kind):
    for name, supported in (("messages", parameters.CHAT), ("input", parameters.RESPONSES)):
        body = {name: [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}]}
        assert f"a part of the type `{kind}`" in refused(body, supported)
