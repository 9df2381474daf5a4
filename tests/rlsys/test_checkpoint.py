import json

import pytest

from rlsys import checkpoint


def fill(folder: str) -> None:
    from pathlib import Path

    (Path(folder) / "model").mkdir()
    (Path(folder) / "model" / "weights").write_text("w")


def names(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_what_is_saved_is_found_with_its_state(tmp_path):
    path = checkpoint.save(tmp_path, 40, {"step": 40}, fill, keep_last=2)
    assert path == tmp_path / "step-000040"
    assert (path / "model" / "weights").read_text() == "w"
    assert checkpoint.found(tmp_path) == [(40, path)]
    assert json.loads((path / "state.json").read_text()) == {"step": 40}


def test_only_the_last_are_kept(tmp_path):
    for step in (5, 10, 15, 20):
        checkpoint.save(tmp_path, step, {}, fill, keep_last=2)
    assert names(tmp_path) == ["step-000015", "step-000020"]


def test_zero_keeps_all(tmp_path):
    for step in (5, 10, 15):
        checkpoint.save(tmp_path, step, {}, fill, keep_last=0)
    assert [step for step, _ in checkpoint.found(tmp_path)] == [5, 10, 15]


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (999_999, 1_000_000, 7):
        checkpoint.save(tmp_path, step, {}, fill, keep_last=0)
    assert [step for step, _ in checkpoint.found(tmp_path)] == [7, 999_999, 1_000_000]


def test_a_save_that_fails_leaves_the_old_ones_and_nothing_found(tmp_path):
    checkpoint.save(tmp_path, 5, {"step": 5}, fill, keep_last=1)

    def broken(folder: str) -> None:
        fill(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path, 10, {"step": 10}, broken, keep_last=1)
    assert [step for step, _ in checkpoint.found(tmp_path)] == [5]
    checkpoint.save(tmp_path, 10, {"step": 10}, fill, keep_last=1)
    assert names(tmp_path) == ["step-000010"]


def test_a_save_that_was_killed_before_the_rename_is_no_checkpoint(tmp_path):
    class Killed(BaseException):
        pass

    def kill(folder: str) -> None:
        fill(folder)
        raise Killed

    with pytest.raises(Killed):
        checkpoint.save(tmp_path, 5, {"step": 5}, kill, keep_last=1)
    assert checkpoint.found(tmp_path) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoint.save(tmp_path, 5, {"try": 1}, fill, keep_last=1)
    path = checkpoint.save(tmp_path, 5, {"try": 2}, fill, keep_last=1)
    assert json.loads((path / "state.json").read_text()) == {"try": 2}
    assert names(tmp_path) == ["step-000005"]


def test_what_is_not_a_whole_checkpoint_is_not_found(tmp_path):
    (tmp_path / "step-000007").mkdir()  # no state
    (tmp_path / "step-9").mkdir()
    (tmp_path / ".step-000008").mkdir()
    (tmp_path / ".step-000008" / "state.json").write_text(json.dumps({}))
    (tmp_path / "notes.txt").write_text("")
    assert checkpoint.found(tmp_path) == []
    assert checkpoint.found(tmp_path / "nowhere") == []
