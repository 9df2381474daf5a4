"""A disk that takes no more: one sentence, nothing damaged, and the same command goes on once there is room.

The disk is a small one of its own, in a mount namespace. Trainer and run directory are real, the machines fake.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]  # where fakes are
SMALL_DISK = ["unshare", "--user", "--map-root-user", "--mount"]
NOBODY = ["unshare", "--user"]  # whose files are its own, but who is no root to them
BEGIN = """
import json, os, subprocess, sys
from pathlib import Path
from fakes import make_config
from rlsys.errors import ConfigError
from rlsys.errors import describe_disk_error
from rlsys.runs.directory import RunDirectory, read_lines

folder = Path(sys.argv[1])
OPTIONS = ["trainer.steps=6", "checkpoint.keep_last=2"]

def mount(*words):
    subprocess.run(["mount", *words], check=True)

def outcome(run):
    lines = [{k: v for k, v in line.items() if not k.startswith(("time/", "tokens_per"))} for line in read_lines(run / "metrics.jsonl")]
    weights = [json.loads(p.read_text()) for p in sorted(run.glob("checkpoints/step-*/weight.json"))]
    return lines, weights, sorted(p.name for p in run.glob("samples/step-*"))
"""
FULL = """
from machines import Machines

def tried(place, room):
    "The sentence, after the disk had so many pages left; and what the run comes to when there is room again."
    place.mkdir()
    mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place))
    said = ""
    try:
        machines = Machines(place, *OPTIONS)
        space = os.statvfs(place)
        (place / "ballast").write_bytes(bytes((space.f_bfree - room) * space.f_bsize))
        try:
            machines.run()
        except OSError as error:
            said = describe_disk_error(error) or f"no word for {error!r}"
        (place / "ballast").unlink()
        Machines(place, *OPTIONS).run()
        return said, outcome(place / "run")
    finally:
        subprocess.run(["umount", "--lazy", str(place)])

calm = tried(folder / "calm", 2000)
assert calm[0] == "", calm[0]
found = {room: tried(folder / str(room), room) for room in map(int, sys.argv[2:])}
print(json.dumps({room: [said, result == calm[1]] for room, (said, result) in found.items()}))
"""
READ_ONLY = """
mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder))
config = make_config(Path(sys.argv[2]), f"run.dir={folder}/run", *OPTIONS)
RunDirectory(config).close()
before = {p: p.read_bytes() for p in (folder / "run").rglob("*") if p.is_file()}
mount("-o", "remount,ro", str(folder))
try:
    RunDirectory(config)
except ConfigError as error:
    print(json.dumps([str(error), before == {p: p.read_bytes() for p in before}]))
"""
NOT_OURS = """
config = make_config(Path(sys.argv[2]), f"run.dir={folder}/run", *OPTIONS)
try:
    RunDirectory(config)
except ConfigError as error:
    print(json.dumps(str(error)))
"""


def allowed(words: list[str]) -> bool:
    return subprocess.run([*words, "true"], capture_output=True).returncode == 0


def run(within: list[str], script: str, *words: object) -> object:
    command = [*within, sys.executable, "-c", BEGIN + script, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=HERE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


needs_a_disk = pytest.mark.skipif(not allowed(SMALL_DISK), reason="this host lets nobody mount")


@needs_a_disk
def test_a_full_disk_stops_a_run_that_later_ends_with_the_same_result(tmp_path):
    outcomes = run(SMALL_DISK, FULL, tmp_path, 0, 3, 8, 15, 25)
    errors = [sentence for sentence, _ in outcomes.values()]
    assert len(set(filter(None, errors))) > 1, "it stopped at several places"
    for sentence, same in outcomes.values():
        assert same
        assert not sentence or (
            "No space left on device. What was saved before is whole: make room" in sentence and "\n" not in sentence
        )


@needs_a_disk
def test_a_read_only_run_directory_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "disk").mkdir()
    sentence, same = run(SMALL_DISK, READ_ONLY, tmp_path / "disk", tmp_path)
    assert sentence == f"run.dir: cannot write to {tmp_path}/disk/run: Read-only file system."
    assert same


@pytest.mark.skipif(not allowed(NOBODY), reason="this host has no user namespaces")
def test_a_run_directory_that_is_not_ours_to_write_is_refused(tmp_path):
    run_directory = tmp_path / "run"
    for name in ("samples", "checkpoints", "logs"):
        (run_directory / name).mkdir(parents=True)
    for name in (".lock", "config.yaml"):
        (run_directory / name).touch()
    run_directory.chmod(0o555)
    assert run(NOBODY, NOT_OURS, tmp_path, tmp_path) == f"run.dir: cannot write to {run_directory}: Permission denied."
