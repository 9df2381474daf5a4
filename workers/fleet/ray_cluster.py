"""The only file of `workers` that imports Ray."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import NodeDiedError, RayActorError, RayError, RayTaskError

from workers.fleet.cluster import END, Actor, Call, CallFailed, Receive

AnswerLost = RayError  # what reading another worker's answer raises in a worker


class RayCluster:
    """Implements `Cluster`."""

    def call(self, actor: Actor, method: str, *arguments: Any) -> Call:
        return getattr(actor, method).remote(*arguments)

    def wait(self, calls: Sequence[Call], count: int, timeout_s: float) -> list[Call]:
        return ray.wait(list(calls), num_returns=count, timeout=timeout_s)[0]

    def answer(self, call: Call) -> Any:
        try:
            return ray.get(call)
        except RayError as error:
            raise call_failed(error) from error

    def ask(self, actor: Actor, method: str, *arguments: Any, receive: Receive) -> None:
        def on_done(done: "Future[Any]") -> None:
            error = done.exception()
            receive(done.result() if error is None else call_failed(error) if isinstance(error, RayError) else error)

        try:
            getattr(actor, method).remote(*arguments).future().add_done_callback(on_done)
        except RayError as error:
            receive(call_failed(error))

    def stream(self, actor: Actor, method: str, *arguments: Any, receive: Receive) -> None:
        answers = getattr(actor, method).options(num_returns="streaming").remote(*arguments)

        def read() -> None:
            try:
                for answer in answers:
                    receive(ray.get(answer))
                receive(END)
            except RayError as error:
                receive(call_failed(error))
            except Exception as error:
                receive(error)

        threading.Thread(target=read, daemon=True, name=f"read {method}").start()

    def tell(self, actor: Actor, method: str, *arguments: Any) -> None:
        getattr(actor, method).options(num_returns=0).remote(*arguments)

    def kill(self, actor: Actor) -> None:
        with contextlib.suppress(RayError):
            ray.kill(actor)


def call_failed(error: RayError) -> CallFailed:
    text = str(error)
    if isinstance(error, RayTaskError):
        return CallFailed(text, error.cause or error)
    return CallFailed(text, died=isinstance(error, RayActorError), node_died=lost_with_its_node(error))


def lost_with_its_node(error: RayError) -> bool:
    """Returns whether more than the process was lost. That an actor does not answer may mean either."""
    if isinstance(error, NodeDiedError) or "its node has died" in str(error):
        return True
    return isinstance(error, RayActorError) and error.preempted


# --- nodes ----------------------------------------------------------------------------------------------------------------


def is_connected() -> bool:
    return bool(ray.is_initialized())


def node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def node_address() -> str:
    return str(ray.util.get_node_ip_address())


def run_on_node(node: str, function: Callable[..., Any], *arguments: Any) -> Call:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=strategy).remote(*arguments)


def concurrency_group(name: str) -> Callable[[Any], Any]:
    """Returns a decorator for an actor's method: calls of one group run in the order in which they were made."""
    return ray.method(concurrency_group=name)  # type: ignore[no-any-return]
