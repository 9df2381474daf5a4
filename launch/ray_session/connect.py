"""Joins a running Ray cluster, or starts a private Ray."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.ray_session import patches
from launch.ray_session.private import private_ray
from launch.ray_session.session import RaySession
from launch.ray_session.token import explain_token_refusal, requires_token, use_token_if_available
from rlsys.config.schema import Config
from rlsys.errors import ConfigError


class NoCluster(ConfigError):
    """No cluster answers at the address."""


@contextlib.contextmanager
def ray_session(config: Config, logs: Path) -> Iterator[RaySession]:
    """Connects to `cluster.address` or RAY_ADDRESS. Without either, starts a private Ray and ends it afterwards."""
    with restored_environment():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        patches.disable_auto_connect()
        patches.silence_worker_errors()
        address = config.cluster.address or os.environ.get("RAY_ADDRESS", "")
        if not address:
            with private_ray(config, logs) as session:
                yield session
            return
        join_cluster(address)
        try:
            yield RaySession(ray)
        finally:
            ray.shutdown()


@contextlib.contextmanager
def restored_environment() -> Iterator[None]:
    """Undoes what we and Ray change in the environment: a token mode, and paths into a folder that is removed."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ |= before


def join_cluster(address: str) -> None:
    """Connects to a cluster, with the user's token if the cluster requires one.

    Ray sends a token by itself only to a cluster that it has found (`auto`). A cluster without tokens must not receive
    one: this process would then require it from every caller.
    """
    import ray
    from ray.exceptions import AuthenticationError

    refused = f"cluster.address: the Ray cluster at {address}"
    try:
        token_sent = (address == "auto" or requires_token(address)) and use_token_if_available()
        with patches.keep_signal_handlers():
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except AuthenticationError:  # RAY_AUTH_MODE=token, and there is no token
        raise ConfigError(f"{refused} {explain_token_refusal(token_sent=False)}") from None
    except ConnectionError as error:
        if AuthenticationError.__name__ in str(error.__cause__):
            raise ConfigError(f"{refused} {explain_token_refusal(token_sent)}") from None
        cause = str(error).splitlines()[0]
        raise NoCluster(f"cluster.address: no Ray cluster answers at {address} ({cause}).") from None


def address_for_ray_cli(ray: Any) -> str:
    """The address that `ray list actors --address` needs.

    For a private Ray it is the dashboard's: Ray's commands replace 127.0.0.1:PORT by PORT of the host's own address,
    where a private Ray does not listen.
    """
    from ray._private.worker import get_dashboard_url

    address: str = ray.get_runtime_context().gcs_address
    return f"http://{get_dashboard_url()}" if address.startswith(("127.", "[::1]")) else address


def metrics_urls(ray: Any) -> list[str]:
    """One page per node for Prometheus, with Ray's metrics and the run's."""
    return [f"http://{n['NodeManagerAddress']}:{n['MetricsExportPort']}/metrics" for n in ray.nodes() if n["Alive"]]
