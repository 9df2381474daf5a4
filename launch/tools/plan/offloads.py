"""What a configuration offloads to main memory, and what GPUs would hold without that: nothing has to move that fits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from launch.roles import count_gpus
from launch.tools.fitting.fit import TIGHT, Fit, GpuUse
from launch.tools.plan.suggestions import with_settings
from rlsys.config.schema import Config


@dataclass(frozen=True)
class Offload:
    """An option that offloads something, and the fit without it.

    `Offload("policy.offload_optimizer", fit)`
    """

    option: str
    without: Fit

    @property
    def fullest(self) -> GpuUse:
        assert self.without.tightest
        return self.without.tightest

    @property
    def is_needed(self) -> bool:
        return not self.without.fits or self.fullest.needed > (1 - TIGHT) * self.fullest.capacity


def find_offloads(fit: Fit, try_fit: Callable[[Config], Fit]) -> list[Offload]:
    """Tries each option alone."""
    if not fit.gpus:
        return []
    return [Offload(option, try_fit(with_settings(fit.config, {option: False}))) for option in offloads_of(fit.config)]


def offloads_of(c: Config) -> Iterator[str]:
    if c.cluster.device == "cpu":
        return
    for option in ("offload_optimizer", "offload_params", "offload_activations"):
        if getattr(c.policy, option):
            yield f"policy.{option}"
    if c.reference.offload and count_gpus("reference", c):
        yield "reference.offload"
