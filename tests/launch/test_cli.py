"""The command line as a user meets it, as far as it starts no cluster."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import make_model, problems
from fakes import make_config
from machines import Machines
from saved import save

from launch import train
from launch.printing import plain_console
from launch.tools.advice import ADVISERS
from launch.tools.cli import MAIN_COMMANDS, commands
from rlsys import __version__
from rlsys.config import loading
from rlsys.config.schema import Config, RunConfig, TrainerConfig
from rlsys.runs import checkpoint
from rlsys.runs.directory import RunDirectory
from rlsys.runs.state import RunState

ROOT = Path(__file__).parents[2]


# --- help and usage --------------------------------------------------------------------------------------------------------


def test_help_lists_the_main_commands_first_and_every_command_once(rlsys):
    done = rlsys("--help")
    assert done.returncode == 0
    first, more = done.stdout.partition("\nCommands:\n")[2].split("\nMore:\n")
    assert [line.split()[0] for line in first.splitlines() if line] == list(MAIN_COMMANDS)
    assert sorted([*MAIN_COMMANDS, *(line.split()[0] for line in more.splitlines())]) == sorted(commands.commands)


def test_the_version_is_printed(rlsys):
    done = rlsys("--version")
    assert done.returncode == 0
    assert __version__ in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tarin"], "No such command"),
        (["train"], "Missing argument 'CONFIG'"),
        (["validate"], "Missing argument 'CONFIG'"),
        (["validate", "--optoins"], "No such option"),
        (["export", "only_one"], "Missing argument 'TARGET'"),
        (["eval"], "Missing argument 'TARGET'"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_sentence(rlsys, arguments, message):
    done = rlsys(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


# --- validate --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny_cpu", "grpo"])
def test_validate_prints_the_run_directory_of_a_valid_file(rlsys, name):
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


def test_validate_prints_all_problems_at_once(rlsys, small):
    done = rlsys("validate", small, "rollout.gpu_memory=2", "algorithm.kl=k9", "data.train=gone.jsonl")
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
    lines = done.stdout.splitlines()
    assert all(line == line.rstrip() and len(line.split()) > 1 for line in lines), "one line per option"
    rows = {line.split()[0]: line.split() for line in lines}
    for key, default in loading.flatten(Config()).items():
        assert key in rows, key
        assert rows[key][1] == ("auto" if key.endswith(".threads") else repr(default).split()[0])
        assert len(rows[key]) > 2, f"{key} has no meaning"
    assert " ".join(rows["rollout.max_sequences"][1:]).endswith("; on GPUs 1024 by default")


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


def test_resuming_with_other_settings_is_refused_with_their_names(rlsys, small, finished):
    done = rlsys("train", small, f"run.dir={finished}")
    assert done.returncode == 2
    assert "trainer.samples_per_prompt: 16 → 8" in problems(done)[0]


def test_a_stopped_run_names_the_command_that_resumes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "run_training", lambda *_: 1)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    train.train(
        Config(run=RunConfig(dir=str(tmp_path / "run"))),
        plain_console(),
        ADVISERS,
        command="rlsys train my.yaml tracking.to=[wandb] eval.datasets=[/shared/x.jsonl]",
    )
    assert (
        "Resume with: rlsys train my.yaml tracking.to=[wandb] eval.datasets=[/shared/x.jsonl]\n"
        in capsys.readouterr().out
    )


def test_a_resumed_run_hashes_its_checkpoint_once(tmp_path, monkeypatch):
    """That takes minutes where a checkpoint has 100 GB."""
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    Machines(tmp_path, "trainer.steps=2", "checkpoint.every=2").run()
    hashed = []
    find_damage = checkpoint.find_damage
    monkeypatch.setattr(checkpoint, "find_damage", lambda path: hashed.append(path.name) or find_damage(path))

    def run_training(config, run, progress, stop, newest, advisers):
        run.close()
        machines = Machines(tmp_path, "trainer.steps=3", newest=newest).run()
        assert (len(machines.policy.updates), machines.events.count("load")) == (2, 1)
        return 3

    monkeypatch.setattr(train, "run_training", run_training)
    train.train(make_config(tmp_path, "trainer.steps=3"), plain_console(), ADVISERS)
    assert hashed == ["step-000002"]


def test_leftovers_of_a_run_killed_after_its_last_step_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    monkeypatch.setattr(train.Checkpoints, "load_newest", lambda *_: SimpleNamespace(state=RunState(step=4)))
    monkeypatch.setattr("launch.ray_session.leftovers.short_temp_dir", lambda: str(tmp_path))
    monkeypatch.setattr("workers.fleet.process_registry.SHARED_MEMORY_PREFIXES", (f"{tmp_path}/psm_",))
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "psm_x").touch()
    place = {"node": "n", "pid": 1, "created": 0.5, "shared_memory": [f"{tmp_path}/psm_x"]}
    (tmp_path / "run" / "logs" / "rollout-0.pid").write_text(json.dumps(place))
    train.train(
        Config(run=RunConfig(dir=str(tmp_path / "run")), trainer=TrainerConfig(steps=4)), plain_console(), ADVISERS
    )
    assert not (tmp_path / "psm_x").exists()


def test_a_summary_escapes_control_characters(tmp_path, capsys):
    config = Config(run=RunConfig(dir=str(tmp_path / "run")))
    run = RunDirectory(config)
    for step in (0, 3):
        evil = {"s:1": [f"\x1b[2J {step}"]}
        save(run.path / "samples" / f"eval-{step:06d}.parquet", {"s:1": [1.0]}, evil, {"s:1": "1\x07?"})
        run.record_metrics({"step": step, "eval/s/accuracy": 1.0})
    train.print_summary(run, plain_console())
    run.close()
    output = capsys.readouterr().out
    assert not {"\x1b", "\x07"} & set(output)
    assert re.search(r"1\\x07\? +\\x1b\[2J 0 +1 +\\x1b\[2J 3 +1", output)


def test_a_summary_names_the_commands_that_show_and_export_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(Config(run=RunConfig(dir="r")))
    train.print_summary(run, plain_console())
    run.close()
    output = " ".join(capsys.readouterr().out.split())
    assert f"rlsys report {run.path} --open" in output
    assert f"rlsys export {run.path} MODEL_DIRECTORY" in output


# --- eval, as far as it starts nothing -------------------------------------------------------------------------------------


def test_evaluating_a_missing_run_is_refused(rlsys):
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
