"""What a command returns or raises becomes an exit code and a sentence."""

import click
import pytest
from command_line import problems

from launch import train
from launch.tools.cli import commands
from launch.tools.cli.exit_codes import exit_code
from rlsys.errors import ConfigError


def raising(error: BaseException):
    def run(*_: object, **__: object) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError(["one [thing]", "another"]), 2, "✗ one [thing]\n✗ another\n"),
        (click.UsageError("no"), 2, "Error: no\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
        (click.Abort(), 130, "Interrupted.\n"),
        (RuntimeError("engine [1] died"), 1, "✗ RuntimeError: engine [1] died\n"),
    ],
    ids=["configuration", "usage", "interrupt", "abort", "failure"],
)
def test_what_happens_becomes_an_exit_code_and_a_sentence(capsys, error, code, message):
    assert exit_code(raising(error)) == code
    assert message in capsys.readouterr().err


def test_a_run_that_is_interrupted_says_how_to_go_on(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("launch.supervise.run_with_restarts", lambda run_driver, *_, **more: run_driver(""))
    monkeypatch.setattr(train, "train", raising(KeyboardInterrupt()))
    assert commands.main(["train", str(small), f"run.dir={tmp_path}/run"], standalone_mode=False) == 130
    assert "Run the same command again to go on from the last checkpoint" in capsys.readouterr().err


def test_an_end_without_an_error_is_exit_code_0():
    assert exit_code(lambda: None) == 0


def test_a_failure_that_is_not_the_users_is_exit_code_1_with_a_sentence(rlsys, finished, tmp_path):
    (tmp_path / "file").write_text("")
    done = rlsys("export", finished, tmp_path / "file" / "below")
    assert done.returncode == 1
    assert "Error: " in problems(done)[0]
    assert "Traceback" not in done.stderr
