"""Errors of a job server that is missing, of another version, or something else. The server is a plain HTTP server."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
import ray
from ray._raylet import AuthenticationTokenLoader, Config
from ray.job_submission import JobStatus

from launch.tools.jobs.server import JobServer, JobServerLost
from launch.tools.jobs.submit import parse_environment
from rlsys.errors import ConfigError
from workers.start.ports import free_port


class Answers(BaseHTTPRequestHandler):
    """Gives every request the same answer."""

    status, body = 200, b""
    asked_with: str | None = None  # the token of the last request

    def do_GET(self) -> None:
        Answers.asked_with = self.headers["Authorization"]
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    http_server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{http_server.server_port}"
    http_server.shutdown()
    http_server.server_close()


def answer(monkeypatch: pytest.MonkeyPatch, status: int, body: str) -> None:
    monkeypatch.setattr(Answers, "status", status)
    monkeypatch.setattr(Answers, "body", body.encode())


def refused(address: str) -> str:
    with pytest.raises(ConfigError) as caught:
        JobServer(address)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sets a token, and afterwards makes Ray forget it: later tests have another one, or none."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # of another cluster: only --address counts
    AuthenticationTokenLoader.instance().reset_cache()
    yield
    os.environ.pop("RAY_AUTH_MODE", None)  # Ray has set it
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def test_a_server_with_the_same_ray_is_accepted(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 200, json.dumps({"version": "4", "ray_version": ray.__version__}))
    assert JobServer(server).shown == f"http://{server}"
    assert Answers.asked_with == f"Bearer {'0' * 64}", "though nobody has said RAY_AUTH_MODE=token"


def test_another_version_of_ray_is_refused(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 200, json.dumps({"version": "4", "ray_version": "2.10.0"}))
    assert refused(server).startswith(f"http://{server} has Ray 2.10.0, this machine Ray {ray.__version__}. Install")


def test_an_unreachable_server_is_reported_with_a_way_out() -> None:
    message = refused(f"http://127.0.0.1:{free_port()}")
    assert message.startswith("no Ray job server answers at http://127.0.0.1:")
    assert "ssh -L 8265:localhost:8265 HEAD" in message


@pytest.mark.parametrize(("status", "body"), [(404, "not here"), (200, "<html>a page</html>")])
def test_another_server_at_the_address_is_refused(
    server: str, monkeypatch: pytest.MonkeyPatch, status: int, body: str
) -> None:
    answer(monkeypatch, status, body)
    assert (
        refused(server) == f"what answers at http://{server} is no Ray job server. Give the address of Ray's dashboard."
    )


def test_a_refused_token_is_reported_with_its_source(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 403, "Forbidden: Invalid authentication token")
    message = refused(server)
    assert message.startswith(f"http://{server} refuses this token. It is taken from RAY_AUTH_TOKEN, the file")
    assert "0" * 64 not in message


def test_a_password_in_the_address_is_not_shown() -> None:
    assert "pass-word" not in refused(f"http://me:pass-word@127.0.0.1:{free_port()}")


def test_a_ray_client_address_is_refused() -> None:
    assert refused("ray://head:10001") == (
        "--address is ray://head:10001; jobs go to the address of Ray's dashboard, such as http://HEAD:8265."
    )


def test_a_variable_that_looks_like_a_secret_is_not_sent() -> None:
    assert parse_environment(("HF_HOME=/shared/huggingface", "EMPTY=")) == {
        "HF_HOME": "/shared/huggingface",
        "EMPTY": "",
    }
    with pytest.raises(ConfigError) as caught:
        parse_environment(("WANDB_API_KEY=0123456789abcdef0123456789abcdef", "HF_HOME", "RAY_JOB_STOP_WAIT_TIME_S=1"))
    first, second, third = caught.value.problems
    assert first.startswith("--env WANDB_API_KEY: everyone with access to the job server sees what is given here.")
    assert second == "--env HF_HOME is not NAME=VALUE, such as HF_HOME=/shared/huggingface."
    assert third == "--env RAY_JOB_STOP_WAIT_TIME_S is set for each job by rlsys. Leave it out."
    assert "0123456789abcdef" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "JUDGE_KEY=abc",
        "DB_PWD=abc",
        "HF_TOKEN=hunter2",
        "CLIENT_SECRET=abc",
        "HOOK=https://hooks.slack.com/services/T0/B0/abc",
    ],
)
def test_a_variable_that_holds_a_secret_is_refused_whatever_its_value(text):
    name, _, value = text.partition("=")
    with pytest.raises(ConfigError, match=f"Set {name} in the environment of `ray start` on each node") as caught:
        parse_environment((text,))
    assert value not in str(caught.value)


def test_a_file_that_holds_a_secret_may_be_named():
    assert parse_environment(("JUDGE_TOKEN_FILE=/run/judge",)) == {"JUDGE_TOKEN_FILE": "/run/judge"}


# --- following --------------------------------------------------------------------------------------------------------


class Client:
    """Ray's client for a job that runs until the last of these connections. After each, the server fails some times."""

    def __init__(self, *connections: list[str | float], failures: int = 0):
        self.connections, self.failures, self.failed = list(connections), failures, 0

    async def tail_job_logs(self, name: str) -> AsyncIterator[str]:
        """Yields the texts of a connection, and waits for its numbers of seconds."""
        if not self.connections:
            return
        self.failed = 0
        for piece in self.connections.pop(0):
            if isinstance(piece, str):
                yield piece
            else:
                await asyncio.sleep(piece)

    def get_job_info(self, name: str) -> SimpleNamespace:
        if self.failed < self.failures:
            self.failed += 1
            raise ConnectionError
        return SimpleNamespace(status=JobStatus.RUNNING if self.connections else JobStatus.SUCCEEDED)

    def get_job_logs(self, name: str) -> str:
        return "one two three"


def followed(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Follows its job, and returns what was written."""
    job_server = object.__new__(JobServer)
    job_server.client, job_server.shown, job_server.connected = client, "http://head:8265", True
    monkeypatch.setattr(job_server, "wait_for_end", lambda name, _: job_server.job(name))
    monkeypatch.setattr("launch.tools.jobs.server.time.sleep", lambda _: None)
    printed: list[str] = []
    job_server.follow("mine", printed.append)
    return printed


def test_a_quiet_job_is_followed_after_a_failed_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.tools.jobs.server.LOST_S", 0.2)
    client = Client(["one ", 0.3], ["one ", "two ", 0.3], ["one two three"], failures=1)
    assert followed(client, monkeypatch) == ["one ", "two ", "three", ""]


def test_a_server_that_stays_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.tools.jobs.server.LOST_S", 0.05)
    with pytest.raises(JobServerLost, match=r"http://head:8265 has stopped answering \(ConnectionError\)"):
        followed(Client(["one "], failures=10**9), monkeypatch)


def test_a_silent_connection_is_renewed_and_no_output_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("launch.tools.jobs.server.ANSWER_TIMEOUT_S", 0.1)
    client = Client(["one ", 60], [60], ["one two", " ", 60], ["one two three"])
    assert followed(client, monkeypatch) == ["one ", "two", " ", "three", ""]
