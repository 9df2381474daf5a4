"""Turns what a command returns or raises into an exit code, and prints each problem as one sentence."""

import os
from collections.abc import Callable

import click

from launch.printing import plain_console, print_line
from launch.supervise import EXIT_LOST
from rlsys.config.secrets import redact
from rlsys.errors import ConfigError, WorkerLost, describe_disk_error

errors = plain_console(stderr=True)


def exit_code(run: Callable[[], object], interrupted: str = "Interrupted.") -> int:
    try:
        result = run()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return 2
    except ConfigError as error:
        for problem in error.problems:
            print_problem(problem)
        return 2
    except (KeyboardInterrupt, click.Abort):
        print_line(errors, interrupted)
        return 130
    except WorkerLost as error:
        print_problem(str(error))
        return EXIT_LOST
    except Exception as error:
        return unexpected_error_code(error)


def unexpected_error_code(error: Exception) -> int:
    if trouble := describe_disk_error(error):
        print_problem(trouble)
        return 1
    if os.environ.get("RLSYS_TRACEBACK"):
        errors.print_exception()
    print_problem(f"{type(error).__name__}: {error}")
    if type(error).__module__.startswith("ray."):  # Ray itself is lost
        return EXIT_LOST
    print_line(errors, "RLSYS_TRACEBACK=1 shows where in the driver it was raised.", "dim")
    return 1


def print_problem(problem: str) -> None:
    print_line(errors, f"✗ {redact(problem)}", "red")
