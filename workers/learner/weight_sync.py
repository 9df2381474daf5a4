"""The driver's part of a sync: it has ranks send, and engines load and verify.

The docstring of workers/sync numbers all steps of the exchange.
"""

from dataclasses import replace
from typing import Any

from rlsys.errors import ConfigError, WorkerFailed
from workers.fleet.watchdog import failure_severity
from workers.learner.ranks import LearnerGroup
from workers.rollout.rollout_group import RolloutGroup, WeightUpdate
from workers.sync import SENDERS
from workers.sync.transport import PartRefs
from workers.sync.verify import combine_ranks

MEETING_S = 240.0  # vLLM's store of addresses waits for 300 s, and its error does not say who is missing


class WeightSync:
    """Brings the policy's weights to all engines. `WeightSync(policy, engines, "shared_memory").run(version=3)`"""

    def __init__(self, ranks: LearnerGroup, engines: RolloutGroup, transport: str):
        """Connects ranks and engines."""
        self.ranks, self.engines, self.watchdog = ranks, engines, ranks.watchdog
        self.in_flight = ranks.config.pipeline.in_flight
        self.concurrent = SENDERS[transport].needs_concurrent_receive
        self.reuses_memory = SENDERS[transport].reuses_memory
        self.info = ranks.call_all("connection_info")[0]
        limit = ranks.config.cluster.start_timeout_s
        if self.concurrent:
            limit = min(limit, MEETING_S)
            calls = ranks.start_calls("connect", self.info) | engines.start_calls("connect", self.info)
            self.watchdog.gather(calls, "connecting policy and engines", limit)
        else:
            ranks.call_all("connect", self.info, timeout_s=limit)
            engines.connect(self.info)
        if "merging" in self.info and ranks.config.sync.verify:
            self.prove_merging()

    def prove_merging(self) -> None:
        """Has engines merge random adapters, and raises unless each then has the policy's weights."""
        self.ranks.call_all("randomize_adapters")
        self._transfer(0)
        self.ranks.call_all("restore_adapters")
        differences = self.engines.compare_weights()
        self.engines.weight_update = None  # these are not weights to sample with
        for name, difference in differences.items():
            if difference:
                raise ConfigError(
                    f"sync.what adapter: {name} does not merge adapters as the policy does: {difference}. Both need the same "
                    "model files and the same kind of processor; sync.what all sends merged weights."
                )

    def run(self, version: int) -> None:
        """Has every engine load the weights, and verify them before a sample leaves it."""
        self._transfer(version)
        self.engines.verify_weights()

    def _transfer(self, version: int) -> None:
        if not self.in_flight:
            # No engine is running that could be lost and need the last weights again: an object store may free them.
            self.engines.weight_update = None
        if self.engines.can_sleep:
            self.ranks.call_all("free_memory")  # before an engine wakes and takes its own
        try:
            self._send_and_load(version)
        except WorkerFailed as error:
            raise self._root_cause(error) from None
        self.ranks.call_all("finish_send")

    def _send_and_load(self, version: int) -> None:
        """Engines load part by part while the ranks send. In flight they generate meanwhile and load afterwards, if the
        transport allows it."""
        load_while_sending = self.concurrent or self.reuses_memory or not self.in_flight
        # An engine that replaces a lost one has the last weights before this begins, or gets these.
        with self.engines.replacements_paused():
            with self.ranks.lock:  # no other call comes between two parts
                parts = [self.start_part(i) for i in range(self.info["parts"])]
                sending = self.ranks.start_calls("fingerprints")
            update = WeightUpdate(parts, version, {})
            if load_while_sending:
                answers = self.engines.load_weights(update, sending)
            else:
                answers = self.watchdog.gather(sending, "sending weights")
            update = replace(update, fingerprints=combine_ranks(list(answers.values()), self.info["by_position"]))
            self.engines.weight_update = update
        if not load_while_sending:
            self.engines.load_weights(update)

    def start_part(self, part: int) -> PartRefs:
        """Has all ranks send a part."""
        wait = self.reuses_memory and part > 0
        loaded = self.engines.start_calls("wait_until_loaded", part - 1) if wait else {}
        return list(self.ranks.start_calls("send", part, *loaded.values()).values())

    def _root_cause(self, error: WorkerFailed) -> Exception:
        """Returns the failure that explains the others: the first, or that of a rank that died, for which others waited."""
        failures: list[Any] = self.watchdog.collect_related_failures(
            self.ranks.start_calls("finish_send"), "sending weights"
        )
        return max([error, *failures], key=failure_severity)
