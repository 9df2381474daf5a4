"""tests/gpu/roofline.py reads the file that tests/gpu/table.py writes."""

import json
import sys
from pathlib import Path

import pytest
from records import ROOT, stamps_of

sys.path.insert(0, str(ROOT / "tests" / "gpu"))
import roofline
import table


def test_the_roofline_reads_what_the_table_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, steps = tmp_path / "table.json", roofline.measured()
    rows = {row["model"]: row for row in json.loads(roofline.RESULTS.read_text())["rows"]}
    monkeypatch.setattr(table, "stamp", lambda: "abc1234:0123456")
    monkeypatch.setattr(table, "measure_model", lambda name, options: rows[name])
    monkeypatch.setattr(sys, "argv", ["table.py", "--device=cpu", "--json", str(file)])
    table.main()
    monkeypatch.setattr(roofline, "RESULTS", file)
    assert roofline.measured() == steps
    assert stamps_of(file) == [("table.json", "abc1234:0123456")]
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
