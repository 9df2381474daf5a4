"""What a configuration offloads to main memory, and what GPUs would hold without that: nothing has to move that fits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from launch.roles import count_gpus
from launch.tools.fitting.fit import TIGHT, Fit, GpuUse
from launch.tools.plan.suggestions import Settings, with_settings
from rlsys.config.schema import Config


@dataclass(frozen=True)
class Offload:
    """An option that offloads something, and the fit without it.

    `Offload("policy.offload optimizer", fit)`
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
    """Tries each part alone."""
    if not fit.gpus:
        return []
    return [Offload(part, try_fit(with_settings(fit.config, without))) for part, without in offloads_of(fit.config)]


def offloads_of(c: Config) -> Iterator[tuple[str, Settings]]:
    """What is offloaded, and the settings without it."""
    if c.cluster.device == "cpu":
        return
    for part in c.policy.offload:
        yield f"policy.offload {part}", {"policy.offload": [other for other in c.policy.offload if other != part]}
    if c.reference.place == "offload" and count_gpus("reference", c):
        yield "reference.place offload", {"reference.place": "whole"}
