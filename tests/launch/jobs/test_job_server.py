"""What is said where a job server is not there, is another one, or is no job server; the server is a plain HTTP server."""

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

from launch.jobs.server import JobServer, JobServerLost
from launch.jobs.submit import parse_environment
from rlsys.config.schema import ConfigError
from workers.supervision.worker_setup import free_port


class Answers(BaseHTTPRequestHandler):
    """The same to everyone."""

    status, body = 200, b""
    asked_with: str | None = None  # whose token

    def do_GET(self) -> None:
        Answers.asked_with = self.headers["Authorization"]
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    found = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


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
    """Ray remembers a token that it has read, and from then on shows one. Tests that come later have another one, or none."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # of another cluster: --address is what counts
    AuthenticationTokenLoader.instance().reset_cache()
    yield
    os.environ.pop("RAY_AUTH_MODE", None)  # which Ray has set
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def test_a_server_of_the_same_ray_is_taken(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 200, json.dumps({"version": "4", "ray_version": ray.__version__}))
    assert JobServer(server).shown == f"http://{server}"
    assert Answers.asked_with == f"Bearer {'0' * 64}", "though nobody has said RAY_AUTH_MODE=token"


def test_another_ray_is_refused_with_both_versions(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 200, json.dumps({"version": "4", "ray_version": "2.10.0"}))
    assert refused(server).startswith(f"http://{server} has Ray 2.10.0, this machine Ray {ray.__version__}. Install")


def test_nobody_there_is_said_with_ways_to_get_there() -> None:
    said = refused(f"http://127.0.0.1:{free_port()}")
    assert said.startswith("no Ray job server answers at http://127.0.0.1:")
    assert "ssh -L 8265:localhost:8265 HEAD" in said


@pytest.mark.parametrize(("status", "body"), [(404, "not here"), (200, "<html>a page</html>")])
def test_something_else_at_that_address_is_no_job_server(
    server: str, monkeypatch: pytest.MonkeyPatch, status: int, body: str
) -> None:
    answer(monkeypatch, status, body)
    assert (
        refused(server) == f"what answers at http://{server} is no Ray job server. Give the address of Ray's dashboard."
    )


def test_a_token_that_is_refused_is_said_with_where_it_came_from(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 403, "Forbidden: Invalid authentication token")
    said = refused(server)
    assert said.startswith(f"http://{server} refuses this token. It is taken from RAY_AUTH_TOKEN, the file")
    assert "0" * 64 not in said


def test_a_password_in_the_address_is_not_shown() -> None:
    assert "pass-word" not in refused(f"http://me:pass-word@127.0.0.1:{free_port()}")


def test_an_address_of_ray_itself_is_refused() -> None:
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
    assert first.startswith("--env WANDB_API_KEY: everyone who may ask the job server sees what is given here.")
    assert second == "--env HF_HOME is not NAME=VALUE, such as HF_HOME=/shared/huggingface."
    assert third == "--env RAY_JOB_STOP_WAIT_TIME_S follows from run.grace_s; change that."
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


# --- following --------------------------------------------------------------------------------------------------------------


class Client:
    """Ray's, of a job that runs until the last of these connections has been had; after each of them the server fails so many times."""

    def __init__(self, *connections: list[str | float], failures: int = 0):
        self.connections, self.failures, self.failed = list(connections), failures, 0

    async def tail_job_logs(self, name: str) -> AsyncIterator[str]:
        """Texts, and seconds of silence."""
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
    """What is said of its job."""
    found = object.__new__(JobServer)
    found.client, found.shown, found.connected = client, "http://head:8265", True
    monkeypatch.setattr(found, "wait_for_end", lambda name, _: found.job(name))
    monkeypatch.setattr("launch.jobs.server.time.sleep", lambda _: None)
    said: list[str] = []
    found.follow("mine", said.append)
    return said


def test_a_job_that_was_silent_for_long_is_followed_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.jobs.server.LOST_S", 0.2)
    client = Client(["one ", 0.3], ["one ", "two ", 0.3], ["one two three"], failures=1)
    assert followed(client, monkeypatch) == ["one ", "two ", "three", ""]


def test_a_server_that_has_not_answered_for_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.jobs.server.LOST_S", 0.05)
    with pytest.raises(JobServerLost, match=r"http://head:8265 has stopped answering \(ConnectionError\)"):
        followed(Client(["one "], failures=10**9), monkeypatch)


def test_a_connection_without_a_word_for_long_is_made_anew_and_nothing_said_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("launch.jobs.server.ANSWER_TIMEOUT_S", 0.1)
    client = Client(["one ", 60], [60], ["one two", " ", 60], ["one two three"])
    assert followed(client, monkeypatch) == ["one ", "two", " ", "three", ""]
