"""A cluster's job server: requests to it, and what goes wrong with them in one sentence each.

Ray's own client sends the requests, with the user's token: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or
~/.ray/auth_token.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launch.ray_session.token import explain_token_refusal, use_token_if_available
from rlsys.config.secrets import redact
from rlsys.errors import ConfigError

ANSWER_TIMEOUT_S = 60.0  # of one answer; connecting gets a sixth of it
LOST_S = 120.0  # without any answer, before a job is no longer followed


class JobServerLost(RuntimeError):
    """The job server no longer answers. Its jobs may go on."""


class JobServer:
    """`JobServer("http://head:8265")`. Raises `ConfigError` if no job server that can be used answers there."""

    def __init__(self, address: str):
        self.address = address if "://" in address else f"http://{address}"
        if not self.address.startswith(("http://", "https://")):
            raise ConfigError(
                f"--address is {redact(address)}; jobs go to the address of Ray's dashboard, such as http://HEAD:8265."
            )
        for variable in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # Ray would prefer them to the address that is given
            os.environ.pop(variable, None)
        self.shown = redact(self.address)
        self.connected = False
        with self.explain_errors():
            use_token_if_available()  # by default Ray's job client sends no token
            self.client = _connect(self.address)
        self.connected = True
        self._require_same_ray()

    def _require_same_ray(self) -> None:
        import ray

        server_version = self.client._server_ray_version
        if server_version != ray.__version__:
            raise ConfigError(
                f"{self.shown} has Ray {server_version}, this machine Ray {ray.__version__}. Install the rlsys of the "
                "cluster here too, or run `ray job submit -- rlsys train …` with its own Ray."
            )

    @contextlib.contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Turns an error of a request into one sentence: `JobServerLost` after a first answer, else `ConfigError`."""
        from ray.exceptions import AuthenticationError
        from requests.exceptions import JSONDecodeError, RequestException

        try:
            yield
        except AuthenticationError as error:
            refused = explain_token_refusal(token_sent="no auth" not in str(error))
            raise ConfigError(f"{self.shown} {refused}") from None
        except (JSONDecodeError, KeyError):
            raise ConfigError(not_a_job_server(self.shown)) from None
        except (RequestException, OSError) as error:
            if not self.connected:
                raise ConfigError(
                    f"no Ray job server answers at {self.shown}. It is the dashboard of `ray start --head`, port 8265 "
                    "by default; from elsewhere it takes --dashboard-host=0.0.0.0 there, or a tunnel: ssh -L "
                    "8265:localhost:8265 HEAD"
                ) from None
            raise JobServerLost(f"{self.shown} has stopped answering ({type(error).__name__})") from None
        except RuntimeError as error:
            if "does not exist" in str(error):
                raise ConfigError(f"{self.shown} knows no such job. `rlsys job list` shows those it knows.") from None
            if "404" in str(error):
                raise ConfigError(not_a_job_server(self.shown)) from None
            raise ConfigError(f"{self.shown} refused: {' '.join(redact(str(error)).split())[-500:]}") from None

    def submit(
        self, name: str, entrypoint: str, folder: Path, variables: dict[str, str], metadata: dict[str, str]
    ) -> None:
        with self.explain_errors():
            self.client.submit_job(
                entrypoint=entrypoint,
                submission_id=name,
                runtime_env={"working_dir": str(folder), "env_vars": variables},
                metadata=metadata,
            )

    def job(self, name: str) -> Any:
        """Returns Ray's `JobDetails`."""
        with self.explain_errors():
            return self.client.get_job_info(name)

    def list_jobs(self) -> list[Any]:
        """Returns the submitted jobs, the newest first."""
        with self.explain_errors():
            jobs = [job for job in self.client.list_jobs() if job.submission_id]
        return sorted(jobs, key=lambda job: -(job.start_time or 0))

    def logs(self, name: str) -> str:
        with self.explain_errors():
            logs: str = self.client.get_job_logs(name)
        return logs

    def stop(self, name: str) -> bool:
        """Asks a job to stop; returns False if there was nothing to stop."""
        with self.explain_errors():
            stopping: bool = self.client.stop_job(name)
        return stopping

    def wait_for_end(self, name: str, timeout_s: float) -> Any:
        """Returns the job once it has ended, or as it is after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not (job := self.job(name)).status.is_terminal() and time.monotonic() < deadline:
            time.sleep(0.5)
        return job

    def follow(self, name: str, write: Callable[[str], object]) -> Any:
        """Writes the job's output from beginning to end, and returns the job. Reconnects after a broken connection."""
        written, silent_since = 0, 0.0  # characters; when the server stopped answering, or 0
        while True:
            try:
                for text in self.tail_logs(name, written):
                    write(text)
                    written, silent_since = written + len(text), 0.0
                job, silent_since = self.wait_for_end(name, 5), 0.0
                if job.status.is_terminal():
                    write(self.logs(name)[written:])  # what came after the connection broke
                    return job
            except JobServerLost:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > LOST_S:
                    raise
                time.sleep(2)

    def tail_logs(self, name: str, skip: int) -> Iterator[str]:
        """Yields the job's output after its first `skip` characters, until the connection ends for any reason."""
        from aiohttp import ClientError

        loop, chunks = asyncio.new_event_loop(), self.client.tail_job_logs(name)
        try:
            while True:
                try:
                    text = loop.run_until_complete(asyncio.wait_for(anext(chunks), ANSWER_TIMEOUT_S))
                except (StopAsyncIteration, RuntimeError, ClientError, OSError):
                    return  # the job has ended, or the connection broke, perhaps unnoticed: `follow` finds out which
                skipped = min(skip, len(text))
                skip -= skipped
                if text[skipped:]:
                    yield text[skipped:]
        finally:
            with contextlib.suppress(Exception):
                loop.run_until_complete(chunks.aclose())
            loop.close()


def _connect(address: str) -> Any:
    """Connects Ray's client for jobs, with a time limit for every request."""
    from ray.job_submission import JobSubmissionClient

    logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.ERROR)

    class Client(JobSubmissionClient):
        def _do_request(self, *args: Any, **kwargs: Any) -> Any:  # by itself it never ends
            return super()._do_request(*args, **kwargs, timeout=(ANSWER_TIMEOUT_S / 6, ANSWER_TIMEOUT_S))

    return Client(address)


def not_a_job_server(address: str) -> str:
    return f"what answers at {address} is no Ray job server. Give the address of Ray's dashboard."
