"""The driver's part of a sync: it has ranks send, and engines load and verify.

The numbers are those of the steps in the docstring of workers/sync.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlsys.config.schema import Config
from rlsys.errors import WorkerFailed
from workers.fleet.watchdog import Watchdog, failure_severity
from workers.sync import SENDERS
from workers.sync.transport import Message, PartRefs
from workers.sync.verify import combine_ranks

MEETING_S = 240.0  # vLLM's store of addresses waits for 300 s, and its error does not say who is missing


@dataclass(frozen=True)
class WeightUpdate:
    """One version of the weights on its way to the engines."""

    parts: list[PartRefs]  # what the ranks answer for each bucket
    version: int
    fingerprints: dict[str, str]  # the policy's, by tensor, once everything is sent; empty without `sync.verify`


class Ranks(Protocol):
    """The policy's ranks, all at once. `start_calls` returns references to answers by name, and does not wait."""

    config: Config
    watchdog: Watchdog
    lock: Any  # while it is held, no other call comes between

    def start_calls(self, method: str, *arguments: Any) -> dict[str, Any]: ...
    def call_all(self, method: str, *arguments: Any, doing: str = "", timeout_s: float = 0) -> list[Any]: ...


class Engines(Protocol):
    """All engines at once."""

    weight_update: WeightUpdate | None  # the last one, which a replacement gets too
    can_sleep: bool

    def connect(self, info: Message) -> None: ...
    def start_calls(self, method: str, *arguments: Any) -> dict[str, Any]: ...
    def load_weights(self, update: WeightUpdate, sends: dict[str, Any] | None = None) -> dict[str, Any]: ...
    def verify_weights(self) -> None: ...
    def replacements_paused(self) -> AbstractContextManager[object]: ...


class WeightSync:
    """Brings the policy's weights to all engines. `WeightSync(policy, engines, "shared_memory").run(version=3)`"""

    def __init__(self, ranks: Ranks, engines: Engines, transport: str):
        self.ranks, self.engines, self.watchdog = ranks, engines, ranks.watchdog
        self.in_flight, self.sender = ranks.config.pipeline.in_flight, SENDERS[transport]
        self.info = ranks.call_all("connection_info")[0]  # 1, 2
        self.connect()

    def run(self, version: int) -> None:
        """Has every engine load the weights, and verify them before a sample leaves it."""
        self.transfer(version)
        self.engines.verify_weights()  # 9

    def connect(self) -> None:
        """3: Connects ranks and engines, at the same time if one waits for the other."""
        limit = self.ranks.config.cluster.start_timeout_s
        if self.sender.needs_concurrent_receive:
            calls = self.ranks.start_calls("connect", self.info) | self.engines.start_calls("connect", self.info)
            self.watchdog.gather(calls, "connecting policy and engines", min(limit, MEETING_S))
        else:
            self.ranks.call_all("connect", self.info, timeout_s=limit)
            self.engines.connect(self.info)

    def transfer(self, version: int) -> None:
        """4 to 8. In flight, engines generate while ranks send, and load afterwards, if the transport allows it."""
        if not self.in_flight:
            # No engine is running that could be lost and need the last weights again: an object store may free them.
            self.engines.weight_update = None
        if self.engines.can_sleep:
            self.ranks.call_all("free_memory")  # before an engine wakes and takes its own
        load_while_sending = self.sender.needs_concurrent_receive or self.sender.reuses_memory or not self.in_flight
        try:
            # An engine that replaces a lost one has the last weights before this begins, or gets these.
            with self.engines.replacements_paused():
                update, sending = self.start_sending(version)
                if load_while_sending:
                    answers = self.engines.load_weights(update, sending)
                else:
                    answers = self.watchdog.gather(sending, "sending weights")
                update = replace(update, fingerprints=combine_ranks(list(answers.values()), self.info["by_position"]))
                self.engines.weight_update = update
            if not load_while_sending:
                self.engines.load_weights(update)
        except WorkerFailed as error:
            raise self.root_cause(error) from None
        self.ranks.call_all("finish_send")  # 8

    def start_sending(self, version: int) -> tuple[WeightUpdate, dict[str, Any]]:
        """4: Has all ranks send all buckets. Returns the references for the engines, and those to fingerprints."""
        with self.ranks.lock:  # no other call comes between two buckets
            parts = [self.start_bucket(number) for number in range(self.info["parts"])]
            return WeightUpdate(parts, version, {}), self.ranks.start_calls("fingerprints")

    def start_bucket(self, number: int) -> PartRefs:
        wait = self.sender.reuses_memory and number > 0
        loaded = self.engines.start_calls("wait_until_loaded", number - 1) if wait else {}
        return list(self.ranks.start_calls("send", number, *loaded.values()).values())

    def root_cause(self, error: WorkerFailed) -> Exception:
        """Returns the failure that explains the others: the first, or that of a rank that died, for which others waited."""
        failures: list[Any] = self.watchdog.collect_related_failures(
            self.ranks.start_calls("finish_send"), "sending weights"
        )
        return max([error, *failures], key=failure_severity)
