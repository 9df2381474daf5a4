"""Joining a cluster: the token, refusals, and signals. Only the GCS of the cluster exists."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
from ray._private import ray_constants, utils
from ray._raylet import AuthenticationTokenLoader, Config
from ray.core.generated.gcs_service_pb2 import GetClusterIdReply

from launch.ray_session.connect import ray_session
from rlsys.config.loading import load_config
from rlsys.errors import ConfigError

CONFIG = Path(__file__).parents[2] / "configs" / "tiny_cpu.yaml"
TOKEN = "0" * 64


class Gate(grpc.GenericRpcHandler):
    """Refuses callers without the token, if it requires one."""

    demands = f"Bearer {TOKEN}"

    def service(self, details: Any) -> Any:
        token = dict(details.invocation_metadata).get("authorization")

        def answer(_: bytes, context: Any) -> bytes:
            if self.demands and token != self.demands:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: it is missing or incorrect")
            return bytes(GetClusterIdReply(cluster_id=b"0" * 28).SerializeToString())

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def gate() -> Iterator[tuple[str, Gate]]:
    """Its address, and the handler behind it."""
    answers, server = Gate(), grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((answers,))
    port = server.add_insecure_port("0.0.0.0:0")  # Ray takes 127.0.0.1 for the host's own address
    server.start()
    yield f"127.0.0.1:{port}", answers
    server.stop(None).wait()


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Removes the token from the environment and from Ray's memory, before and after."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ray_constants, "NUM_REDIS_GET_RETRIES", 1)
    forget()
    yield
    forget()


def forget() -> None:
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def join(address: str, tmp_path: Path) -> None:
    before = dict(os.environ)
    try:
        with ray_session(load_config(CONFIG, [f"cluster.address={address}"]), tmp_path):
            pass
    finally:
        assert os.environ == before


@pytest.mark.parametrize(("demands", "mode"), [(f"Bearer {TOKEN}", "token"), ("", None)])
def test_a_cluster_gets_the_token_only_if_it_requires_one(gate, tmp_path, monkeypatch, demands, mode) -> None:
    address, answers = gate
    answers.demands = demands
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    modes = []
    monkeypatch.setattr(ray, "init", lambda **_: modes.append(os.environ.get("RAY_AUTH_MODE")))
    join(address, tmp_path)
    assert modes == [mode]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "demands a token, and there is none here"),
        ({"RAY_AUTH_MODE": "token"}, "demands a token, and there is none here"),
        ({"RAY_AUTH_TOKEN": "1" * 64}, "refuses this token"),
    ],
)
def test_a_refused_or_missing_token_is_one_sentence(gate, tmp_path, monkeypatch, variables, message) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    forget()
    with pytest.raises(
        ConfigError, match=rf"^cluster\.address: the Ray cluster at {gate[0]} {message}.*RAY_AUTH_TOKEN"
    ):
        join(gate[0], tmp_path)


def test_signal_handlers_survive_joining_ray(gate, tmp_path, monkeypatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    handlers = []

    def init(**_: object) -> None:
        utils.set_sigterm_handler(lambda *_: None)  # as Ray does first
        handlers.append(signal.getsignal(signal.SIGTERM))

    monkeypatch.setattr(ray, "init", init)
    gate[1].demands = ""
    try:
        join(gate[0], tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handlers == [before]
