"""tests/gpu/roofline.py reads the file that tests/gpu/table.py writes."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import ROOT, stamps_of

from launch.tools.estimates.devices import GPUS
from launch.tools.estimates.memory import SequenceLengths
from launch.tools.estimates.step_time import estimate_step
from rlsys.config.loading import load_config
from rlsys.models.known_shapes import look_up_shape

sys.path.insert(0, str(ROOT / "tests" / "gpu"))
import decoding
import roofline
import table


def test_the_roofline_reads_what_the_table_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, steps = tmp_path / "table.json", roofline.measured()
    rows = {row["model"]: row for row in json.loads(roofline.RESULTS.read_text())["rows"]}
    monkeypatch.setattr(table, "stamp", lambda: "abc1234:0123456")
    monkeypatch.setattr(table, "measure_model", lambda name, options: rows[name])
    monkeypatch.setattr(table, "host_figures", lambda: {"vllm": 4.7, "rlsys": 2.5})
    monkeypatch.setattr(sys, "argv", ["table.py", "--device=cpu", "--json", str(file)])
    table.main()
    monkeypatch.setattr(roofline, "RESULTS", file)
    assert roofline.measured() == steps
    assert stamps_of(file) == [("table.json", "abc1234:0123456")]
    assert json.loads(file.read_text())["host_ms_a_step"] == {"vllm": 4.7, "rlsys": 2.5}
    assert json.loads(file.read_text())["versions"].keys() == {"torch", "vllm", "deepspeed", "transformers"}


def test_changes_are_refused_before_a_gpu_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def refuse() -> str:
        raise SystemExit("Commit these changes")

    monkeypatch.setattr(table, "stamp", refuse)
    monkeypatch.setattr(table, "measure_model", lambda name, options: measured.append(name))
    monkeypatch.setattr(sys, "argv", ["table.py", "--device=cpu", "--json", str(tmp_path / "table.json")])
    with pytest.raises(SystemExit, match="Commit these changes"):
        table.main()
    assert not measured


def test_the_page_is_what_the_roofline_writes() -> None:
    assert roofline.PAGE.read_text() == roofline.write_page()


SENT_ALONE = {"6408af9"}  # commits at which vLLM sent every token by itself
ALONE_S = 30.2e-6  # of the process that asks, for such a token: results/h100_decoding_single.log, `256 seed logprobs`


def planned(row: dict[str, Any], card: str, commit: str) -> dict[str, float]:
    """The phases of a recorded step as `rlsys plan` estimates them, with an update of the samples that it trained."""
    settings = ["cluster.device=gpu", "cluster.placement=colocated", "sync.transport=cuda_ipc"]
    config = load_config(ROOT / "configs" / "tiny_cpu.yaml", [*table.SETTINGS, *settings])
    model, options = look_up_shape(f"Qwen/Qwen2.5-{row['model'].upper()}"), row["figures"]["options"]
    assert model
    prompt, mean = options["prompt_tokens"], options["mean"]

    def phases(prompts: int) -> dict[str, float]:
        one = replace(config, trainer=replace(config.trainer, prompts_per_step=prompts))
        return estimate_step(one, model, SequenceLengths(prompt, options["longest"]), GPUS[card], mean).phases

    prompts = config.trainer.prompts_per_step
    whole, twice = phases(prompts), phases(2 * prompts)
    whole["update"] -= (1 - table.trained_share(row)) * (twice["update"] - whole["update"])
    if commit.partition(":")[0] in SENT_ALONE:
        whole["rollout"] = max(whole["rollout"], prompts * config.trainer.samples_per_prompt * mean * ALONE_S)
    return whole


def recorded_steps() -> list[Any]:
    records = {file.stem: json.loads(file.read_text()) for file in sorted(roofline.RESULTS.parent.glob("*.json"))}
    rows = [(name, record, row) for name, record in records.items() for row in record["rows"] if "step_s" in row]
    return [pytest.param(record, row, id=f"{name} {row['model']}") for name, record, row in rows]


@pytest.mark.parametrize(("record", "row"), recorded_steps())
def test_plan_is_within_half_of_what_a_gpu_has_measured(record: dict[str, Any], row: dict[str, Any]) -> None:
    phases = planned(row, record["card"].removeprefix("NVIDIA "), record["commit"])
    measured = row["figures"]["phases_s"]
    assert 1 / 1.5 < phases["rollout"] / measured["rollout"] < 1.5
    assert 1 / 1.5 < sum(phases.values()) / row["step_s"] < 1.5


STEPS = re.compile(
    r"RESULT decode (\d+) (?:seed|none): .* step ([\d.]+) ms"
)  # without log-probs, which no token sends alone


@pytest.mark.parametrize(
    ("sequences", "step_ms"), STEPS.findall((roofline.RESULTS.parent / "h100_decoding_single.log").read_text())
)
def test_plan_is_within_half_of_an_engines_steps_on_a_gpu(sequences: str, step_ms: str) -> None:
    gpu = ["cluster.device=gpu", "cluster.placement=colocated", "sync.transport=cuda_ipc"]
    alone = [f"trainer.prompts_per_step={sequences}", "trainer.samples_per_prompt=1"]
    config = load_config(ROOT / "configs" / "tiny_cpu.yaml", [*table.SETTINGS, *gpu, *alone])
    model, lengths = look_up_shape("Qwen/Qwen2.5-0.5B"), SequenceLengths(decoding.PROMPT, decoding.COMPLETION)
    assert model
    seconds = estimate_step(config, model, lengths, GPUS["H100"], decoding.COMPLETION).phases["rollout"]
    assert 1 / 1.5 < seconds / decoding.COMPLETION * 1000 / float(step_ms) < 1.5
