"""Records of measurements name the code that they were made with; from it follows whether they still speak of the code of today.

.venv/bin/python tests/launch/records.py driver.py       prints the stamp of a measurement that is made now, such as 3e5c714:9f0b6c2
.venv/bin/python tests/launch/records.py                 prints what is wrong with the stamps of all records

A stamp is a commit, and a hash of the files that the measurement depends on as this commit has them. A commit that is given another
name keeps its stamps, as long as those files are the same. If several commits are joined in one, measurements of the earlier ones are
lost, unless later ones changed none of these files. Pages have stamps too: each belongs to the measurement named last before it.
"""

import functools
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MISSING = {"commit": "unknown"}  # a part of a record that is still to be measured
LIMIT = 0.1  # changed lines, over the lines of the files that a measurement depends on
BENCH, SYSTEM, CONFIGS = "tests/bench", "tests/system", "configs"
PAGES = ["README.md", f"{CONFIGS}/README.md", f"{BENCH}/README.md"]
LISTED = re.compile(r"^\|`([^`]+)`\|([^|]+)\|$", re.MULTILINE)  # rows below "To be measured again"

LAUNCH = "launch/*.py :!launch/tools :!launch/tools/report"
RUN = f"rlsys :!launch/tools/analysis workers {LAUNCH}"
LEARNER = "rlsys/batching rlsys/forward rlsys/agreement.py workers/learner workers/cpu"
ENGINE = "workers/rollout workers/cpu rlsys/sampling"
METHODS = (
    f"rlsys/algorithms rlsys/trainer.py rlsys/updates.py rlsys/tasks rlsys/config/methods.py {LEARNER} workers/rollout"
)
EPISODES = "rlsys/episodes workers/episodes workers/turns"
PLAN = "launch/tools/estimates launch/tools/plan"
DEMO = f"{METHODS} configs/tiny_cpu.yaml"
KILLS = f"{RUN} {SYSTEM}/killing.py {SYSTEM}/kills.py {SYSTEM}/own_game.py configs/tiny_cpu.yaml"
SOAK = f"{KILLS} {SYSTEM}/soak.py {SYSTEM}/process_memory.py"
# measurement: its record, its script, or the command of the page → the files that it depends on, as git's pathspecs
DEPENDS = {
    "recipes.jsonl": f"{METHODS} configs/*.yaml :!configs/*_gpu.yaml :!configs/[cgl]*_cpu.yaml {BENCH}/recipes.py",
    "episode_demos.json": f"{METHODS} {EPISODES} configs/guess_cpu.yaml configs/calculator_cpu.yaml {BENCH}/episode_demos.py",
    "runs.jsonl": f"{METHODS} configs/tiny_cpu.yaml configs/two_modes_cpu.yaml {BENCH}/biases/*.py {BENCH}/biases/*.yaml",
    "real.json": f"{METHODS} rlsys/models configs/gemma3_270m_cpu.yaml {BENCH}/real.py",
    "lora_cpu.yaml": f"{METHODS} configs/tiny_cpu.yaml configs/lora_cpu.yaml",
    "demo_figures.py": f"{DEMO} {BENCH}/demo_figures.py",
    "make demo": DEMO,
    "compare.py": f"{LEARNER} {ENGINE} workers/sync rlsys/pipeline.py rlsys/trainer.py {BENCH}/trl/*.py {BENCH}/trl/*.yaml",
    "rlsys bench": f"{LEARNER} {ENGINE} launch/tools/bench configs/gemma3_270m_cpu.yaml",
    "compute.py": f"{LEARNER} {BENCH}/compute.py",
    "driver.py": f"rlsys/trainer.py rlsys/pipeline.py rlsys/updates.py rlsys/batching rlsys/sampling rlsys/runs {BENCH}/driver.py",
    "harnesses.json": f"{EPISODES} workers/serve {BENCH}/harnesses.py {BENCH}/harnesses",
    "episodes.py": f"{EPISODES} {ENGINE} rlsys/pipeline.py rlsys/trainer.py {BENCH}/episodes.py",
    "compaction.json": f"{METHODS} {EPISODES} configs/guess_cpu.yaml {BENCH}/compaction.py {BENCH}/compaction",
    "environment.py": f"{EPISODES} {BENCH}/environment.py",
    "start.py": f"workers/fleet workers/start workers/processes {LAUNCH} rlsys/trainer.py {BENCH}/start.py",
    "sync.py": f"workers/sync workers/rollout {BENCH}/sync.py",
    "exact.py": f"workers/cpu rlsys/forward rlsys/agreement.py {BENCH}/exact.py",
    "lora.py": f"{LEARNER} workers/sync workers/rollout {BENCH}/lora.py",
    "loading.py": f"workers/learner rlsys/models {BENCH}/loading.py",
    "sequences.py": f"{LEARNER} {BENCH}/sequences.py",
    "memory.py": f"{LEARNER} {PLAN} {BENCH}/memory.py",
    "simulate.py": f"{PLAN} rlsys/pipeline.py rlsys/trainer.py workers/rollout {BENCH}/simulate.py",
    "kills.json": KILLS,
    "aimed_kills.json": f"{KILLS} {SYSTEM}/aim*.py configs/ppo.yaml",
    "settings.jsonl": f"{KILLS} {SYSTEM}/settings.py",
    "soak.json": SOAK,
    "soak_episodes.json": SOAK,
    "memory.json": SOAK,
    "memory_episodes.json": SOAK,
    "families.json": f"rlsys/batching rlsys/forward rlsys/models workers/learner {ENGINE} workers/sync tests/rlsys/families.py {BENCH}/family_record.py",
    "any": "rlsys workers launch configs",  # for measurements that are not compared with the code of today
}
PROSE = (":!*.md", ":!*.svg", ":!*.png")
STAMP = re.compile(r"([0-9a-f]{7,40}):([0-9a-f]{7})")
NAMED = re.compile(r"[\"`]([0-9a-f]{7,40}(?::[0-9a-f]{7})?(?:\+changes)?|unknown)[\"`]")
MEASUREMENT = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, DEPENDS))})(?![\w.]*\w)")


def git(*words: str, root: Path = ROOT) -> str:
    """What a git command prints. Raises `OSError` or `CalledProcessError`."""
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def files_of(measurement: str) -> list[str]:
    return [*DEPENDS[measurement].split(), *PROSE]


# --- to make a record -------------------------------------------------------------------------------------------------


def stamp(measurement: str = "any", root: Path = ROOT) -> str:
    """Of a measurement that begins now. Raises `SystemExit` if no commit has the files that it depends on."""
    files = files_of(measurement)
    try:
        if changed := git("status", "--porcelain", "--", *files, root=root):
            raise SystemExit(
                f"{measurement} cannot be measured, as no commit has the code that would be:\n{changed}\n"
                "Commit these changes, or measure in a clean copy: git worktree add ../clean"
            )
        commit = git("log", "-1", "--abbrev=7", "--format=%h", "--", *files, root=root)
        return f"{commit}:{code(commit, measurement, root)}"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextmanager
def measuring(measurement: str, root: Path = ROOT) -> Iterator[str]:
    """Gives the stamp. Raises `SystemExit` if files that the measurement depends on have changed when it ends."""
    begin = stamp(measurement, root)
    yield begin
    if not is_current(begin, measurement, root):
        raise SystemExit(f"{measurement} was measured while its code changed, and is not kept: repeat the command.")


def is_current(begin: str, measurement: str, root: Path = ROOT) -> bool:
    return begin.partition(":")[2] == stamp(measurement, root).partition(":")[2]


def current(results: list[dict[str, Any]], measurement: str, root: Path = ROOT) -> list[dict[str, Any]]:
    """Those that were made with the files that the measurement depends on as they are now."""
    now = stamp(measurement, root).partition(":")[2]
    return [result for result in results if now and result.get("commit", "").partition(":")[2] == now]


# --- to judge one -----------------------------------------------------------------------------------------------------


@functools.cache
def code(commit: str, measurement: str, root: Path = ROOT) -> str:
    """The hash of the files that a measurement depends on, as a commit has them."""
    nothing = git("hash-object", "-t", "tree", "/dev/null", root=root)
    files = git("diff-tree", "-r", "--no-abbrev", nothing, commit, "--", *files_of(measurement), root=root)
    return hashlib.sha256(files.encode()).hexdigest()[:7]


@functools.cache
def fault(written: str, measurement: str, root: Path = ROOT) -> str:
    """Why a record with this stamp does not count; empty if it does."""
    if not (parts := STAMP.fullmatch(written)):
        return "it names no commit with the hash of its code"
    if not (commit := commit_with(parts[1], parts[2], measurement, root)):
        return f"commit {parts[1]} does not have the code that was measured, and no other commit before HEAD has it"
    share = changed_share(commit, measurement, root)
    return f"{share:.0%} of the lines that it depends on have changed, over {LIMIT:.0%}" if share > LIMIT else ""


def commit_with(commit: str, wanted: str, measurement: str, root: Path) -> str:
    """The commit itself, or another one of HEAD's history that has the same code; empty if there is none."""
    own = [commit] if is_in_history(commit, root) else []
    others = git("log", "--format=%h", "--", *files_of(measurement), root=root).splitlines()
    return next((c for c in (*own, *others) if code(c, measurement, root) == wanted), "")


def is_in_history(commit: str, root: Path = ROOT) -> bool:
    try:
        git("merge-base", "--is-ancestor", commit, "HEAD", root=root)
    except subprocess.CalledProcessError:
        return False
    return True


def changed_share(commit: str, measurement: str, root: Path = ROOT) -> float:
    """Lines added and removed since a commit, over the lines of the files that a measurement depends on."""
    nothing, files = git("hash-object", "-t", "tree", "/dev/null", root=root), files_of(measurement)
    changed, there = (
        sum(int(count) for line in lines.splitlines() for count in line.split("\t")[:2] if count.isdigit())
        for lines in (git("diff", "--numstat", begin, "HEAD", "--", *files, root=root) for begin in (commit, nothing))
    )
    return changed / max(there, 1)


def why_no_history(root: Path = ROOT) -> str:
    """Why ages cannot be told here; empty if they can."""
    try:
        if Path(git("rev-parse", "--show-toplevel", root=root)) != root.resolve():
            return "this is not a clone of the repository"
        shallow = git("rev-parse", "--is-shallow-repository", root=root) == "true"
    except (OSError, subprocess.CalledProcessError) as error:
        return f"git tells no history here: {error}"
    return "this clone is shallow; `git fetch --unshallow` brings the history" if shallow else ""


# --- to read all ------------------------------------------------------------------------------------------------------


def stamps_of(file: Path) -> list[tuple[str, str]]:
    """The measurement and the stamp of all that a record or a page names, each once."""
    text = file.read_text()
    if file.suffix != ".md":
        return list(dict.fromkeys((file.name, written) for written in NAMED.findall(text)))
    pairs, measurement = [], ""
    for line in text.splitlines():
        if line.startswith("#"):
            measurement = ""
        places = [(found.start(), found[1]) for found in MEASUREMENT.finditer(line)]
        if line.startswith("|") and places:  # a row speaks of one
            measurement, places = places[0][1], []
        places += [(found.start(), "") for found in NAMED.finditer(line)]
        for place, name in sorted(places):
            if name:
                measurement = name
            else:
                pairs.append((measurement, NAMED.match(line, place)[1]))  # type: ignore[index]
    return list(dict.fromkeys(pairs))


def all_stamps(root: Path = ROOT) -> dict[str, list[str]]:
    """By measurement."""
    records = [
        file for folder in (BENCH, f"{BENCH}/biases", SYSTEM) for file in sorted((root / folder).glob("*.json*"))
    ]
    stamps: dict[str, list[str]] = {name: [] for name in DEPENDS if name != "any"}
    pairs = [pair for file in [*(root / page for page in PAGES), *records] for pair in stamps_of(file)]
    for measurement, written in dict.fromkeys(pairs):
        stamps.setdefault(measurement, []).append(written)
    return stamps


def listed(root: Path = ROOT) -> dict[str, str]:
    """The measurements that a page says have to be made again, and why."""
    text = (root / BENCH / "README.md").read_text()
    return dict(LISTED.findall(text.partition("## To be measured again")[2].partition("\n## ")[0]))


def faults(stamps: list[str], measurement: str, root: Path = ROOT) -> list[str]:
    problems = [f"{written}: {why}" for written in stamps if (why := fault(written, measurement, root))]
    return problems if stamps else ["there is no record"]


if __name__ == "__main__":
    if sys.argv[1:]:
        print(stamp(sys.argv[1]))
    else:
        for name, written in all_stamps().items():
            print(name, "; ".join(faults(written, name)) or "is good")
