"""`rlsys submit` and `rlsys job`: runs on a cluster elsewhere, as its jobs."""

import math
import secrets
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from launch.printing import print_line
from launch.tools.jobs.job_package import JobPackage, build_package, format_size
from launch.tools.jobs.server import JobServer, JobServerLost
from rlsys import __version__
from rlsys.config.secrets import is_secret_variable, redact
from rlsys.errors import ConfigError
from rlsys.runs.stopping import GRACE_S

STOP_MARGIN_S = 20  # beyond the time that a run takes to stop; then Ray kills it
COMMAND_NOT_FOUND = 127  # exit code of a shell
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"  # Ray reads it in the job's environment: seconds between SIGTERM and SIGKILL


def submit(
    path: str,
    overrides: tuple[str, ...],
    console: Console,
    *,
    address: str,
    extra_paths: tuple[str, ...] = (),
    environment: tuple[str, ...] = (),
    name: str = "",
    wait: bool = True,
) -> int:
    """Checks a configuration, sends it as a job, and follows the job. The exit code is the job's."""
    variables = parse_environment(environment)
    package = build_package(path, overrides, extra_paths)
    server = JobServer(address)
    name = name or f"{Path(path).stem}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    entrypoint = shlex.join(["rlsys", "train", package.config_path, *overrides])
    options = [word for extra in extra_paths for word in ("--with", extra)]
    options += [word for variable in environment for word in ("--env", variable)]
    resume = shlex.join(["rlsys", "submit", path, *overrides, *options])
    metadata = {"rlsys": __version__, "run_dir": package.config.run.dir, "resume": resume}
    stop_s = math.ceil(2 * GRACE_S) + STOP_MARGIN_S  # to end the step, and as long again to save
    print_package(package, console)
    with tempfile.TemporaryDirectory() as folder:
        package.copy_to(Path(folder))
        server.submit(name, entrypoint, Path(folder), {STOP_WAIT: str(stop_s)} | variables, metadata)
    print_line(console, f"job {name} at {server.shown}: {entrypoint}")
    if not wait:
        print_line(console, f"Follow it with: {job_command('logs', name, server)} --follow")
        return 0
    return follow(server, name, console)


def print_package(package: JobPackage, console: Console) -> None:
    count = "1 file" if len(package.files) == 1 else f"{len(package.files)} files"
    shown = ", ".join(list(package.files)[:8]) + (", …" if len(package.files) > 8 else "")
    print_line(console, f"sent with the job ({count}, {format_size(package.size)}): {shown}")
    if package.not_sent:
        print_line(console, f"not sent, looked for on the cluster: {', '.join(map(str, package.not_sent))}")
    if package.variables:
        print_line(
            console,
            "read on the cluster, in the environment that `ray start` had on each node: "
            f"{', '.join(package.variables)}. Values are not sent.",
        )


def parse_environment(environment: tuple[str, ...]) -> dict[str, str]:
    """Parses `NAME=VALUE` options. Refuses secrets: everyone with access to the job server would see them."""
    problems, variables = [], {}
    for option in environment:
        name, equals, value = option.partition("=")
        if not equals or not name:
            problems.append(f"--env {redact(option)} is not NAME=VALUE, such as HF_HOME=/shared/huggingface.")
        elif name == STOP_WAIT:
            problems.append(f"--env {name} is set for each job by rlsys. Leave it out.")
        elif is_secret_variable(name, value):
            problems.append(
                f"--env {name}: everyone with access to the job server sees what is given here. Set {name} in the "
                "environment of `ray start` on each node instead."
            )
        variables[name] = value
    if problems:
        raise ConfigError(problems)
    return variables


def follow(server: JobServer, name: str, console: Console) -> int:
    """Follows a job until it ends, or until Ctrl-C; the job then goes on."""
    try:
        job = server.follow(name, write_output)
    except JobServerLost as error:
        logs = job_command("logs", name, server)
        print_line(console, f"✗ {error}; job {name} may go on. Follow it with: {logs} --follow", "red")
        return 1
    except KeyboardInterrupt:
        print_line(console, f"\ndetached; job {name} goes on.")
        logs, stop = job_command("logs", name, server), job_command("stop", name, server)
        print_line(console, f"  {logs} --follow\n  {stop}")
        return 130
    return print_ending(server, name, job, console)


def print_ending(server: JobServer, name: str, job: Any, console: Console) -> int:
    """Prints how a job ended. Returns its exit code, or 0 where it was stopped, as after SIGTERM."""
    status = str(job.status.value)
    if status == "SUCCEEDED":
        print_line(console, f"job {name} is done", "green")
        return 0
    if status == "STOPPED":
        print_line(console, f"job {name} was stopped. Resume with: {resume_command(job, server)}")
        return 0
    code = job.driver_exit_code
    if code is None:  # it never started, or was lost with its node
        message = " ".join(redact(job.message or "failed without a message").split())[:1000]
        print_line(console, f"✗ job {name}: {message}", "red")
        return 1
    if code == COMMAND_NOT_FOUND:
        print_line(
            console,
            f"✗ job {name}: `rlsys` is not found on the cluster. Install it on every node, in the environment that "
            "`ray start` is called from, and have its bin folder on the PATH there.",
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
        server.job(name)  # raises if there is no such job
        return follow(server, name, console)
    write_output(server.logs(name))
    return 0


def stop(server: JobServer, name: str, console: Console) -> int:
    """Asks the run to save its work and stop, and waits for it."""
    job = server.job(name)
    if job.status.is_terminal() or not server.stop(name):
        print_line(console, f"job {name} is over already")
        return print_ending(server, name, server.job(name), console)
    stop_s = int(((job.runtime_env or {}).get("env_vars") or {}).get(STOP_WAIT, 3))
    print_line(console, f"stopping {name}: the current step is finished and saved; Ray kills the job after {stop_s} s")
    job = server.wait_for_end(name, stop_s + STOP_MARGIN_S)
    write_output("".join(server.logs(name).splitlines(keepends=True)[-3:]))
    if not job.status.is_terminal():
        look_again = job_command("status", name, server)
        print_line(console, f"✗ job {name} has not ended. Look again with: {look_again}", "red")
        return 1
    return print_ending(server, name, job, console)


def print_jobs(server: JobServer, console: Console) -> int:
    jobs = server.list_jobs()
    rows = [(str(job.submission_id), str(job.status.value), run_time(job), str(job.entrypoint)) for job in jobs]
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
    start = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.start_time / 1000))
    return f"since {start}, {seconds // 3600}h{seconds % 3600 // 60:02}m{seconds % 60:02}s"


def resume_command(job: Any, server: JobServer) -> str:
    resume = (job.metadata or {}).get("resume")
    return f"{resume} --address {server.shown}" if resume else str(job.entrypoint)


def job_command(verb: str, name: str, server: JobServer) -> str:
    return f"rlsys job {verb} {shlex.quote(name)} --address {server.shown}"


def write_output(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
