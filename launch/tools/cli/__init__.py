"""`rlsys`: the command line.

Exit codes: 0 done, or stopped by SIGTERM and saved; 1 failed; 2 wrong configuration or usage; 130 interrupted.
"""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

import click

from launch.supervise import EXIT_LOST
from launch.tools.cli import preparation, results, runs
from launch.tools.cli.exit_codes import exit_code
from launch.tools.convert.command import convert
from launch.tools.jobs.command import job, submit
from rlsys import __version__

MAIN_COMMANDS = ("init", "validate", "plan", "doctor", "train", "submit", "eval", "report")


class CommandList(click.Group):
    """Lists the commands that most people need first, and the others under "More"."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        others = [name for name in sorted(self.commands) if name not in MAIN_COMMANDS]
        width = formatter.width - 6 - max(map(len, self.commands))
        for heading, names in (("Commands", MAIN_COMMANDS), ("More", others)):
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])


@click.group(cls=CommandList, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="rlsys")
def commands() -> None:
    """Trains language models with group-relative policy optimization on Ray, vLLM and DeepSpeed."""


for command in (*preparation.COMMANDS, *runs.COMMANDS, *results.COMMANDS, convert, submit, job):
    commands.add_command(command)


def main() -> NoReturn:
    """Runs the command line and ends the process with an exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)  # a shell starts background jobs with SIGINT ignored
    sys.path.append(os.getcwd())  # to find a user's module:function; last, so that it hides no installed module
    code = exit_code(lambda: commands.main(standalone_mode=False))
    code = 1 if code == EXIT_LOST else code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a plain exit would wait for threads that wait for dead workers


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
