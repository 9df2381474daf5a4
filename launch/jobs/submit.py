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

from launch.jobs.parcel import Parcel, mebibytes, pack
from launch.jobs.server import JobServer, NoAnswer
from launch.printing import say
from rlsys import __version__
from rlsys.config.schema import ConfigError
from rlsys.config.secrets import hidden, secret_variable

MARGIN_S = 20  # beyond what a run takes to stop: Ray kills it after that
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
    variables = named_values(environment)
    parcel = pack(path, overrides, more)
    server = JobServer(address)
    name = name or f"{Path(path).stem}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    entrypoint = shlex.join(["rlsys", "train", parcel.path, *overrides])
    with_more = [word for place in more for word in ("--with", place)] + [w for e in environment for w in ("--env", e)]
    again = shlex.join(["rlsys", "submit", path, *overrides, *with_more])
    about = {"rlsys": __version__, "run_dir": parcel.config.run.dir, "again": again}
    patience = math.ceil(2 * parcel.config.run.grace_s) + MARGIN_S  # to end the step, and as long again to save
    tell_what_goes(parcel, console)
    with tempfile.TemporaryDirectory() as folder:
        parcel.lay_out(Path(folder))
        server.submit(name, entrypoint, Path(folder), {STOP_WAIT: str(patience)} | variables, about)
    say(console, f"job {name} at {server.shown}: {entrypoint}")
    if not wait:
        say(console, f"Follow it with: {command('logs', name, server)} --follow")
        return 0
    return follow(server, name, console)


def tell_what_goes(parcel: Parcel, console: Console) -> None:
    count = "1 file" if len(parcel.files) == 1 else f"{len(parcel.files)} files"
    shown = ", ".join(list(parcel.files)[:8]) + (", …" if len(parcel.files) > 8 else "")
    say(console, f"sent with the job ({count}, {mebibytes(parcel.size)}): {shown}")
    if parcel.elsewhere:
        say(console, f"not sent, looked for on the cluster: {', '.join(map(str, parcel.elsewhere))}")
    if parcel.environment:
        say(
            console,
            f"read on the cluster, in the environment that `ray start` had on each node: {', '.join(parcel.environment)}. "
            "Values are not sent.",
        )


def named_values(environment: tuple[str, ...]) -> dict[str, str]:
    """`NAME=VALUE`, but for secrets: whoever may ask the job server sees them."""
    problems, found = [], {}
    for text in environment:
        key, equals, value = text.partition("=")
        if not equals or not key:
            problems.append(f"--env {hidden(text)} is not NAME=VALUE, such as HF_HOME=/shared/huggingface.")
        elif secret_variable(key, value) or key == STOP_WAIT:
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
        job = server.follow(name, write)
    except NoAnswer as error:
        say(
            console, f"✗ {error}; job {name} may go on. Follow it with: {command('logs', name, server)} --follow", "red"
        )
        return 1
    except KeyboardInterrupt:
        say(console, f"\ndetached; job {name} goes on.")
        say(console, f"  {command('logs', name, server)} --follow\n  {command('stop', name, server)}")
        return 130
    return tell_the_end(server, name, job, console)


def tell_the_end(server: JobServer, name: str, job: Any, console: Console) -> int:
    """The job's exit code; 0 where it was stopped, as after SIGTERM."""
    status = str(job.status.value)
    if status == "SUCCEEDED":
        say(console, f"job {name} is done", "green")
        return 0
    if status == "STOPPED":
        say(console, f"job {name} was stopped. Resume with: {resume(job, server)}")
        return 0
    code = job.driver_exit_code
    if code is None:  # it did not get so far, or went down with its node
        say(console, f"✗ job {name}: {' '.join(hidden(job.message or 'failed without a word').split())[:1000]}", "red")
        return 1
    if code == NOT_FOUND:
        say(
            console,
            f"✗ job {name}: `rlsys` is not found on the cluster. Install it on every node, in the environment that `ray start` "
            "is called from, and have its bin folder on the PATH there.",
            "red",
        )
    else:
        say(console, f"✗ job {name} failed with exit code {code}", "red")
    return code if 0 < code < 256 else 1


def status(server: JobServer, name: str, console: Console) -> int:
    job = server.job(name)
    say(console, f"{name}  {job.status.value}  {took(job)}")
    say(console, f"runs: {job.entrypoint}")
    if run_dir := (job.metadata or {}).get("run_dir"):
        say(console, f"run directory: {run_dir}")
    if job.status.is_terminal():
        tell_the_end(server, name, job, console)
    return 0


def logs(server: JobServer, name: str, console: Console, *, following: bool) -> int:
    if following:
        server.job(name)  # whether there is one
        return follow(server, name, console)
    write(server.logs(name))
    return 0


def stop(server: JobServer, name: str, console: Console) -> int:
    """Asks the run to save what is done, and waits for it."""
    job = server.job(name)
    if job.status.is_terminal() or not server.stop(name):
        say(console, f"job {name} is over already")
        return tell_the_end(server, name, server.job(name), console)
    patience = int(((job.runtime_env or {}).get("env_vars") or {}).get(STOP_WAIT, 3))
    say(console, f"stopping {name}: the step that is going on is finished and saved; Ray kills it after {patience} s")
    job = server.wait(name, patience + MARGIN_S)
    write("".join(line for line in server.logs(name).splitlines(keepends=True)[-3:]))
    if not job.status.is_terminal():
        say(console, f"✗ job {name} has not ended. Look again with: {command('status', name, server)}", "red")
        return 1
    return tell_the_end(server, name, job, console)


def show_all(server: JobServer, console: Console) -> int:
    rows = [(str(job.submission_id), str(job.status.value), took(job), str(job.entrypoint)) for job in server.jobs()]
    if not rows:
        say(console, f"{server.shown} has no jobs yet")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *cells, entrypoint in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        say(console, "  ".join([*padded, entrypoint]))
    return 0


def took(job: Any) -> str:
    if not job.start_time:
        return "not started yet"
    seconds = int((job.end_time / 1000 if job.end_time else time.time()) - job.start_time / 1000)
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.start_time / 1000))
    return f"since {began}, {seconds // 3600}h{seconds % 3600 // 60:02}m{seconds % 60:02}s"


def resume(job: Any, server: JobServer) -> str:
    """The command that goes on with the run."""
    again = (job.metadata or {}).get("again")
    return f"{again} --address {server.shown}" if again else str(job.entrypoint)


def command(verb: str, name: str, server: JobServer) -> str:
    return f"rlsys job {verb} {shlex.quote(name)} --address {server.shown}"


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
