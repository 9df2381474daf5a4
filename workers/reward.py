"""The reward pool: Ray actors, each watching one process that runs the reward functions.

    driver ──samples──▶ RewardWorker (actor) ──one at a time──▶ reward process (user's code)
           ◀─verdicts──                      ◀──verdict, or silence past the deadline: the process is killed and replaced

Functions run outside the actor because only another process can be stopped for certain. Verdicts come back as JSON: nothing
the user's code sends is unpickled.
"""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlsys.config import Config, ConfigError
from rlsys.types import Prompt, Sample, Verdict
from workers.process import gather, settle

START_S = 120.0  # importing a user's file may take a while


class RewardWorker:
    def __init__(self, config: Config, index: int, logs: str):
        settle(f"reward-{index}", logs)
        self.config = config
        self.begin()

    def ready(self) -> None:
        """Waits until the reward functions are imported; raises what is wrong with them."""
        if self.connection is None:
            self.begin()
        self.await_import()

    def judge(self, facts: list[dict[str, Any]]) -> list[Verdict]:
        return [self.one(f) for f in facts]

    def one(self, facts: dict[str, Any]) -> Verdict:
        if self.connection is None:
            self.begin()
            self.await_import()
        assert self.connection is not None
        try:
            self.connection.send_bytes(pickle.dumps(facts))
            if not self.connection.poll(self.config.reward.timeout_s):
                self.end()
                return Verdict(
                    None,
                    failure="timeout",
                    detail=f"no verdict after reward.timeout_s = {self.config.reward.timeout_s:g} s; process killed",
                )
            answer = json.loads(self.connection.recv_bytes())
            return Verdict(answer["score"], answer["components"], answer["failure"], answer["detail"])
        except (EOFError, OSError, ValueError, KeyError, TypeError):
            code = self.end()
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Verdict(None, failure="crash", detail=f"the reward process ended: {how}")

    def begin(self) -> None:
        ours, theirs = socket.socketpair()
        arguments = [
            json.dumps(self.config.reward.functions),
            str(self.config.reward.memory_mb),
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "workers.reward_process", *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that what it starts can be killed with it
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONUNBUFFERED": "1"},
        )
        theirs.close()
        self.connection: Connection | None = Connection(ours.detach())
        self.imported = False

    def await_import(self) -> None:
        if self.imported:
            return
        assert self.connection is not None
        try:
            if not self.connection.poll(START_S):
                self.end()
                raise ConfigError(
                    f"reward.functions: importing {', '.join(self.config.reward.functions)} took more than {START_S:g} s."
                )
            problem = json.loads(self.connection.recv_bytes())
        except EOFError:
            code = self.end()
            raise ConfigError(
                f"reward.functions: importing {', '.join(self.config.reward.functions)} ended the process (exit code {code})."
            ) from None
        if problem:
            self.end()
            raise ConfigError(problem)
        self.imported = True

    def end(self) -> int:
        """Kills the process and all it started; returns its exit code."""
        assert self.connection is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.connection.close()
        self.connection = None
        return code


class RewardPool:
    """Deals samples to the workers. Implements `rlsys.interfaces.Rewards`."""

    def __init__(self, config: Config, actors: list[Any], logs: Path):
        self.config, self.actors, self.logs, self.turn = config, actors, logs, 0

    def start(self) -> None:
        calls = {f"reward-{i}": a.ready.remote() for i, a in enumerate(self.actors)}
        gather(calls, "starting the reward pool", self.config.cluster.start_timeout_s, self.logs)

    def judge(self, samples: list[Sample], prompts: dict[str, Prompt]) -> Future[list[Verdict]]:
        facts = [
            prompts[s.uid].row
            | {"prompt": prompts[s.uid].text, "completion": s.text, "finish": s.finish, "source": prompts[s.uid].source}
            for s in samples
        ]
        share = -(-len(facts) // len(self.actors))
        parts = [facts[i : i + share] for i in range(0, len(facts), share)]
        workers = [(self.turn + i) % len(self.actors) for i in range(len(parts))]
        calls = {f"reward-{w}": self.actors[w].judge.remote(part) for w, part in zip(workers, parts, strict=True)}
        self.turn += len(parts)
        return Verdicts(calls, self.config.cluster.call_timeout_s, self.logs)


class Verdicts(Future[list[Verdict]]):
    """Verdicts on their way; asked for once, when everything is sampled."""

    def __init__(self, calls: dict[str, Any], timeout_s: float, logs: Path):
        super().__init__()
        self.calls, self.timeout_s, self.logs = calls, timeout_s, logs

    def result(self, timeout: float | None = None) -> list[Verdict]:
        if not self.done():
            parts = gather(self.calls, "judging samples", timeout or self.timeout_s, self.logs)
            self.set_result([verdict for part in parts.values() for verdict in part])
        return super().result()
