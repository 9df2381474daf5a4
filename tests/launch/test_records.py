"""Measurements are of the code as it is, or nearly: records name the code that they were made with, or count as missing."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import records
from records import (
    DEPENDS,
    LIMIT,
    ROOT,
    all_stamps,
    changed_share,
    current,
    fault,
    faults,
    git,
    listed,
    measuring,
    stamp,
    stamps_of,
    why_no_history,
)


@pytest.mark.parametrize("measurement", sorted(DEPENDS.keys() - {"any"}))
def test_a_measurement_is_of_this_code_or_listed_as_to_be_made_again(measurement: str) -> None:
    if reason := why_no_history():
        pytest.skip(reason)
    wrong = faults(all_stamps()[measurement], measurement)
    if measurement in listed():
        assert wrong, f"{measurement} is good: take it out of `To be measured again` in tests/bench/README.md"
    else:
        assert not wrong, (
            f"{measurement} does not count: {'; '.join(wrong)}.\n"
            "Measure it again, or list it, with the reason, under `To be measured again` in tests/bench/README.md."
        )


def test_every_commit_of_records_and_pages_belongs_to_a_measurement_whose_files_are_known() -> None:
    assert all_stamps().keys() == DEPENDS.keys() - {"any"}
    assert listed().keys() <= DEPENDS.keys()


@pytest.mark.parametrize("measurement", DEPENDS)
def test_a_measurement_depends_on_files_that_exist(measurement: str) -> None:
    for path in DEPENDS[measurement].split():
        if path != f"tests/bench/{Path(measurement).stem}.py":
            assert path.startswith(":!") or git("ls-files", "--", path), path


def read_record(name: str) -> Any:
    return json.loads((ROOT / "tests" / "system" / name).read_text())


def test_runs_whose_processes_were_killed_ended_as_the_others() -> None:
    runs = [*read_record("kills.json"), *read_record("aimed_kills.json")]
    assert sum(len(one["killed"]) for one in runs) > 60
    for one in runs:
        assert (one["equal"], one["gave_up"], one["left"]) == ("yes", "", []), one


def test_random_settings_ran_as_they_should() -> None:
    lines = (ROOT / "tests" / "system" / "settings.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    assert [one["seed"] for one in runs] == list(range(30))
    assert [one for one in runs if one["words"] or not one["killed"]] == []


@pytest.mark.parametrize("name", ["soak.json", "soak_episodes.json", "memory.json", "memory_episodes.json"])
def test_long_runs_ended_well_and_nothing_grew(name: str) -> None:
    record = read_record(name)
    assert (record["exit"], record["done"], record["left"], record["growing"]) == (0, record["steps"], [], [])
    judged = {one["role"].partition("-")[0] for one in record["growth_mib_per_100_steps"]}
    needed = {"policy", "rollout", "reference", "driver", "episode" if name == "memory_episodes.json" else "reward"}
    assert name == "soak_episodes.json" or judged >= needed, "too short to judge memory"


@pytest.mark.parametrize("page", ["tests/gpu/results/README.md", "tests/bench/README.md"])
def test_every_row_of_a_table_of_figures_names_its_commit(page: str) -> None:
    """Those of GPUs may be of any commit: whoever has no GPU cannot make them again."""
    for table in (ROOT / page).read_text().split("\n\n"):
        head, *rows = [line[1:-1].split("|") for line in table.splitlines() if line.startswith("|")] or [[]]
        if head and head[0] != "measurement":
            column = head.index("commit")
            assert all(records.NAMED.search(row[column]) for row in rows[1:]), rows


# --- how records are made and judged ----------------------------------------------------------------------------------

Commit = Callable[..., str]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(DEPENDS, "speed.py", "rlsys :!rlsys/pages tests/bench/speed.py")
    root = tmp_path / "repository"
    root.mkdir()
    git("init", "--quiet", root=root)
    return root


@pytest.fixture
def commit(root: Path) -> Commit:
    """`commit("rlsys/a.py", "text")` writes a file in the repository and commits it."""

    def change(name: str, text: str) -> str:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        git("add", name, root=root)
        git("-c", "user.name=n", "-c", "user.email=e@e", "commit", "--quiet", "-m", name, root=root)
        return git("rev-parse", "--short=7", "HEAD", root=root)

    return change


LINES = "".join(f"line {i}\n" for i in range(40))


def test_a_record_is_refused_while_code_is_changed_and_not_committed(root: Path, commit: Commit) -> None:
    of_code = commit("rlsys/a.py", LINES)
    commit("tests/bench/README.md", "page")
    assert stamp("speed.py", root).startswith(f"{of_code}:"), "the last commit that changed what was measured"
    for name in ("tests/bench/other.py", "rlsys/README.md", "rlsys/pages/a.py"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("changed")
    stamp("speed.py", root)
    for name in ("rlsys/new.py", "tests/bench/speed.py"):
        (root / name).write_text("changed")
        with pytest.raises(SystemExit, match=rf"(?s)speed.py cannot be measured.*\?\? {name}.*Commit these changes"):
            stamp("speed.py", root)
        (root / name).unlink()


def test_a_record_is_refused_if_code_changes_while_it_is_measured(root: Path, commit: Commit) -> None:
    commit("rlsys/a.py", LINES)
    with measuring("speed.py", root):
        commit("tests/other.py", "other")
    with pytest.raises(SystemExit, match="while its code changed"), measuring("speed.py", root):
        commit("rlsys/a.py", "other")


def test_a_commit_of_other_code_is_no_commit_of_the_record(root: Path, commit: Commit) -> None:
    old = commit("rlsys/a.py", LINES)
    measured = stamp("speed.py", root)
    assert fault(measured, "speed.py", root) == ""
    new = commit("rlsys/a.py", f"{LINES}more\n")
    assert fault(measured, "speed.py", root) == ""
    renamed = measured.replace(old, new)
    assert fault(renamed, "speed.py", root) == "", "its code is in the history, and nearly that of now"
    made_up = f"{new}:0123456"
    assert f"commit {new} does not have the code" in fault(made_up, "speed.py", root)
    for written in (new, old, f"{measured}+changes", "unknown", ""):
        assert "names no commit" in fault(written, "speed.py", root), written


def test_a_record_outlives_a_rebase_that_keeps_its_code_and_no_other(root: Path, commit: Commit) -> None:
    first = commit("README.md", "first")
    commit("rlsys/a.py", LINES)
    measured = stamp("speed.py", root)
    git("checkout", "--quiet", "-b", "same", first, root=root)
    commit("README.md", "second")
    commit("rlsys/a.py", LINES)
    assert fault(measured, "speed.py", root) == ""
    git("checkout", "--quiet", "-b", "joined", first, root=root)
    records.fault.cache_clear()
    commit("rlsys/a.py", f"{LINES}and what came later\n")
    assert "no other commit" in fault(measured, "speed.py", root)


def test_a_record_ages_with_the_lines_that_it_depends_on(root: Path, commit: Commit) -> None:
    begin = commit("rlsys/a.py", LINES)
    measured = stamp("speed.py", root)
    for number in range(50):
        commit("rlsys/pages/a.py", f"{number}\n" * 100)
        commit("workers/a.py", f"{number}\n" * 100)
    assert changed_share(begin, "speed.py", root) == 0
    commit("rlsys/a.py", LINES.replace("line 7\n", "another\n"))
    assert changed_share(begin, "speed.py", root) == 2 / 40
    assert fault(measured, "speed.py", root) == ""
    records.fault.cache_clear()
    commit(
        "rlsys/a.py",
        LINES.replace("line 7\n", "another\n").replace("line 9\n", "").replace("line 11\n", "").replace("line 8\n", ""),
    )
    assert changed_share(begin, "speed.py", root) == 5 / 37 > LIMIT
    assert "14% of the lines" in fault(measured, "speed.py", root)


def test_finished_parts_are_kept_while_the_code_is_the_same(root: Path, commit: Commit) -> None:
    old = commit("rlsys/a.py", LINES)
    results: list[dict[str, Any]] = [{"commit": stamp("speed.py", root), "seed": 0}]
    commit("workers/a.py", "other")
    assert current(results, "speed.py", root) == results
    commit("rlsys/a.py", "other")
    results += [{"commit": stamp("speed.py", root), "seed": 1}, {"commit": old}, {"commit": "unknown"}, {"seed": 0}]
    assert [kept["seed"] for kept in current(results, "speed.py", root)] == [1]


def test_without_its_history_a_copy_says_why_ages_cannot_be_told(root: Path, commit: Commit, tmp_path: Path) -> None:
    for name in ("rlsys/a.py", "rlsys/b.py"):
        commit(name, LINES)
    assert why_no_history(root) == ""
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{root}", shallow], check=True)
    assert "shallow" in why_no_history(shallow)
    assert "not a clone" in why_no_history(root / "rlsys")
    shutil.rmtree(root / ".git")
    assert why_no_history(root)
    assert stamp("speed.py", root) == "unknown"
    assert current([{"commit": "unknown"}], "speed.py", root) == []


def test_stamps_are_read_from_every_kind_of_record(tmp_path: Path) -> None:
    def read(name: str, text: str) -> list[tuple[str, str]]:
        (tmp_path / name).write_text(text)
        return stamps_of(tmp_path / name)

    lines = '{"commit": "abc1234"}\n{"commit": "def5678+changes"}\n{"of": {"commit": "def5678:0123456"}}'
    expected = ["abc1234", "def5678+changes", "def5678:0123456"]
    assert read("runs.jsonl", lines) == [("runs.jsonl", commit) for commit in expected]
    page = """# Speed
`lora_cpu.yaml` takes 2 s at commit `abc1234:0123456`, and `make demo` 3 s at `abc1235`.

|what|command|commit|
|---|---|---|
|a|`driver.py --rounds 4` ([record](../driver.json))|`abc1236:0123456`|
|b|same runs|`abc1237`|
|c|`sync.py`, which driver.py also calls|`abc1238+changes`|

## Others

At `abc1239`."""
    assert read("page.md", page) == [
        ("lora_cpu.yaml", "abc1234:0123456"),
        ("make demo", "abc1235"),
        ("driver.py", "abc1236:0123456"),
        ("driver.py", "abc1237"),
        ("sync.py", "abc1238+changes"),
        ("", "abc1239"),
    ]
