"""What checkpoints take on disk."""

from dataclasses import dataclass

from launch.tools.estimates.adapters import saved_state_bytes, trained_parameters
from launch.tools.estimates.memory import WIDTH
from rlsys.config.schema import Config
from rlsys.models.shapes import ModelShape


@dataclass(frozen=True)
class DiskSpace:
    """Bytes of a checkpoint, and how many checkpoints there are at a time, with the one being written."""

    weights: float
    optimizer: float
    critic: float
    checkpoints: int
    reference: float = 0.0  # a refreshed one

    @property
    def checkpoint(self) -> float:
        return self.weights + self.optimizer + self.critic + self.reference

    @property
    def run(self) -> float:
        return self.checkpoint * self.checkpoints


def disk_space(c: Config, model: ModelShape) -> DiskSpace:
    parameters = trained_parameters(c, model)
    width = WIDTH[c.policy.dtype]
    weights, optimizer = width * parameters, saved_state_bytes(c) * parameters
    written = 1 + (c.trainer.steps - 1) // c.checkpoint.every if c.checkpoint.every else 1
    most = (
        c.checkpoint.keep_last + bool(c.checkpoint.keep_best) + 1
    )  # an old one is removed after the new one is written
    checkpoints = min(written, most) if c.checkpoint.keep_last else written
    critic = float(model.parameters * (width + 8 + 4 * (width == 2))) * (c.algorithm.advantage == "gae")
    refreshed = bool(c.reference.kl_coef and c.reference.refresh_every)
    return DiskSpace(weights, optimizer, critic, checkpoints, weights * refreshed)
