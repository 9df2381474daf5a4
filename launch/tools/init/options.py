"""The options of `rlsys init`, and the hardware that they name."""

from dataclasses import dataclass

from launch.tools.estimates.devices import GPUS, Gpu, parse_gpu
from rlsys.errors import ConfigError


@dataclass(frozen=True)
class InitOptions:
    """The options of `rlsys init`."""

    model: str
    data: str
    gpus: int  # 0: train on this machine's CPUs
    gpu: str = "H100"
    reward: str = ""
    out: str = ""
    force: bool = False
    model_config: str = ""
    lora: int = 0  # rank of adapters; 0: all weights are trained

    @property
    def hardware(self) -> str:
        return f"{self.gpus} x {find_gpu(self.gpu).name}" if self.gpus else "this machine's CPUs"


def find_gpu(name: str) -> Gpu:
    if gpu := parse_gpu(name):
        return gpu
    raise ConfigError(
        f"--gpu {name}: it takes the name of one kind of GPU, such as H100, and --gpus how many there are. "
        f"Kinds: {', '.join(GPUS)}."
    )
