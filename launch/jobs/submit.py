"""`rlsys submit` and `rlsys job`: a run as a job of a cluster that is elsewhere."""

import math
import secrets
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from launch.jobs.job_package import JobPackage, build_package, format_size
from launch.jobs.server import JobServer, JobServerLost
from launch.printing import print_line
from rlsys import __version__
from rlsys.config.schema import ConfigError
from rlsys.config.secrets import is_secret_variable, redact

STOP_MARGIN_S = 20  # beyond what a run takes to stop: Ray kills it after that
NOT_FOUND = 127  # exit code of a shell that does not find a command
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"  # read by Ray in the job's environment: seconds between SIGTERM and SIGKILL


def submit(
    path: str,
    overrides: tuple[str, ...],
    console: Console,
    *,
    address: str,
    more: tuple[str, ...] = (),
    environment: tuple[str, ...] = (),
    name: str = "",
    wait: bool = True,
) -> int:
    """Checks, sends, and follows. The exit code is the job's."""
    variables = parse_environment(environment)
    parcel = build_package(path, overrides, more)
    server = JobServer(address)
    name = name or f"{Path(path).stem}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    entrypoint = shlex.join(["rlsys", "train", parcel.config_path, *overrides])
    with_more = [word for place in more for word in ("--with", place)] + [w for e in environment for w in ("--env", e)]
    again = shlex.join(["rlsys", "submit", path, *overrides, *with_more])
    about = {"rlsys": __version__, "run_dir": parcel.config.run.dir, "again": again}
    patience = math.ceil(2 * parcel.config.run.grace_s) + STOP_MARGIN_S  # to end the step, and as long again to save
    print_package(parcel, console)
    with tempfile.TemporaryDirectory() as folder:
        parcel.copy_to(Path(folder))
        server.submit(name, entrypoint, Path(folder), {STOP_WAIT: str(patience)} | variables, about)
    print_line(console, f"job {name} at {server.shown}: {entrypoint}")
    if not wait:
        print_line(console, f"Follow it with: {job_command('logs', name, server)} --follow")
        return 0
    return follow(server, name, console)


def print_package(parcel: JobPackage, console: Console) -> None:
    count = "1 file" if len(parcel.files) == 1 else f"{len(parcel.files)} files"
    shown = ", ".join(list(parcel.files)[:8]) + (", …" if len(parcel.files) > 8 else "")
    print_line(console, f"sent with the job ({count}, {format_size(parcel.size)}): {shown}")
    if parcel.not_sent:
        print_line(console, f"not sent, looked for on the cluster: {', '.join(map(str, parcel.not_sent))}")
    if parcel.variables:
        print_line(
            console,
            f"read on the cluster, in the environment that `ray start` had on each node: {', '.join(parcel.variables)}. "
            "Values are not sent.",
        )


def parse_environment(environment: tuple[str, ...]) -> dict[str, str]:
    """`NAME=VALUE`, but for secrets: whoever may ask the job server sees them."""
    problems, found = [], {}
    for text in environment:
        key, equals, value = text.partition("=")
        if not equals or not key:
            problems.append(f"--env {redact(text)} is not NAME=VALUE, such as HF_HOME=/shared/huggingface.")
        elif is_secret_variable(key, value) or key == STOP_WAIT:
            problems.append(
                f"--env {key}: everyone who may ask the job server sees what is given here. Set {key} in the environment of "
                "`ray start` on each node instead."
                if key != STOP_WAIT
                else f"--env {key} follows from run.grace_s; change that."
            )
        found[key] = value
    if problems:
        raise ConfigError(problems)
    return found


def follow(server: JobServer, name: str, console: Console) -> int:
    """Until the job is over, or Ctrl-C: the job goes on then."""
    try:
        job = server.follow(name, write_output)
    except JobServerLost as error:
        print_line(
            console,
            f"✗ {error}; job {name} may go on. Follow it with: {job_command('logs', name, server)} --follow",
            "red",
        )
        return 1
    except KeyboardInterrupt:
        print_line(console, f"\ndetached; job {name} goes on.")
        print_line(console, f"  {job_command('logs', name, server)} --follow\n  {job_command('stop', name, server)}")
        return 130
    return print_ending(server, name, job, console)


def print_ending(server: JobServer, name: str, job: Any, console: Console) -> int:
    """The job's exit code; 0 where it was stopped, as after SIGTERM."""
    status = str(job.status.value)
    if status == "SUCCEEDED":
        print_line(console, f"job {name} is done", "green")
        return 0
    if status == "STOPPED":
        print_line(console, f"job {name} was stopped. Resume with: {resume_command(job, server)}")
        return 0
    code = job.driver_exit_code
    if code is None:  # it did not get so far, or went down with its node
        print_line(
            console, f"✗ job {name}: {' '.join(redact(job.message or 'failed without a word').split())[:1000]}", "red"
        )
        return 1
    if code == NOT_FOUND:
        print_line(
            console,
            f"✗ job {name}: `rlsys` is not found on the cluster. Install it on every node, in the environment that `ray start` "
            "is called from, and have its bin folder on the PATH there.",
            "red",
        )
    else:
        print_line(console, f"✗ job {name} failed with exit code {code}", "red")
    return code if 0 < code < 256 else 1


def status(server: JobServer, name: str, console: Console) -> int:
    job = server.job(name)
    print_line(console, f"{name}  {job.status.value}  {run_time(job)}")
    print_line(console, f"runs: {job.entrypoint}")
    if run_dir := (job.metadata or {}).get("run_dir"):
        print_line(console, f"run directory: {run_dir}")
    if job.status.is_terminal():
        print_ending(server, name, job, console)
    return 0


def logs(server: JobServer, name: str, console: Console, *, following: bool) -> int:
    if following:
        server.job(name)  # whether there is one
        return follow(server, name, console)
    write_output(server.logs(name))
    return 0


def stop(server: JobServer, name: str, console: Console) -> int:
    """Asks the run to save what is done, and waits for it."""
    job = server.job(name)
    if job.status.is_terminal() or not server.stop(name):
        print_line(console, f"job {name} is over already")
        return print_ending(server, name, server.job(name), console)
    patience = int(((job.runtime_env or {}).get("env_vars") or {}).get(STOP_WAIT, 3))
    print_line(
        console, f"stopping {name}: the step that is going on is finished and saved; Ray kills it after {patience} s"
    )
    job = server.wait_for_end(name, patience + STOP_MARGIN_S)
    write_output("".join(line for line in server.logs(name).splitlines(keepends=True)[-3:]))
    if not job.status.is_terminal():
        print_line(
            console, f"✗ job {name} has not ended. Look again with: {job_command('status', name, server)}", "red"
        )
        return 1
    return print_ending(server, name, job, console)


def print_jobs(server: JobServer, console: Console) -> int:
    rows = [
        (str(job.submission_id), str(job.status.value), run_time(job), str(job.entrypoint))
        for job in server.list_jobs()
    ]
    if not rows:
        print_line(console, f"{server.shown} has no jobs yet")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *cells, entrypoint in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        print_line(console, "  ".join([*padded, entrypoint]))
    return 0


def run_time(job: Any) -> str:
    if not job.start_time:
        return "not started yet"
    seconds = int((job.end_time / 1000 if job.end_time else time.time()) - job.start_time / 1000)
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.start_time / 1000))
    return f"since {began}, {seconds // 3600}h{seconds % 3600 // 60:02}m{seconds % 60:02}s"


def resume_command(job: Any, server: JobServer) -> str:
    """The command that goes on with the run."""
    again = (job.metadata or {}).get("again")
    return f"{again} --address {server.shown}" if again else str(job.entrypoint)


def job_command(verb: str, name: str, server: JobServer) -> str:
    return f"rlsys job {verb} {shlex.quote(name)} --address {server.shown}"


def write_output(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
