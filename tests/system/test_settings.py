"""Choices of settings.py, looked at but not run."""

import random

import pytest
from click.testing import CliRunner
from killing import CONFIG
from settings import some

from launch.tools.cli import commands

pytestmark = pytest.mark.long


@pytest.mark.parametrize("first", [0, 10, 20, 30])
def test_settings_that_do_not_go_together_are_named_and_those_that_do_are_planned(first: int) -> None:
    for seed in range(first, first + 10):
        settings = some(random.Random(seed))
        result = CliRunner().invoke(commands, ["plan", str(CONFIG), *settings], catch_exceptions=False)
        assert result.exit_code == 0, f"{settings}: {result.output}"
