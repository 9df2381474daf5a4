"""Records of measurements name the commit that they were made with; from it follows how old they are.

.venv/bin/python tests/launch/records.py       prints the commit to name, such as 3e5c714, or 3e5c714+changes

A record is a JSON file with a field `commit`, or a table of a page with a column `commit`, or a sentence with "commit
`3e5c714`". Its age is the number of commits since then that changed code, which is the folders in `CODE`.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CODE = ("rlsys", "workers", "launch", "configs")
LIMIT = 120  # commits that changed code since an acceptable record was made
CHANGES = "+changes"  # after the commit, if code was changed and not committed
SENTENCE = re.compile(r"\bcommit `([0-9a-f]{7,40})`")
CELL = re.compile(r"`([0-9a-f]{7,40})`")


def git(*words: str, root: Path = ROOT) -> str:
    """What a git command prints. Raises `OSError` or `CalledProcessError`."""
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def stamp(root: Path = ROOT) -> str:
    """The last commit that changed code: one that changed only tests or pages may still be rebased."""
    try:
        changes = git("status", "--porcelain", "--", *CODE, root=root)
        return git("log", "-1", "--format=%h", "--", *CODE, root=root) + (CHANGES if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def why_no_history(root: Path = ROOT) -> str:
    """Why ages cannot be told here; empty if they can."""
    try:
        if Path(git("rev-parse", "--show-toplevel", root=root)) != root.resolve():
            return "this is not a clone of the repository"
        shallow = git("rev-parse", "--is-shallow-repository", root=root) == "true"
    except (OSError, subprocess.CalledProcessError) as error:
        return f"git tells no history here: {error}"
    return "this clone is shallow; `git fetch --unshallow` brings the history" if shallow else ""


def age(commit: str, root: Path = ROOT) -> int:
    """The number of commits that changed code after this one."""
    name = commit.removesuffix(CHANGES)
    try:
        git("merge-base", "--is-ancestor", name, "HEAD", root=root)
    except subprocess.CalledProcessError:
        raise ValueError(
            f"{commit!r} is not in the history of HEAD. A rebase may have renamed it: name the commit of now, or measure again."
        ) from None
    return int(git("rev-list", "--count", f"{name}..HEAD", "--", *CODE, root=root))


def fresh(results: list[dict[str, Any]], root: Path = ROOT, limit: int = LIMIT) -> list[dict[str, Any]]:
    """Those whose commit is known and not too old."""
    kept = []
    for result in results:
        try:
            if age(result["commit"], root) <= limit:
                kept.append(result)
        except (KeyError, ValueError):
            continue
    return kept


def commits_of(file: Path) -> list[str]:
    """The commits that a record names, each once, in their order."""
    text = file.read_text()
    if file.suffix == ".md":
        return list(
            dict.fromkeys([*SENTENCE.findall(text), *(c for row in rows(text) for c in CELL.findall(row["commit"]))])
        )
    values = map(json.loads, text.splitlines()) if file.suffix == ".jsonl" else [json.loads(text)]
    return list(dict.fromkeys(commit for value in values for commit in fields(value)))


def fields(value: Any) -> list[str]:
    """The values of all fields named `commit`, however deep."""
    if isinstance(value, list):
        return [commit for part in value for commit in fields(part)]
    if not isinstance(value, dict):
        return []
    own = [value["commit"]] if isinstance(value.get("commit"), str) else []
    return own + [commit for part in value.values() for commit in fields(part)]


def rows(text: str) -> list[dict[str, str]]:
    """The rows of all tables with a column `commit`, by column."""
    table_rows = []
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *body = [line[1:-1].split("|") for line in table.splitlines()]
        if "commit" in head:
            table_rows += [dict(zip(head, cells, strict=True)) for cells in body]
    return table_rows


if __name__ == "__main__":
    print(stamp())
