"""The driver's one handle to all rollout engines."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from rlsys.config.schema import Config
from rlsys.errors import WorkerFailed, WorkerLost
from rlsys.types import Request, Sample
from workers.fleet.replaceable_workers import MAX_ATTEMPTS, ReplaceableWorkers
from workers.fleet.watchdog import Watchdog
from workers.rollout.generation import Generation
from workers.sync import SENDERS, Message
from workers.sync.weight_sync import WeightUpdate
from workers.turns.episode_workers import EpisodeWorkers
from workers.turns.pool import LostLife


class RolloutGroup:
    """All engines as one. Implements `rlsys.interfaces.Rollout`.

    An engine that died, stalled or has wrong weights is replaced. The replacement loads the current weights and gets
    the requests that the lost engine had not answered. `Generation` notices such an engine, `ReplaceableWorkers`
    replaces it.
    """

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        self.config, self.watchdog = config, watchdog
        self.workers = ReplaceableWorkers(
            [f"rollout-{i}" for i in range(config.rollout.engines)],
            spawn,
            watchdog,
            before_replace=self.require_replayable_weights,
            after_replace=self.resend_weights,
        )
        self.can_sleep = config.cluster.placement == "colocated"
        self.awake = True
        self.weight_update: WeightUpdate | None = None  # the last one; None: the engines have the model's own weights
        self.generation: Generation | None = None  # the running or the last one
        self.episode_workers: EpisodeWorkers | None = None

    def start(self, model: str, transport: str, longest_sequence: int) -> None:
        self.replayable = SENDERS[transport].replayable
        arguments, limit = (model, transport, longest_sequence), self.config.cluster.start_timeout_s
        self.workers.call("start", *arguments, doing="starting the engines", limit_s=limit, replay=True)

    def connect(self, info: Message) -> None:
        limit = self.config.cluster.start_timeout_s
        self.workers.call("connect", info, doing="connecting the engines", limit_s=limit, replay=True)

    def play_with(self, episode_workers: EpisodeWorkers) -> None:
        """From now on engines play the episodes that they are asked for, with these workers."""
        self.episode_workers = episode_workers
        lives, doing = episode_workers.lives, "naming the episode workers"
        self.workers.call("use_episode_workers", lives, doing=doing, replay=True)

    def replace_episode_workers(self, lost: Iterable[LostLife]) -> None:
        assert self.episode_workers
        self.episode_workers.replace(lost)
        self.play_with(self.episode_workers)

    def start_calls(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Starts the same call on every engine and returns object references by name, without waiting."""
        call = self.watchdog.cluster.call
        return {name: call(actor, method, *arguments) for name, actor in self.workers.actors.items()}

    # --- generation --------------------------------------------------------------------------------------------------

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        """Yields samples as they finish, from all engines."""
        yield from self.begin(requests).run()

    def begin(self, requests: list[Request]) -> Generation:
        max_running = self.config.rollout.max_sequences
        self.generation = Generation(requests, self.workers, self.watchdog, max_running, self.replace_episode_workers)
        return self.generation

    def stop_early(self) -> None:
        """Called between two lists of samples of `generate`."""
        assert self.generation is not None
        self.generation.stop_early()

    def samples_by_engine(self) -> dict[str, int]:
        """Counts the pending samples of each engine, and under "" the requests that wait for one.

        Any thread may call it.
        """
        if generation := self.generation:
            return generation.samples_by_engine()
        return {"": 0} | dict.fromkeys(self.workers.actors.copy(), 0)

    def wake(self) -> None:
        if self.can_sleep and not self.awake:
            self.workers.call("wake", doing="waking the engines")
        self.awake = True

    def sleep(self) -> None:
        if self.can_sleep and self.awake:
            self.workers.call("sleep", doing="putting the engines to sleep")
            self.awake = False

    # --- weights -----------------------------------------------------------------------------------------------------

    def load_weights(self, update: WeightUpdate, sends: dict[str, Any] | None = None) -> dict[str, Any]:
        """Has every engine load the weights, and every later replacement too.

        `sends` are the ranks' calls that finish only when the engines receive. Returns their answers.
        """
        self.weight_update = update
        max_attempts = MAX_ATTEMPTS if self.replayable else 1  # a replacement could not receive these weights
        answers = self.workers.call(
            "load_weights",
            update.parts,
            update.version,
            doing="loading weights",
            concurrent_calls=sends,
            max_attempts=max_attempts,
        )
        return {name: answers[name] for name in sends or {}}

    def verify_weights(self) -> None:
        """Has every engine compare its weights with the policy's.

        An engine with wrong ones fails its next `generate`.
        """
        if not (update := self.weight_update) or not update.fingerprints:
            return
        expected = update.version, update.fingerprints
        if self.config.cluster.device == "gpu":  # it needs memory that generation would take
            self.workers.call("verify_weights", *expected, doing="verifying weights")
        else:
            with self.replacements_paused():  # a replacement without weights yet verifies them by itself
                self.start_calls("verify_weights", *expected)

    def replacements_paused(self) -> AbstractContextManager[object]:
        """Returns a lock: while it is held, no engine is replaced. Waits for a replacement under way."""
        return self.workers.lock

    def require_replayable_weights(self, lost: dict[str, WorkerLost]) -> None:
        """Raises if a replacement could not be given the current weights."""
        if self.weight_update and not self.replayable:
            sentence, _, log = str(next(iter(lost.values()))).partition("\n")
            raise WorkerLost(f"{sentence}; this sync.transport cannot give the current weights to a replacement\n{log}")

    def resend_weights(self, names: list[str]) -> None:
        """Gives replacements the weights that the other engines have."""
        update = self.weight_update
        if update is None:
            return
        version = update.version
        try:
            self.workers.call("load_weights", update.parts, version, doing="loading weights again", only=names)
        except WorkerFailed as error:  # the sender's memory may be gone; ranks may be busy, so they are not asked
            raise WorkerLost(
                f"weights of version {version} cannot be given to {', '.join(names)} again: {error}"
            ) from error
        if not update.fingerprints:
            return
        expected = version, update.fingerprints
        results = self.workers.call("verify_weights", *expected, doing="verifying weights again", only=names)
        for name, difference in results.items():
            if difference:
                raise WorkerLost(
                    f"{name}, which was replaced, does not hold the policy's weights of version {version} either: "
                    f"{difference}. Their copy was damaged, which a new start mends, or vLLM does not load this architecture as "
                    "its files are: use another model."
                )
