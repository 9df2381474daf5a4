"""What the commands print about jobs, and their exit codes, for every way in which a job can end."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from launch.tools.jobs import submit


class Server:
    """A job server with some jobs."""

    shown = "http://head:8265"

    def __init__(self, *jobs: Any):
        self.known = {job.submission_id: job for job in jobs}

    def list_jobs(self) -> list[Any]:
        return list(self.known.values())

    def job(self, name: str) -> Any:
        return self.known[name]


def job(name: str, status: str, code: int | None = None, message: str = "", **about: str) -> Any:
    """A job that ran for three hours, four minutes and five seconds."""
    state = SimpleNamespace(value=status, is_terminal=lambda: status in ("SUCCEEDED", "STOPPED", "FAILED"))
    times = {"start_time": 1_000_000_000_000, "end_time": 1_000_011_045_000}
    entrypoint = "rlsys train CONFIG run.dir=/shared/run"
    return SimpleNamespace(
        submission_id=name,
        status=state,
        driver_exit_code=code,
        message=message,
        metadata=about,
        entrypoint=entrypoint,
        **times,
    )


def run_command(call: Any, *words: Any) -> tuple[int, str]:
    out = io.StringIO()
    code = call(*words, Console(file=out, width=40))
    return code, out.getvalue()


def test_the_list_has_a_line_per_job_in_a_narrow_terminal() -> None:
    code, text = run_command(submit.print_jobs, Server(job("second", "RUNNING"), job("first-of-all", "SUCCEEDED", 0)))
    assert code == 0
    first, second = text.splitlines()
    assert first.startswith("second        RUNNING    since 2001-09-0")
    assert second.startswith("first-of-all  SUCCEEDED  since 2001-09-0")
    assert second.endswith(", 3h04m05s  rlsys train CONFIG run.dir=/shared/run")
    assert run_command(submit.print_jobs, Server()) == (0, "http://head:8265 has no jobs yet\n")


@pytest.mark.parametrize(
    ("ended_job", "code", "words"),
    [
        (job("one", "SUCCEEDED", 0), 0, "job one is done\n"),
        (
            job("one", "STOPPED", resume="rlsys submit CONFIG run.dir=/shared/run"),
            0,
            "job one was stopped. Resume with: rlsys submit CONFIG run.dir=/shared/run --address http://head:8265\n",
        ),
        (job("one", "STOPPED"), 0, "job one was stopped. Resume with: rlsys train CONFIG run.dir=/shared/run\n"),
        (job("one", "FAILED", 2), 2, "✗ job one failed with exit code 2\n"),
        (job("one", "FAILED", -9), 1, "✗ job one failed with exit code -9\n"),
        (
            job("one", "FAILED", 127),
            127,
            "✗ job one: `rlsys` is not found on the cluster. Install it on every node, in the environment that `ray "
            "start` is "
            "called from, and have its bin folder on the PATH there.\n",
        ),
        (
            job("one", "FAILED", None, "The actor died\nbecause its node died."),
            1,
            "✗ job one: The actor died because its node died.\n",
        ),
    ],
)
def test_every_end_has_a_sentence_and_an_exit_code(ended_job: Any, code: int, words: str) -> None:
    assert run_command(submit.print_ending, Server(ended_job), "one", ended_job) == (code, words)


def test_the_status_of_a_job_says_what_it_runs_and_how_it_ended() -> None:
    server = Server(job("one", "FAILED", 2, run_dir="/shared/run"))
    code, text = run_command(submit.status, server, "one")
    assert code == 0
    assert text.splitlines()[1:] == [
        "runs: rlsys train CONFIG run.dir=/shared/run",
        "run directory: /shared/run",
        "✗ job one failed with exit code 2",
    ]
