"""Workers that are plain objects of the test, instead of Ray's actors."""

import threading
from typing import Any

from workers.fleet.cluster import END, CallFailed, Receive


class PlainCluster:
    """Streams run on threads of their own, as in Ray. A method that raises `CallFailed` is a process that died."""

    def stream(self, actor: Any, method: str, *arguments: Any, receive: Receive) -> None:
        def read() -> None:
            try:
                for answer in getattr(actor, method)(*arguments):
                    receive(answer)
                receive(END)
            except CallFailed as error:
                receive(error)

        threading.Thread(target=read, daemon=True).start()

    def tell(self, actor: Any, method: str, *arguments: Any) -> None:
        getattr(actor, method)(*arguments)
