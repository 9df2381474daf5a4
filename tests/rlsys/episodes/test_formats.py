"""Which of vLLM's parsers reads the format of a model."""

import pytest
from chat_families import FAMILIES, family_tokenizer

from rlsys.episodes.formats import (
    TOOL_FORMATS,
    known_tool_parsers,
    suggest_tool_parser,
)
from rlsys.models.families import FAMILIES as RECORDS

SUGGESTED = {
    "qwen2_5": ("qwen2", "hermes"),
    "qwen3": ("qwen3", "hermes"),
    "llama3_1": ("llama", "llama3_json"),
    "mistral_v3": ("mistral", "mistral"),
    "mistral_v7": ("mistral", "mistral"),
    "gemma3": ("gemma3", ""),
    "phi4": ("phi3", ""),
    "deepseek_r1": ("deepseek_v3", "deepseek_v3"),
    "harmony": ("gpt_oss", "openai"),
    "olmo_tulu": ("olmo2", ""),
    "glm4_5": ("glm4_moe", "glm45"),
    "vicuna": ("llama", ""),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_parsers_are_suggested_by_what_the_template_writes(name):
    model_type, parser = SUGGESTED[name]
    template = family_tokenizer(name).chat_template
    assert suggest_tool_parser({"model_type": model_type}, template) == parser


def test_a_type_decides_where_templates_do_not_tell():
    assert suggest_tool_parser({"model_type": "llama4"}, "{% if tools %}") == "llama4_pythonic"
    assert suggest_tool_parser({"model_type": "llama4"}, "") == ""
    assert suggest_tool_parser({}, "<tool_call>\n<function=") == "qwen3_coder"


def test_every_suggestion_is_a_parser_of_the_installed_vllm():
    parsers = {name for _, name in TOOL_FORMATS} | {family.tool_parser for family in RECORDS.values()} - {""}
    assert parsers <= set(known_tool_parsers())
