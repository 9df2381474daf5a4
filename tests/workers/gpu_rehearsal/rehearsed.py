"""Policy ranks and rollout engines as they are, on a fake GPU."""

import os
import sys
import time
from typing import Any

from reusable_ranks import ReusablePolicyRank

from rlsys.config.schema import Config
from workers.rollout import rollout_worker
from workers.rollout.engine_settings import engine_arguments
from workers.rollout.rollout_worker import RolloutWorker
from workers.sync import Message


class RehearsedRank(ReusablePolicyRank):
    def __init__(self, config: Config, rank: int, logs: str, folder: str):
        super().__init__(config, rank, logs)
        sys.path.insert(0, folder)
        import fake_gpu

        fake_gpu.install(lambda: f"gpu-{rank}")

    def plant(self, fault: str) -> None:
        import fake_gpu

        fake_gpu.PLANTED.append(fault)


class RehearsedEngine(RolloutWorker):
    """Engine `index` has the GPUs that follow those of the engines before it."""

    def __init__(self, config: Config, index: int, logs: str, folder: str):
        super().__init__(config, index, logs)
        parallel = config.rollout.tensor_parallel
        os.environ["FAKE_GPUS"] = ",".join(f"gpu-{index * parallel + i}" for i in range(parallel))
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        sys.path.insert(0, folder)
        rollout_worker.engine_arguments = lambda *a: (
            engine_arguments(*a)
            | {  # type: ignore[attr-defined]
                "worker_extension_cls": "fake_extension.Extension"
            }
        )
        self.late_s = 0.0

    def be_late(self, seconds: float) -> None:
        self.late_s = seconds

    def forget_difference(self) -> None:
        self.weights_error = ""

    async def connect(self, info: Message) -> None:
        time.sleep(self.late_s)
        await super().connect(info)

    async def call(self, method: str, **arguments: Any) -> Any:
        return (await self.engine.call_workers(method, **arguments))[0]
