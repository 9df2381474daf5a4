"""The command line of `rlsys submit` and `rlsys job`."""

from typing import Any

import click

from launch.printing import plain_console

console = plain_console()
ADDRESS = click.option(
    "--address",
    required=True,
    envvar="RAY_API_SERVER_ADDRESS",
    metavar="URL",
    help="Address of the cluster's dashboard, such as http://HEAD:8265. By default RAY_API_SERVER_ADDRESS.",
)
JOB = click.argument("job", metavar="ID")


@click.command()
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@ADDRESS
@click.option(
    "--with", "extra_paths", multiple=True, metavar="PATH", help="Send this file or folder too. May be repeated."
)
@click.option(
    "--env", "environment", multiple=True, metavar="NAME=VALUE", help="Environment variable of the job; never a secret."
)
@click.option("--id", "name", default="", help="Name of the job; by default CONFIG with the time.")
@click.option("--wait/--no-wait", default=True, help="Follow the job to its end (default), or return at once.")
def submit(config: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Runs CONFIG as a job of a Ray cluster: checks it here, sends it with the files it names, and follows it."""
    from launch.tools.jobs.submit import submit as run

    return run(config, overrides, console, **options)


@click.group()
def job() -> None:
    """Jobs of a Ray cluster: list, status, logs, stop."""


@job.command("list")
@ADDRESS
def list_jobs(address: str) -> int:
    """Lists all jobs of the cluster, the newest first."""
    from launch.tools.jobs import submit as jobs
    from launch.tools.jobs.server import JobServer

    return jobs.print_jobs(JobServer(address), console)


@job.command()
@JOB
@ADDRESS
def status(job: str, address: str) -> int:
    """Shows the state of job ID."""
    from launch.tools.jobs import submit as jobs
    from launch.tools.jobs.server import JobServer

    return jobs.status(JobServer(address), job, console)


@job.command()
@JOB
@ADDRESS
@click.option("--follow", "-f", "following", is_flag=True, help="Continue until the job ends; exit with its code.")
def logs(job: str, address: str, following: bool) -> int:
    """Shows the output of job ID."""
    from launch.tools.jobs import submit as jobs
    from launch.tools.jobs.server import JobServer

    return jobs.logs(JobServer(address), job, console, following=following)


@job.command()
@JOB
@ADDRESS
def stop(job: str, address: str) -> int:
    """Stops job ID: its work is saved, and the same command resumes it."""
    from launch.tools.jobs import submit as jobs
    from launch.tools.jobs.server import JobServer

    return jobs.stop(JobServer(address), job, console)
