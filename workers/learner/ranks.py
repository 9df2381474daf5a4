"""The ranks of one model under DeepSpeed: the actor that each rank is, and the driver's handle to all of them.

Ranks take part in collectives and hold shards of one state. So every call goes to all of them at the same time. If one
is lost, all are, and the run goes back to its last checkpoint.
"""

from collections.abc import Callable, Iterable
from typing import Any

from rlsys.config.schema import Config
from rlsys.runs.timeline import Facts, pack_facts
from rlsys.types import Pack
from workers.fleet.ray_cluster import node_address
from workers.fleet.watchdog import Watchdog
from workers.learner.files.checkpoint_writer import CheckpointWriter, SaveResult
from workers.learner.zero import import_deepspeed
from workers.start.ports import free_port
from workers.start.worker_setup import setup_worker_process


class LearnerRank:
    """What every rank has, of the policy, of the critic, and of the check of gradients."""

    def __init__(self, config: Config, rank: int, logs: str, *, role: str, ranks: int):
        setup_worker_process(f"{role}-{rank}", logs)
        self.config, self.rank, self.ranks = config, rank, ranks
        self.writer = CheckpointWriter()
        import_deepspeed(config, ranks)

    def rendezvous_address(self) -> tuple[str, int]:
        """Returns host and port where the ranks can meet. The driver asks rank 0."""
        return node_address(), free_port()

    def join(self, address: str, port: int) -> None:
        """Joins the other ranks."""
        from workers.learner.rendezvous import join_process_group

        c = self.config
        join_process_group(
            c.cluster.device,
            self.rank,
            self.ranks,
            address,
            port,
            seed=c.run.seed,
            timeout_s=c.cluster.start_timeout_s,
        )

    def saved_files(self, wait: bool) -> SaveResult:
        return self.writer.result(wait)


def share_facts(rank: LearnerRank, packs: Iterable[Pack], *others: Any) -> Facts:
    """Returns `pack_facts` of a rank's part of its packs."""
    sharing = rank.config.policy.sequence_parallel
    facts = pack_facts(rank, packs)
    return facts | {name: facts[name] // sharing for name in ("tokens", "pairs")}


class LearnerGroup:
    """All ranks of one model, for the driver. `LearnerGroup("policy", 2, …).call_all("save", folder)`

    With policy.sequence_parallel, this number of neighboring ranks share their packs, and count as one in `ranks`.
    """

    def __init__(self, role: str, ranks: int, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        self.role, self.config, self.watchdog = role, config, watchdog
        self.actors = [spawn(f"{role}-{i}") for i in range(ranks)]
        self.share_packs(config.policy.sequence_parallel)
        self.lock = watchdog.threads.lock()  # calls reach all ranks in the same order, whichever threads make them

    def share_packs(self, sharing: int) -> None:
        """From now on `sharing` ranks get the same packs."""
        self.sharing, self.ranks = sharing, len(self.actors) // sharing

    def start_ranks(self, *arguments: Any) -> list[Any]:
        """Asks rank 0 for an address, then starts all ranks, which meet there. Returns their answers."""
        limit, doing = self.config.cluster.start_timeout_s, f"starting the {self.role}"
        first = {f"{self.role}-0": self.watchdog.cluster.call(self.actors[0], "rendezvous_address")}
        [address] = self.watchdog.gather(first, doing, limit).values()
        return self.call_all("start", *address, *arguments, doing=doing, timeout_s=limit)

    def start_calls(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Makes the same call on every rank. Returns references to the answers by name, without waiting."""
        with self.lock:
            call = self.watchdog.cluster.call
            return {f"{self.role}-{i}": call(actor, method, *arguments) for i, actor in enumerate(self.actors)}

    def call_all(self, method: str, *arguments: Any, doing: str = "", timeout_s: float = 0) -> list[Any]:
        """Makes the same call on every rank. Returns the answers by rank."""
        return self._wait(self.start_calls(method, *arguments), doing or f"{self.role} {method}", timeout_s)

    def scatter(self, method: str, packs: list[list[Pack]], *arguments: Any) -> list[Any]:
        """Makes the same call on every rank, each with its own packs. Returns the answers by rank.

        Ranks that share packs answer alike, so one answer of them is returned.
        """
        packs = [packs_of_rank for packs_of_rank in packs for _ in range(self.sharing)]
        with self.lock:
            calls = {
                f"{self.role}-{i}": self.watchdog.cluster.call(actor, method, packs_of_rank, *arguments)
                for i, (actor, packs_of_rank) in enumerate(zip(self.actors, packs, strict=True))
            }
        return self._wait(calls, f"{self.role} {method}", 0)[:: self.sharing]

    def _wait(self, calls: dict[str, Any], doing: str, timeout_s: float) -> list[Any]:
        return list(self.watchdog.gather(calls, doing, timeout_s).values())
