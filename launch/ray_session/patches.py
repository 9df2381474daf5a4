"""Every change that we make to Ray itself, each with its reason. `ray.init` has no options for them."""

import contextlib
import functools
import signal
from collections.abc import Iterator

from rlsys.errors import WorkerLost
from workers.start import worker_command


def disable_auto_connect() -> None:
    """Keeps a late call of some thread from starting another Ray after the end of the session."""
    from ray._private import auto_init_hook

    auto_init_hook.enable_auto_connect = False


def silence_worker_errors() -> None:
    """Turns off Ray's own message for each worker that dies. Our error names the cause."""
    from ray._private import worker

    worker.listen_error_messages = lambda *_: None


@contextlib.contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Keeps our handler of SIGTERM while Ray starts or is joined.

    Ray would install two of its own, which end this process without a message: first one of Python's, then, once
    connected, one of its C++ library.
    """
    from ray._private import utils

    our_handler = signal.getsignal(signal.SIGTERM)
    original, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda _: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = original
        signal.signal(signal.SIGTERM, our_handler)


@contextlib.contextmanager
def listen_on_loopback() -> Iterator[None]:
    """Makes a Ray that starts now use 127.0.0.1 as its node's address, so that no process of it listens elsewhere.

    `ray.init(_node_ip_address="127.0.0.1")` would be replaced by the host's own address. This switch is Ray's for
    macOS and Windows. Its environment variable is read at import, and would apply to joined clusters too.
    """
    from ray._private import ray_constants

    original, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = original


@contextlib.contextmanager
def skip_unused_processes() -> Iterator[None]:
    """Makes a Ray that starts now start faster.

    It has no autoscaler, since no node can be added, and no log monitor, since nobody reads it. Its workers start by a
    command of ours that imports less. The dashboard's libraries are not imported here just to check for them.
    """
    from ray._private import parameter, utils

    params, dependency_error = parameter.RayParams, utils.get_dashboard_dependency_error
    parameter.RayParams = functools.partial(
        params, no_monitor=True, include_log_monitor=False, setup_worker_path=worker_command.__file__
    )
    utils.get_dashboard_dependency_error = lambda: None
    try:
        yield
    finally:
        parameter.RayParams, utils.get_dashboard_dependency_error = params, dependency_error


GCS_IS_LOST = ("Failed to start GCS", "Timed out waiting for file")  # Ray's RuntimeErrors


@contextlib.contextmanager
def treat_timeout_as_lost() -> Iterator[None]:
    """Ray may give up on its own processes: on a busy machine, or because one was killed. A restart may succeed."""
    try:
        yield
    except Exception as error:
        if type(error) is Exception or str(error).startswith(GCS_IS_LOST):
            raise WorkerLost(f"Ray did not come up: {error}") from error
        raise
