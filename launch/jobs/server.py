"""A cluster's job server: what is asked of it, and what it means when it does not answer as it should.

Ray's own client does the talking, with the user's token: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launch.ray_token import explain_token_refusal, use_token_if_available
from rlsys.config.schema import ConfigError
from rlsys.config.secrets import redact

ANSWER_TIMEOUT_S = 60.0  # for one answer; connecting has a sixth of it
LOST_S = 120.0  # without any answer, before following a job is given up


class JobServerLost(RuntimeError):
    """The job server has gone away. Its jobs may go on."""


class JobServer:
    """`JobServer("http://head:8265")`. Raises `ConfigError` where nobody is there, or somebody we cannot talk to."""

    def __init__(self, address: str):
        self.address = address if "://" in address else f"http://{address}"
        if not self.address.startswith(("http://", "https://")):
            raise ConfigError(
                f"--address is {redact(address)}; jobs go to the address of Ray's dashboard, such as http://HEAD:8265."
            )
        for variable in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # Ray would take them for the address that is given
            os.environ.pop(variable, None)
        import ray
        from ray.job_submission import JobSubmissionClient

        logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.ERROR)
        self.shown = redact(self.address)

        class Client(JobSubmissionClient):
            def _do_request(self, *words: Any, **more: Any) -> Any:  # by itself it waits for ever
                return super()._do_request(*words, **more, timeout=(ANSWER_TIMEOUT_S / 6, ANSWER_TIMEOUT_S))

        self.connected = False
        with self.explain_errors():
            use_token_if_available()  # Ray's jobs by themselves wait to be told
            self.client = Client(self.address)
        self.connected = True
        theirs = self.client._server_ray_version
        if theirs != ray.__version__:
            raise ConfigError(
                f"{self.shown} has Ray {theirs}, this machine Ray {ray.__version__}. Install the rlsys of the cluster here too, "
                "or run `ray job submit -- rlsys train …` with its own Ray."
            )

    @contextlib.contextmanager
    def explain_errors(self) -> Iterator[None]:
        """What goes wrong between here and there, in one sentence."""
        from ray.exceptions import AuthenticationError
        from requests.exceptions import JSONDecodeError, RequestException

        try:
            yield
        except AuthenticationError as error:
            refused = explain_token_refusal(shown="no auth" not in str(error))
            raise ConfigError(f"{self.shown} {refused}") from None
        except (JSONDecodeError, KeyError):
            raise ConfigError(not_a_job_server(self.shown)) from None
        except (RequestException, OSError) as error:
            if not self.connected:
                raise ConfigError(
                    f"no Ray job server answers at {self.shown}. It is the dashboard of `ray start --head`, port 8265 by "
                    "default; from elsewhere it takes --dashboard-host=0.0.0.0 there, or a tunnel: ssh -L 8265:localhost:8265 HEAD"
                ) from None
            raise JobServerLost(f"{self.shown} has stopped answering ({type(error).__name__})") from None
        except RuntimeError as error:
            if "does not exist" in str(error):
                raise ConfigError(f"{self.shown} knows no such job. `rlsys job list` shows those it knows.") from None
            if "404" in str(error):
                raise ConfigError(not_a_job_server(self.shown)) from None
            raise ConfigError(f"{self.shown} refused: {' '.join(redact(str(error)).split())[-500:]}") from None

    def submit(
        self, name: str, entrypoint: str, folder: Path, variables: dict[str, str], about: dict[str, str]
    ) -> None:
        with self.explain_errors():
            self.client.submit_job(
                entrypoint=entrypoint,
                submission_id=name,
                runtime_env={"working_dir": str(folder), "env_vars": variables},
                metadata=about,
            )

    def job(self, name: str) -> Any:
        """Ray's `JobDetails`."""
        with self.explain_errors():
            return self.client.get_job_info(name)

    def list_jobs(self) -> list[Any]:
        """Those that were submitted, the newest first."""
        with self.explain_errors():
            found = [job for job in self.client.list_jobs() if job.submission_id]
        return sorted(found, key=lambda job: -(job.start_time or 0))

    def logs(self, name: str) -> str:
        with self.explain_errors():
            found: str = self.client.get_job_logs(name)
        return found

    def stop(self, name: str) -> bool:
        """False: there was nothing to stop."""
        with self.explain_errors():
            asked: bool = self.client.stop_job(name)
        return asked

    def wait_for_end(self, name: str, patience_s: float) -> Any:
        """The job once it is over, or as it is when patience is."""
        deadline = time.monotonic() + patience_s
        while not (job := self.job(name)).status.is_terminal() and time.monotonic() < deadline:
            time.sleep(0.5)
        return job

    def follow(self, name: str, say: Callable[[str], object]) -> Any:
        """Says what the job writes, from its beginning to its end, and returns it. A broken connection is taken up again."""
        said, silent = 0, 0.0  # `silent`: since when, while it does not answer
        while True:
            try:
                for text in self.tail_logs(name, said):
                    say(text)
                    said, silent = said + len(text), 0.0
                job, silent = self.wait_for_end(name, 5), 0.0
                if job.status.is_terminal():
                    say(self.logs(name)[said:])  # what came while nobody listened
                    return job
            except JobServerLost:
                silent = silent or time.monotonic()
                if time.monotonic() - silent > LOST_S:
                    raise
                time.sleep(2)

    def tail_logs(self, name: str, said: int) -> Iterator[str]:
        """What the job writes, without the first characters, which have been said."""
        from aiohttp import ClientError

        loop, pieces = asyncio.new_event_loop(), self.client.tail_job_logs(name)
        try:
            while True:
                try:
                    text = loop.run_until_complete(asyncio.wait_for(anext(pieces), ANSWER_TIMEOUT_S))
                except (StopAsyncIteration, RuntimeError, ClientError, OSError):
                    return  # over, broken off, or no word for long, as when it was broken off unnoticed: `follow` asks which
                skipped = min(said, len(text))
                said -= skipped
                if text[skipped:]:
                    yield text[skipped:]
        finally:
            with contextlib.suppress(Exception):
                loop.run_until_complete(pieces.aclose())
            loop.close()


def not_a_job_server(address: str) -> str:
    return f"what answers at {address} is no Ray job server. Give the address of Ray's dashboard."
