"""How the driver reaches its workers: through Ray (`ray_cluster.py`), or through a simulation in tests."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Actor = Any  # a worker's process
Call = Any  # of an actor's method; it may be an argument of another call, which gets the answer in its place
Receive = Callable[[Any], None]


class End:
    """What a stream gives after its last answer."""


END = End()


class CallFailed(Exception):
    """A call that has no answer."""

    def __init__(self, text: str, raised: BaseException | None = None, *, died: bool = True, node_died: bool = False):
        """`raised`: what the worker raised, or None if it was lost; then it has surely `died`, or cannot be reached."""
        super().__init__(text)
        self.raised, self.died, self.node_died = raised, died, node_died


class Cluster(Protocol):
    def call(self, actor: Actor, method: str, *arguments: Any) -> Call:
        """Calls a method, without waiting."""
        ...

    def wait(self, calls: Sequence[Call], count: int, timeout_s: float) -> list[Call]:
        """Waits until `count` of the calls are done, at most for `timeout_s`. Returns at most `count` that are done."""
        ...

    def answer(self, call: Call) -> Any:
        """Waits for what a call returns. Raises `CallFailed`."""
        ...

    def ask(self, actor: Actor, method: str, *arguments: Any, receive: Receive) -> None:
        """Calls a method. `receive` gets its answer or a `CallFailed`, on any thread."""
        ...

    def stream(self, actor: Actor, method: str, *arguments: Any, receive: Receive) -> None:
        """Calls a generator. `receive` gets its answers as they come, then `END` or a `CallFailed`, on any thread."""
        ...

    def tell(self, actor: Actor, method: str, *arguments: Any) -> None:
        """Calls a method whose answer nobody needs."""
        ...

    def kill(self, actor: Actor) -> None:
        """Ends an actor for good, if it can be reached."""
        ...
