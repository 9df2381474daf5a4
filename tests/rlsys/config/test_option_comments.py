"""The meanings that `rlsys validate --options` shows."""

import ast
import dataclasses
import inspect

import pytest

from rlsys.config.option_comments import option_comments
from rlsys.config.schema import Config

MEANINGS = option_comments()


SECTIONS = [field for field in dataclasses.fields(Config) if dataclasses.is_dataclass(field.type)]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_every_option_says_what_it_is(section):
    (definition,) = ast.parse(source := inspect.getsource(section.type)).body
    fields = [node for node in definition.body if isinstance(node, ast.AnnAssign)]
    assert [node.target.id for node in fields] == [f.name for f in dataclasses.fields(section.type)]
    for node in fields:
        comment = source.splitlines()[node.end_lineno - 1].partition("  # ")[2]
        assert comment.strip(), f"{section.name}.{node.target.id} has no comment"
        assert MEANINGS[f"{section.name}.{node.target.id}"].endswith(comment)


@pytest.mark.parametrize(
    ("option", "meaning"),
    [
        ("policy.lora.alpha", "an adapter is multiplied by alpha / rank; usually twice the rank"),
        ("run.seed", "every random choice follows from it"),
        ("models", "frozen models by the names under which reward functions ask them"),
        ("models.NAME.path", "named as model.path; empty: the name of the entry"),
        ("cluster.device", "cpu | gpu: decides the build of vLLM and DeepSpeed's accelerator"),
        ("eval.datasets.NAME.samples", "replaces eval.samples"),
        (
            "entropy.share",
            "share of all tokens that the control acts on; at least one token; null: 2e-4 with clip_cov, 2e-3 with kl_cov",
        ),
        ("entropy.coef", "weight of an entropy bonus in the loss"),
        (
            "algorithm.anchor",
            "old | rollout: the ratio is to the policy's log-probs before the step, or to the engine's",
        ),
    ],
)
def test_a_meaning_is_the_choices_and_the_comment_wherever_the_section_is_written(option, meaning):
    assert MEANINGS[option] == meaning
