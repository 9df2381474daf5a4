"""What `rlsys doctor` says of what was found."""

import io

import numpy as np
from rich.console import Console

from launch.tools.diagnosis.explain import Diagnosis
from launch.tools.diagnosis.hypotheses import Hypothesis
from launch.tools.doctor.agreement import checkpoint_weights, print_diagnosis
from rlsys.agreement import Agreement
from rlsys.checks import load_checked
from rlsys.config.schema import Config
from rlsys.runs.checkpoint import SUMS
from rlsys.types import Batch, Prompt, Sample

LOGPROBS = np.array([-1, -2], dtype=np.float32)
BATCH = Batch(
    [Prompt("p", "made", "ab", [2, 3], {})],
    [Sample("p", 0, "cd", np.array([4, 1], dtype=np.int32), LOGPROBS, "stop", 0)],
    np.array([0]),
    np.zeros(1, dtype=np.float32),
    [{}],
)
TRIED = [
    Hypothesis("temperature", "the engine seems to sample at 0.7, the trainer divides by 1", 2e-5, 8e-5),
    Hypothesis("top-p", "the engine seems to sample with top_p 0.9, the trainer takes the whole vocabulary", 1.2, 4),
]


def print_doctor(gap: float) -> tuple[int, str]:
    diagnosis = Diagnosis(
        Agreement(BATCH, LOGPROBS + np.float32(gap), 1e-3),
        TRIED,
        {"padding": "all prompts have 2 tokens: there is nothing to pad"},
        ["the tokenizer has 14 tokens, the model embeds 13: the others have no weights."],
        0.004,
    )
    text = io.StringIO()
    code = print_diagnosis(diagnosis, Config(), Console(file=text, width=160))
    return code, text.getvalue()


def test_a_pair_that_agrees_is_exit_code_0():
    code, text = print_doctor(1e-6)
    assert code == 0
    assert "✓ rollout and policy agree: mean 9.8e-07" in text
    assert "cause" not in text


def test_a_pair_that_disagrees_is_exit_code_1_with_its_cause():
    code, text = print_doctor(0.5)
    assert code == 1
    assert "✗ rollout and policy disagree: mean 0.5, largest 0.5 over 2 tokens; the mean may be 0.001" in text
    assert "cause: temperature: the engine seems to sample at 0.7, the trainer divides by 1 (gap 0.5 → 2e-05)" in text


def test_every_supposition_has_its_gap_or_the_reason_why_not():
    lines = print_doctor(0.5)[1].splitlines()
    [as_they_are] = [line for line in lines if line.startswith("as they are")]
    assert as_they_are.split()[-2:] == ["5.0e-01", "5.0e-01"]
    [top_p] = [line for line in lines if line.startswith("top-p")]
    assert top_p.split()[-2:] == ["1.2e+00", "4.0e+00"]
    assert any(line.startswith("padding: all prompts have 2 tokens") and "–" in line for line in lines)
    assert any(
        line == "note: the tokenizer has 14 tokens, the model embeds 13: the others have no weights." for line in lines
    )


def test_the_newest_checkpoint_of_the_run_is_what_engines_may_still_have(tmp_path):
    (tmp_path / "some.yaml").write_text("")
    config = load_checked(tmp_path / "some.yaml", [f"run.dir={tmp_path / 'run'}"])
    assert checkpoint_weights(config) == {}
    for step in (2, 4):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
        (folder / "model").mkdir(parents=True)
        (folder / SUMS).write_text("")
    assert checkpoint_weights(config) == {
        "the checkpoint of step 4": str(tmp_path / "run" / "checkpoints" / "step-000004" / "model")
    }
