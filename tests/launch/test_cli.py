"""The command line as a user meets it, as far as it starts no cluster."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from saved import save

from launch import cli, train
from launch.tools.export import export
from rlsys import __version__
from rlsys.config import loading
from rlsys.config.schema import Config, ConfigError, RunConfig, TrainerConfig
from rlsys.runs.checkpoint import SUMS, format_sums, sha256
from rlsys.runs.directory import RunDirectory

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rlsys(tmp_path):
    """`rlsys("validate", …)` in an empty directory."""
    home = tmp_path / "home"
    home.mkdir()

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "launch", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=home,
            env=os.environ | {"COLUMNS": "400", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
            timeout=60,
        )

    return run


@pytest.fixture
def small(tmp_path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(
        "trainer: {steps: 3, prompts_per_step: 4, samples_per_prompt: 8, updates_per_step: 2}\n"
        "rollout: {max_new_tokens: 16}\n"
    )
    return file


def problems(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.removeprefix("✗ ") for line in done.stderr.splitlines() if line.startswith("✗ ")]


def make_model(folder: Path, weights: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (folder / "model.safetensors").write_text(weights)
    return folder


@pytest.fixture
def finished(tmp_path) -> Path:
    """A run directory with checkpoints of steps 2 and 4, and a half-written one of step 6."""
    run = tmp_path / "run"
    for step in (2, 4):
        make_model(run / "checkpoints" / f"step-{step:06d}" / "model", f"weights {step}")
        folder = run / "checkpoints" / f"step-{step:06d}"
        (folder / "state.json").write_text(json.dumps({"step": step}))
        files = {str(p.relative_to(folder)): sha256(p) for p in folder.rglob("*") if p.is_file()}
        (folder / SUMS).write_text(format_sums(files))
    make_model(run / "checkpoints" / ".step-000006" / "model", "weights 6")
    (run / "config.yaml").write_text(loading.to_yaml(Config()))
    (run / "metrics.jsonl").write_text("")
    return run


# --- help and usage --------------------------------------------------------------------------------------------------------


def test_help_names_the_commands(rlsys):
    done = rlsys("--help")
    assert done.returncode == 0
    for command in ("train", "validate", "eval", "export"):
        assert f"  {command} " in done.stdout


def test_the_version_is_told(rlsys):
    done = rlsys("--version")
    assert done.returncode == 0
    assert __version__ in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tarin"], "No such command"),
        (["train"], "Missing argument 'CONFIG'"),
        (["validate"], "Missing argument 'CONFIG'"),
        (["validate", "--optoins"], "No such option"),
        (["export", "only_one"], "Missing argument 'TARGET'"),
        (["eval"], "Missing argument 'TARGET'"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_sentence(rlsys, arguments, said):
    done = rlsys(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


# --- validate --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny_cpu", "grpo"])
def test_validate_says_that_a_file_is_valid_and_where_it_would_run(rlsys, name):
    config = ROOT / "configs" / f"{name}.yaml"
    done = rlsys("validate", config)
    assert done.returncode == 0, done.stderr
    assert f"✓ {config} is valid. It runs in runs/{name}." in done.stdout


def test_validate_names_the_data_that_is_not_there(rlsys):
    done = rlsys("validate", ROOT / "configs" / "grpo_gsm8k_1.5b_gpu.yaml")
    assert done.returncode == 2
    assert [problem.partition(" does not exist")[0] for problem in problems(done)] == [
        "data.train: data/gsm8k_train.jsonl",
        "eval.datasets: data/gsm8k_test.jsonl",
    ]


def test_validate_prints_the_batch_arithmetic_and_leaves_nothing_behind(rlsys, small, tmp_path):
    done = rlsys("validate", small, "trainer.epochs_per_step=3", "run.dir=elsewhere")
    assert done.returncode == 0, done.stderr
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "samples per step 32 4 prompts x 8 samples_per_prompt" in rows
    assert "updates in all 18 3 steps x 6 updates" in rows
    assert any(row.startswith("policy 2 ") for row in rows)
    assert "It runs in elsewhere." in done.stdout
    assert list((tmp_path / "home").iterdir()) == []


def test_validate_tells_all_problems_at_once_and_nothing_else(rlsys, small):
    done = rlsys("validate", small, "rollout.top_p=0.5", "algorithm.kl=k9", "data.train=gone.jsonl")
    assert done.returncode == 2
    assert len(problems(done)) == 3
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_validate_refuses_sequences_that_are_longer_than_the_models_window(rlsys, small):
    done = rlsys("validate", small, "rollout={max_prompt_tokens: 40, max_new_tokens: 30}")
    assert done.returncode == 2
    [problem] = problems(done)
    assert "= 70, but the model's window is 64 tokens. Reduce one of them by 6." in problem


def test_a_misspelt_option_is_exit_code_2_with_a_suggestion(rlsys, small):
    done = rlsys("validate", small, "trainer.stpes=3")
    assert done.returncode == 2
    assert problems(done) == ["command line: unknown option `trainer.stpes`. Did you mean `trainer.steps`?"]


def test_a_missing_configuration_is_exit_code_2(rlsys):
    done = rlsys("validate", "no_such.yaml")
    assert done.returncode == 2
    assert problems(done) == ["no_such.yaml: no such file."]


def test_problems_are_not_broken_into_lines(rlsys, small):
    long_name = "x" * 240
    done = rlsys("validate", small, f"data.train={long_name}.jsonl")
    assert any(f"data.train: {long_name}.jsonl does not exist" in line for line in problems(done))


def test_a_users_brackets_and_colons_are_shown_as_they_are(rlsys, small, tmp_path):
    (tmp_path / "home" / "d[").mkdir()
    (tmp_path / "home" / "d[" / "x].jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')
    done = rlsys("validate", small, "data.train=d[/x].jsonl", "run.dir=runs/[a]:x:")
    assert done.returncode == 0, done.stderr
    assert " d[/x].jsonl " in done.stdout
    assert "It runs in runs/[a]:x:." in done.stdout


def test_all_options_are_listed_with_default_and_meaning(rlsys):
    done = rlsys("validate", "--options")
    assert done.returncode == 0
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    for key, default in loading.flatten(Config()).items():
        assert key in rows, key
        assert rows[key][1] == repr(default).split()[0]
        assert len(rows[key]) > 2, f"{key} has no meaning"


# --- train, as far as it starts nothing ------------------------------------------------------------------------------------


def test_training_with_a_bad_configuration_makes_no_run_directory(rlsys, small, tmp_path):
    done = rlsys("train", small, "trainer.steps=0")
    assert done.returncode == 2
    assert problems(done) == ["trainer.steps is 0; it must be a number greater than 0."]
    assert list((tmp_path / "home").iterdir()) == []


def test_training_into_something_else_is_refused(rlsys, small, tmp_path):
    (tmp_path / "home" / "thesis").mkdir()
    (tmp_path / "home" / "thesis" / "chapter.tex").write_text("precious")
    done = rlsys("train", small, "run.dir=thesis")
    assert done.returncode == 2
    assert "not a run" in problems(done)[0]
    assert [p.name for p in (tmp_path / "home" / "thesis").iterdir()] == ["chapter.tex"]


def test_going_on_with_other_settings_is_refused_with_their_names(rlsys, small, finished):
    done = rlsys("train", small, f"run.dir={finished}")
    assert done.returncode == 2
    assert "trainer.samples_per_prompt: 16 → 8" in problems(done)[0]


def test_a_stopped_run_names_the_command_that_goes_on_as_it_was_typed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "_train", lambda *_: 1)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    train.train(
        Config(run=RunConfig(dir=str(tmp_path / "run"))),
        cli.plain_console(),
        command="rlsys train my.yaml tracking.to=[wandb] eval.datasets=[/shared/x.jsonl]",
    )
    assert (
        "Resume with: rlsys train my.yaml tracking.to=[wandb] eval.datasets=[/shared/x.jsonl]\n"
        in capsys.readouterr().out
    )


def test_a_run_that_was_killed_after_its_last_step_is_tidied_up_when_it_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    monkeypatch.setattr(train.Checkpoints, "load_newest", lambda *_: SimpleNamespace(step=4, state={"owed": 0}))
    monkeypatch.setattr("launch.local_ray.short_temp_dir", lambda: str(tmp_path))
    monkeypatch.setattr("workers.supervision.process_registry.SHARED_MEMORY_PREFIXES", (f"{tmp_path}/psm_",))
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "psm_x").touch()
    place = {"node": "n", "pid": 1, "began": 0.5, "shared": [f"{tmp_path}/psm_x"]}
    (tmp_path / "run" / "logs" / "rollout-0.pid").write_text(json.dumps(place))
    train.train(Config(run=RunConfig(dir=str(tmp_path / "run")), trainer=TrainerConfig(steps=4)), cli.plain_console())
    assert not (tmp_path / "psm_x").exists()


def test_a_summary_spells_out_what_a_terminal_would_obey(tmp_path, capsys):
    config = Config(run=RunConfig(dir=str(tmp_path / "run")))
    run = RunDirectory(config)
    for step in (0, 3):
        evil = {"s:1": [f"\x1b[2J {step}"]}
        save(run.path / "samples" / f"eval-{step:06d}.parquet", {"s:1": [1.0]}, evil, {"s:1": "1\x07?"})
        run.record_metrics({"step": step, "eval/s/accuracy": 1.0})
    train.print_summary(config, run, cli.plain_console())
    run.close()
    said = capsys.readouterr().out
    assert not {"\x1b", "\x07"} & set(said)
    assert re.search(r"1\\x07\? +\\x1b\[2J 0 +1 +\\x1b\[2J 3 +1", said)


# --- eval, as far as it starts nothing -------------------------------------------------------------------------------------


def test_evaluating_what_is_not_there_is_refused(rlsys):
    done = rlsys("eval", "no_such_run")
    assert done.returncode == 2
    assert "no_such_run is not a directory" in problems(done)[0]


def test_evaluating_a_model_of_no_run_asks_for_a_configuration(rlsys, tmp_path):
    done = rlsys("eval", make_model(tmp_path / "model", "w"))
    assert done.returncode == 2
    assert "--config" in problems(done)[0]


def test_evaluating_on_nothing_is_refused(rlsys, finished):
    done = rlsys("eval", finished)
    assert done.returncode == 2
    assert "--data FILE" in problems(done)[0]


# --- export ----------------------------------------------------------------------------------------------------------------


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
    there, link = tmp_path / "disk" / "there", tmp_path / "link"
    there.mkdir(parents=True)
    (there / "old").write_text("old")
    link.symlink_to(there)
    done = rlsys("export", "--force", finished, link)
    assert done.returncode == 0, done.stderr
    assert link.is_symlink()
    assert sorted(p.name for p in there.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in there.parent.iterdir()] == ["there"]


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


def test_a_failure_that_is_not_the_users_is_exit_code_1_with_a_sentence(rlsys, finished, tmp_path):
    (tmp_path / "file").write_text("")
    done = rlsys("export", finished, tmp_path / "file" / "below")
    assert done.returncode == 1
    assert "Error: " in problems(done)[0]
    assert "Traceback" not in done.stderr


# --- exit codes ------------------------------------------------------------------------------------------------------------


def raising(error: BaseException):
    def run(*_: object, **__: object) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError(["one [thing]", "another"]), 2, "✗ one [thing]\n✗ another\n"),
        (click.UsageError("no"), 2, "Error: no\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
        (click.Abort(), 130, "Interrupted.\n"),
        (RuntimeError("engine [1] died"), 1, "✗ RuntimeError: engine [1] died\n"),
    ],
    ids=["configuration", "usage", "interrupt", "abort", "failure"],
)
def test_what_happens_becomes_an_exit_code_and_a_sentence(capsys, monkeypatch, error, code, said):
    monkeypatch.setattr(cli, "errors", cli.plain_console(stderr=True))
    assert cli._guarded(raising(error)) == code
    assert said in capsys.readouterr().err


def test_a_run_that_is_interrupted_says_how_to_go_on(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "errors", cli.plain_console(stderr=True))
    monkeypatch.setattr("launch.supervise.run_with_restarts", lambda drive, *_: drive(""))
    monkeypatch.setattr(train, "train", raising(KeyboardInterrupt()))
    assert cli.commands.main(["train", str(small), f"run.dir={tmp_path}/run"], standalone_mode=False) == 130
    assert "Run the same command again to go on from the last checkpoint" in capsys.readouterr().err


def test_an_end_without_an_error_is_exit_code_0():
    assert cli._guarded(lambda: None) == 0
