"""Tries every family of models: each type that transformers has in training; engines, exports and whole runs of those listed.

.venv/bin/python tests/bench/family_record.py                      what families.json has not of this code (`make families`)
.venv/bin/python tests/bench/family_record.py unlisted engines     only these parts

Writes tests/bench/families.json. A family that is skipped now and was not in the record before is an error, and the record is kept.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
from records import MISSING, current, measuring

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("families.json")
PARTS = {
    "unlisted": "tests/workers/learner/proofs/test_unlisted_families.py",
    "engines": "tests/workers/rollout/test_engine_families.py",
    "exported": "tests/workers/rollout/test_exported_models.py",
    "runs": "tests/system/test_model_families.py",
}
LIBRARIES = ("torch", "vllm", "deepspeed", "transformers")


def measure(part: str) -> dict[str, Any]:
    packages = packages_distributions()  # vLLM for CPUs has another name
    versions = {name: version(packages[name][0]) for name in LIBRARIES}
    with measuring(RECORD.name) as commit, tempfile.TemporaryDirectory(prefix="families-") as place:
        report, began = Path(place) / "report.xml", time.monotonic()
        command = [sys.executable, "-m", "pytest", PARTS[part], f"--junitxml={report}", "-o", "junit_family=xunit1"]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"RLSYS_ALL_FAMILIES": "1"})
        seconds = round(time.monotonic() - began)
        return {"commit": commit, "seconds": seconds, "versions": versions, "families": answers(report)}


def answers(report: Path) -> dict[str, str]:
    """What the test of each family found: ok, its own words, or why it was skipped or failed."""
    answer_by_family = {}
    for case in ElementTree.parse(report).iter("testcase"):
        _, bracket, family = case.attrib["name"].rstrip("]").partition("[")
        if bracket:
            problem = next(
                (case.find(kind) for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None
            )
            words = [p.attrib["value"] for p in case.iter("property") if p.attrib["name"] == "answer"]
            if problem is not None:
                words = [f"{problem.tag}: {problem.attrib.get('message', '').splitlines()[0][:200]}"]
            answer_by_family[family] = words[0] if words else "ok"
    return answer_by_family


def problems(result: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Failed families, and those that are skipped now but were not in the record."""
    known = before.get("families", {})
    return [
        f"{family}: {answer}"
        for family, answer in result["families"].items()
        if answer.startswith(("failure", "error"))
        or (answer.startswith("skipped") and not known.get(family, "skipped").startswith("skipped"))
    ]


def read_record() -> dict[str, Any]:
    """The parts that it has."""
    parts = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {name: part for name, part in parts.items() if part != MISSING}


if __name__ == "__main__":
    record = read_record()
    for part in sys.argv[1:] or PARTS:
        if current([record.get(part, {})], RECORD.name):
            print(f"{part}: the record is of this code, and kept")
            continue
        result = measure(part)
        if wrong := problems(result, record.get(part, {})):
            raise SystemExit(f"{part}: the record stays as it was, because of\n" + "\n".join(wrong))
        record[part] = result
        RECORD.write_text(json.dumps({name: record.get(name, MISSING) for name in PARTS}, indent=1) + "\n")
        skipped = sum(answer.startswith("skipped") for answer in result["families"].values())
        print(f"{part}: {len(result['families'])} families, {skipped} skipped, {result['seconds']} s")
