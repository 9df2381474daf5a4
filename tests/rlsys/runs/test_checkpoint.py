"""Checkpoints: complete, damaged, replaced, removed."""

import contextlib
import errno
import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fakes import make_batch

from rlsys.errors import ConfigError
from rlsys.runs.best_step import BestStep
from rlsys.runs.checkpoint import SUMS, Checkpoints, find_damage, list_checkpoints, require_undamaged, sha256
from rlsys.runs.state import RunState


def save(folder: Path, step: int, *, keep_last: int = 2, best: int = -1, pending=(), text: str = "w") -> Path:
    checkpoints = Checkpoints(folder, keep_last)
    unfinished = Path(checkpoints.begin(RunState(step=step, position=7, best=BestStep(step=best)), list(pending)))
    (unfinished / "model").mkdir()
    (unfinished / "model" / "weights").write_text(text)
    return checkpoints.complete({"model/weights": sha256(unfinished / "model" / "weights")})


def names(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def newest(folder: Path):
    notes: list[str] = []
    return Checkpoints(folder, 2).load_newest(notes.append), notes


def test_what_is_saved_is_found_with_its_state(tmp_path):
    path = save(tmp_path, 40)
    assert path == tmp_path / "step-000040"
    assert (path / "model" / "weights").read_text() == "w"
    checkpoint, notes = newest(tmp_path)
    assert (checkpoint.state.step, checkpoint.path, checkpoint.state.position, checkpoint.pending, notes) == (
        40,
        path,
        7,
        [],
        [],
    )


def test_sha256sum_agrees_that_it_is_whole(tmp_path):
    path = save(tmp_path, 40, pending=[make_batch([1, 0], [0, 0])])
    result = subprocess.run(["sha256sum", "-c", SUMS], cwd=path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {line.partition(":")[0] for line in result.stdout.splitlines()} == {
        "model/weights",
        "state.json",
        "pending/000.json",
        "pending/000.safetensors",
    }


def test_only_the_last_are_kept(tmp_path):
    for step in (5, 10, 15, 20):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-000015", "step-000020"]


def test_the_best_is_kept_beside_the_last(tmp_path):
    for step in (5, 10, 15, 20):
        save(tmp_path, step, keep_last=1, best=10 if step >= 10 else 5)
    assert names(tmp_path) == ["step-000010", "step-000020"]


def test_zero_keeps_all(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step, keep_last=0)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [5, 10, 15]


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (999_999, 1_000_000, 7):
        save(tmp_path, step, keep_last=0)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [7, 999_999, 1_000_000]


def test_one_that_was_begun_and_not_completed_is_no_checkpoint(tmp_path):
    save(tmp_path, 5, keep_last=1)
    Checkpoints(tmp_path, 1).begin(RunState(step=10), [])
    assert [step for step, _ in list_checkpoints(tmp_path)] == [5]
    save(tmp_path, 10, keep_last=1)
    assert names(tmp_path) == ["step-000010"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 5, keep_last=1)
    path = save(tmp_path, 5, keep_last=1, text="again")
    assert (path / "model" / "weights").read_text() == "again"
    assert names(tmp_path) == ["step-000005"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", range(13))
def test_killed_while_a_step_is_replaced_one_of_both_is_there_whole(tmp_path, monkeypatch, moment):
    """Whatever was done to names and folders until then is done, and nothing after it."""
    save(tmp_path, 10, text="old")
    left = iter(range(moment))

    def or_killed(do):
        def done(*arguments, **more):
            if next(left, None) is None:
                raise Killed
            return do(*arguments, **more)

        return done

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", or_killed(Path.rename))
        patched.setattr(shutil, "rmtree", or_killed(shutil.rmtree))
        with contextlib.suppress(Killed):
            for text in ("new", "newer"):
                save(tmp_path, 10, text=text)
    assert next(left, None) is None, "it was killed"
    checkpoint, notes = newest(tmp_path)
    assert (checkpoint.state.step, notes) == (10, [])
    assert (checkpoint.path / "model" / "weights").read_text() in ("old", "new", "newer")
    assert names(tmp_path) == ["step-000010"]


def test_a_flipped_bit_in_any_file_is_found_and_an_older_one_is_used(tmp_path):
    good = save(tmp_path, 5)
    path = save(tmp_path, 10, pending=[make_batch([1, 0], [0, 0])])
    files = [p for p in path.rglob("*") if p.is_file()]
    assert len(files) == 5
    for file in files:
        data = file.read_bytes()
        for position in range(0, len(data), max(1, len(data) // 40)):
            for bit in range(8):
                file.write_bytes(data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
                assert find_damage(path), f"{file} byte {position} bit {bit}"
        file.write_bytes(data[:-1])
        assert find_damage(path), f"{file} one byte shorter"
        file.unlink()
        assert file.name in find_damage(path)
        file.write_bytes(data)
        assert not find_damage(path)
    (path / "model" / "weights").write_text("x")
    checkpoint, [note] = newest(tmp_path)
    assert checkpoint.path == good
    assert f"{path}/model/weights (1 bytes) has SHA-256" in note
    assert names(tmp_path) == ["damaged-step-000010", "step-000005"]


def test_a_damaged_checkpoint_is_refused_where_no_other_will_do(tmp_path):
    path = save(tmp_path, 5)
    require_undamaged(path)
    (path / "model" / "weights").write_text("x")
    with pytest.raises(ConfigError, match="model/weights"):
        require_undamaged(path)


def rewrite_state(path: Path, text: str) -> None:
    """Another state.json, with its own hash in SHA256SUMS."""
    (path / "state.json").write_text(text)
    lines = (path / SUMS).read_text().splitlines()
    sums = {line[66:]: line[:64] for line in lines} | {"state.json": sha256(path / "state.json")}
    (path / SUMS).write_text("".join(f"{v}  {k}\n" for k, v in sorted(sums.items())))
    assert not find_damage(path)


@pytest.mark.parametrize("change", ["{", "[]", "a field", "a format"])
def test_what_another_version_made_is_neither_damaged_nor_passed_over(tmp_path, change):
    save(tmp_path, 5)
    path = save(tmp_path, 10)
    state = json.loads((path / "state.json").read_text())
    changed = {"a field": state | {"newer": 1}, "a format": state | {"format": 2}}
    rewrite_state(path, json.dumps(changed[change]) if change in changed else change)
    with pytest.raises(ConfigError, match="step-000010 is intact, but another version of rlsys made it"):
        newest(tmp_path)
    assert names(tmp_path) == ["step-000005", "step-000010"], "all is left as it was"


def test_a_checkpoint_of_before_formats_had_numbers_is_read(tmp_path):
    path = save(tmp_path, 10)
    state = json.loads((path / "state.json").read_text())
    del state["format"]
    rewrite_state(path, json.dumps(state))
    assert newest(tmp_path)[0].state.step == 10


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path):
    for step in (5, 10):
        (save(tmp_path, step) / "model" / "weights").write_text("x")
    for _ in range(2):  # the next start says the same
        with pytest.raises(
            ConfigError, match=r"no checkpoint in .* is intact: .*step-000010/model.*step-000005/model"
        ) as e:
            newest(tmp_path)
        assert "choose another run.dir" in str(e.value)
    assert names(tmp_path) == ["step-000005", "step-000010"]


class Disk:
    """Reads of one file fail so many times."""

    def __init__(self, monkeypatch, name: str, failures: float, code: int = errno.ESTALE):
        self.failures, real = failures, Path.open
        monkeypatch.setattr("rlsys.runs.disk.RETRIES_S", (0.0, 0.0, 0.0))

        def opened(path, mode="r", *arguments, **more):
            if path.name == name and "w" not in mode and self.failures > 0:
                self.failures -= 1
                raise OSError(code, os.strerror(code), str(path))
            return real(path, mode, *arguments, **more)

        monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("name", [SUMS, "state.json", "weights", "000.json"])
def test_a_read_that_fails_once_or_thrice_costs_nothing(tmp_path, monkeypatch, name, code):
    path = save(tmp_path, 10, pending=[make_batch([1, 0], [0, 0])])
    for failures in (1, 3):
        disk = Disk(monkeypatch, name, failures, code)
        checkpoint, notes = newest(tmp_path)
        assert (checkpoint.path, len(checkpoint.pending), notes, disk.failures) == (path, 1, [], 0)


@pytest.mark.parametrize("name", [SUMS, "state.json", "weights"])
def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch, name):
    save(tmp_path, 5)
    path = save(tmp_path, 10)
    disk = Disk(monkeypatch, name, math.inf)
    with pytest.raises(ConfigError, match=f"{name} cannot be read: Stale file handle.*rename step-000010"):
        newest(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        require_undamaged(path)
    assert names(tmp_path) == ["step-000005", "step-000010"]
    disk.failures = 0
    assert newest(tmp_path)[0].path == path


def test_an_old_checkpoint_that_cannot_be_removed_is_removed_later(tmp_path, monkeypatch):
    """On NFS, a file that somebody reads leaves a `.nfs…` file in its folder."""
    busy, real = {"step-000005"}, os.rmdir

    def rmdir(path, **more):
        if any(name in str(path) for name in busy):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        real(path, **more)

    save(tmp_path, 5, keep_last=1)
    monkeypatch.setattr(os, "rmdir", rmdir)
    save(tmp_path, 10, keep_last=1)
    assert names(tmp_path) == [".gone-step-000005", "step-000010"]
    assert newest(tmp_path)[0].state.step == 10
    busy.clear()
    save(tmp_path, 15, keep_last=1)
    assert names(tmp_path) == ["step-000015"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_used_all_the_same(tmp_path, monkeypatch, code):
    real = os.fsync

    def fsync(descriptor):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert newest(save(tmp_path, 5).parent)[0].state.step == 5


def test_a_process_that_outlives_its_run_cannot_write_into_the_next_checkpoint(tmp_path):
    """It has the name of its folder, and may open files there at any time."""
    first = Path(Checkpoints(tmp_path, 1).begin(RunState(step=40), []))
    assert newest(tmp_path) == (None, [])
    second = Checkpoints(tmp_path, 1)
    unfinished = Path(second.begin(RunState(step=40), []))
    assert unfinished != first
    for moment in ("before", "after"):
        (first / "model").mkdir(parents=True, exist_ok=True)
        (first / "model" / "weights").write_text(f"old, {moment}")
        if moment == "before":
            (unfinished / "model").mkdir()
            (unfinished / "model" / "weights").write_text("new")
            path = second.complete({"model/weights": sha256(unfinished / "model" / "weights")})
    assert not find_damage(path)
    assert newest(tmp_path)[0].path == path
    assert names(tmp_path) == ["step-000040"]


def test_one_whose_sums_are_gone_is_named_too(tmp_path):
    good = save(tmp_path, 5)
    (save(tmp_path, 10) / SUMS).unlink()
    checkpoint, [note] = newest(tmp_path)
    assert checkpoint.path == good
    assert "step-000010/SHA256SUMS is missing" in note


def test_what_a_killed_run_left_half_written_or_half_removed_goes(tmp_path):
    good = save(tmp_path, 5)
    Checkpoints(tmp_path, 1).begin(RunState(step=10), [])
    (tmp_path / ".gone-step-000003").mkdir()
    checkpoint, notes = newest(tmp_path)
    assert (checkpoint.path, notes) == (good, [])
    assert names(tmp_path) == ["step-000005"]


def test_what_is_no_checkpoint_is_not_found(tmp_path):
    (tmp_path / "step-9").mkdir()
    (tmp_path / ".step-000008").mkdir()
    (tmp_path / ".step-000008" / "state.json").write_text(json.dumps({}))
    (tmp_path / "notes.txt").write_text("")
    assert list_checkpoints(tmp_path) == []
    assert list_checkpoints(tmp_path / "nowhere") == []
    assert newest(tmp_path) == (None, [])
