"""Measurements are of the code as it is, or nearly: records name the commit that they were made with."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from records import LIMIT, ROOT, age, commits_of, fresh, git, rows, stamp, why_no_history

PAGES = ["README.md", "configs/README.md", "tests/bench/README.md"]
FILES = [
    "tests/bench/recipes.jsonl",
    "tests/bench/biases/runs.jsonl",
    "tests/bench/episode_demos.json",
    *(f"tests/system/{p.name}" for p in sorted((ROOT / "tests/system").glob("*.json*"))),
]


@pytest.mark.parametrize("name", [*FILES, *PAGES])
def test_a_record_is_little_older_than_the_code(name: str) -> None:
    if reason := why_no_history():
        pytest.skip(reason)
    commits = commits_of(ROOT / name)
    assert commits, f"{name} names no commit"
    ages = {commit: age(commit) for commit in commits}
    print(f"{name}: {ages}")
    stale = {commit: count for commit, count in ages.items() if count > LIMIT}
    assert not stale, f"{name} has to be measured again: so many commits have changed code since: {stale}"


def read_record(name: str) -> Any:
    return json.loads((ROOT / "tests" / "system" / name).read_text())


def test_runs_whose_processes_were_killed_ended_as_the_others() -> None:
    runs = [*read_record("kills.json")["runs"], *read_record("aimed_kills.json")]
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


def test_measurements_on_gpus_name_their_commits() -> None:
    """They may be older: whoever has no GPU cannot make them again."""
    table = rows((ROOT / "tests" / "gpu" / "results" / "README.md").read_text())
    assert table
    assert all(row["commit"].strip("`").isalnum() for row in table)


def test_every_figure_of_the_page_of_measurements_names_its_commit() -> None:
    text = (ROOT / "tests" / "bench" / "README.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    tables = sum(line.startswith("|---") for line in lines)
    assert len(rows(text)) == len(lines) - 2 * tables
    assert not [row for row in rows(text) if not row["commit"].strip("`").isalnum()]


# --- how ages are counted ---------------------------------------------------------------------------------------------


@pytest.fixture
def commit(tmp_path: Path) -> Callable[[str], str]:
    """`commit("rlsys/a.py")` changes a file of a repository in `tmp_path / "repository"` and commits it."""
    root = tmp_path / "repository"
    root.mkdir()
    git("init", "--quiet", root=root)

    def change(name: str) -> str:
        file = root / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(file.read_text() + "more\n" if file.exists() else "first\n")
        git("add", name, root=root)
        git("-c", "user.name=n", "-c", "user.email=e@e", "commit", "--quiet", "-m", name, root=root)
        return git("rev-parse", "--short", "HEAD", root=root)

    return change


def test_only_later_commits_that_change_code_count(commit: Callable[[str], str], tmp_path: Path) -> None:
    root = tmp_path / "repository"
    names = ["rlsys/a.py", "tests/t.py", "workers/w.py", "README.md", "launch/l.py", "configs/c.yaml"]
    commits = [commit(name) for name in names]
    assert [age(c, root) for c in commits] == [3, 3, 2, 2, 1, 0]
    assert age(f"{commits[4]}+changes", root) == 1
    with pytest.raises(ValueError, match="not in the history"):
        age("0123456", root)
    git("checkout", "--quiet", "-b", "other", commits[0], root=root)
    with pytest.raises(ValueError, match="not in the history"):
        age(commits[5], root)


def test_a_record_is_stamped_with_the_last_commit_of_code_and_its_changes(
    commit: Callable[[str], str], tmp_path: Path
) -> None:
    root = tmp_path / "repository"
    of_code = commit("rlsys/a.py")
    commit("tests/t.py")
    assert stamp(root) == of_code
    (root / "tests" / "t.py").write_text("changed\n")
    assert stamp(root) == of_code
    (root / "rlsys" / "new.py").write_text("new\n")
    assert stamp(root) == f"{of_code}+changes"


def test_results_are_kept_while_their_commit_is_fresh(commit: Callable[[str], str], tmp_path: Path) -> None:
    old = commit("rlsys/a.py")
    newer = commit("rlsys/a.py")
    for _ in range(3):
        commit("rlsys/a.py")
    results = [{"commit": old}, {"commit": newer}, {"commit": "unknown"}, {"seed": 0}]
    assert fresh(results, tmp_path / "repository", limit=3) == [{"commit": newer}]


def test_without_its_history_a_copy_says_why_ages_cannot_be_told(commit: Callable[[str], str], tmp_path: Path) -> None:
    root = tmp_path / "repository"
    for name in ("rlsys/a.py", "rlsys/b.py"):
        commit(name)
    assert why_no_history(root) == ""
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{root}", shallow], check=True)
    assert "shallow" in why_no_history(shallow)
    assert "not a clone" in why_no_history(root / "rlsys")
    shutil.rmtree(root / ".git")
    assert why_no_history(root)
    assert stamp(root) == "unknown"


def test_commits_are_read_from_every_kind_of_record(tmp_path: Path) -> None:
    def read(name: str, text: str) -> list[str]:
        (tmp_path / name).write_text(text)
        return commits_of(tmp_path / name)

    assert read("a.jsonl", '{"commit": "abc1234"}\n{"commit": "def5678+changes"}\n') == ["abc1234", "def5678+changes"]
    assert read("b.json", '{"commit": "abc1234", "runs": [{"of": {"commit": "def5678"}}]}') == ["abc1234", "def5678"]
    page = "At commit `abc1234`, not `1234567`.\n\n|what|commit|\n|---|---|\n|a|`def5678`|\n\n|what|b|\n|---|---|\n|c|`3333333`|\n"
    assert read("c.md", page) == ["abc1234", "def5678"]
