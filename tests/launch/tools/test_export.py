"""`rlsys export`: the model of a run or a checkpoint as a directory of its own."""

import errno
from pathlib import Path

import pytest
from command_line import problems

from launch.tools.export import export


@pytest.mark.parametrize(
    ("source", "weights"),
    [
        (".", "weights 4"),
        ("checkpoints/step-000002", "weights 2"),
        ("checkpoints/step-000002/model", "weights 2"),
    ],
    ids=["run", "checkpoint", "model"],
)
def test_export_copies_the_model_of_a_run_a_checkpoint_or_a_directory(rlsys, finished, tmp_path, source, weights):
    target = tmp_path / "new" / "model"
    done = rlsys("export", finished / source, target)
    assert done.returncode == 0, done.stderr
    assert str(target) in done.stdout
    assert sorted(p.name for p in target.iterdir()) == ["config.json", "model.safetensors"]
    assert (target / "model.safetensors").read_text() == weights
    assert [p.name for p in target.parent.iterdir()] == ["model"]


def test_export_takes_an_empty_directory(rlsys, finished, tmp_path):
    (tmp_path / "empty").mkdir()
    assert rlsys("export", finished, tmp_path / "empty").returncode == 0
    assert (tmp_path / "empty" / "model.safetensors").read_text() == "weights 4"


def test_export_replaces_only_when_told_to(rlsys, finished, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("old")
    done = rlsys("export", finished, target)
    assert done.returncode == 2
    assert "--force" in problems(done)[0]
    assert [p.name for p in target.iterdir()] == ["old"]
    assert rlsys("export", "--force", finished, target).returncode == 0
    assert sorted(p.name for p in target.iterdir()) == ["config.json", "model.safetensors"]


def test_export_replaces_what_a_link_leads_to(rlsys, finished, tmp_path):
    target, link = tmp_path / "disk" / "there", tmp_path / "link"
    target.mkdir(parents=True)
    (target / "old").write_text("old")
    link.symlink_to(target)
    done = rlsys("export", "--force", finished, link)
    assert done.returncode == 0, done.stderr
    assert link.is_symlink()
    assert sorted(p.name for p in target.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in target.parent.iterdir()] == ["there"]


def test_export_leaves_nothing_half_done_behind(finished, tmp_path, monkeypatch):
    def full(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "model.safetensors").write_text("wei")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copytree", full)
    (tmp_path / "new").mkdir()
    with pytest.raises(OSError, match="No space left"):
        export(finished, tmp_path / "new" / "model", force=False)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("target", [".", "checkpoints", "checkpoints/step-000004/model"])
def test_export_never_replaces_what_it_reads(rlsys, finished, target):
    done = rlsys("export", "--force", finished, finished / target)
    assert done.returncode == 2
    assert "lie one within the other" in problems(done)[0]
    assert (finished / "checkpoints" / "step-000004" / "model" / "model.safetensors").read_text() == "weights 4"


def test_export_of_what_holds_no_model_is_refused(rlsys, finished, tmp_path):
    (tmp_path / "nothing").mkdir()
    done = rlsys("export", tmp_path / "nothing", tmp_path / "target")
    assert done.returncode == 2
    assert "holds no model" in problems(done)[0]
    done = rlsys("export", finished / "config.yaml", tmp_path / "target")
    assert done.returncode == 2
    assert "is not a directory" in problems(done)[0]
    assert not (tmp_path / "target").exists()
