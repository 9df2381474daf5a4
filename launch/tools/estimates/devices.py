"""GPUs by name: memory, bandwidth and peak FLOP/s, as their makers state them. And clusters of them, as text."""

import re
from dataclasses import dataclass

from rlsys.errors import ConfigError

GIB = 1 << 30
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """`Gpu("H100", memory_gib=79.1, bandwidth_gb_s=3350, bfloat16_tflops=989, float32_tflops=67)`"""

    name: str
    memory_gib: float  # as a program finds it: a little less than what is sold
    bandwidth_gb_s: float  # of its own memory
    bfloat16_tflops: float  # dense products
    float32_tflops: float

    def peak_flops(self, dtype: str) -> float:
        return (self.float32_tflops if dtype == "float32" else self.bfloat16_tflops) * 1e12


# A number after a dash is the memory of a GPU that is sold in several sizes.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("B200", 178.3, 8000, 2250, 80),
        Gpu("H200", 139.8, 4800, 989, 67),
        Gpu("H100", 79.1, 3350, 989, 67),
        Gpu("H800", 79.1, 3350, 989, 67),
        Gpu("H20", 95.1, 4000, 148, 44),
        Gpu("A100-80", 79.1, 2039, 312, 19.5),
        Gpu("A100-40", 39.4, 1555, 312, 19.5),
        Gpu("A800-80", 79.1, 2039, 312, 19.5),
        Gpu("L40S", 44.4, 864, 362, 91.6),
        Gpu("L40", 44.4, 864, 181, 90.5),
        Gpu("L4", 21.9, 300, 121, 30.3),
        Gpu("A10G", 22.0, 600, 70, 35),
        Gpu("A6000", 47.4, 768, 155, 38.7),
        Gpu("RTX5090", 31.3, 1792, 210, 105),
        Gpu("RTX4090", 23.5, 1008, 165, 82.6),
        Gpu("RTX3090", 23.5, 936, 71, 35.6),
    )
}
DEFAULT_SIZES = {"A100": "A100-80", "A10": "A10G"}  # of names without a size
VENDOR_WORDS = ("NVIDIA", "TESLA", "GEFORCE", "RTX", "SXM", "SXM4", "SXM5", "PCIE", "HBM2E", "HBM3", "GPU", "GPUS")
TIMES = r"\s*[x*×]\s*"
CLUSTER_PATTERNS = (
    rf"(?:(?P<nodes>\d+){TIMES})?(?P<gpus>\d+)(?:{TIMES}|\s+)(?P<kind>.+)",
    rf"(?P<kind>.+?)(?:\s*:\s*|{TIMES})(?P<gpus>\d+)",
)


@dataclass(frozen=True)
class NodeSpec:
    """`NodeSpec(gpus=8, gpu=GPUS["H100"], cpus=64, memory=2 << 40)`"""

    gpus: int
    gpu: Gpu | None
    cpus: float | None = None  # None: not known, and taken to be enough
    memory: int = 0  # bytes of the host; 0: not known
    name: str = ""
    ambiguous_name: str = ""  # the name of its GPUs, if several sizes have that name; `gpu` is the smallest
    takes_cpu_workers: bool = True  # false for a node to which Ray gives no CPUs


def matching_gpus(name: str) -> list[Gpu]:
    """Returns the GPUs that a name may stand for, the smallest first.

    "NVIDIA A100-SXM4-80GB" is the A100-80; "A100" is the A100-40 or the A100-80.
    """
    words = re.split("[^A-Z0-9]+", name.upper())
    sizes = [int(word.rstrip("GB")) for word in words if re.fullmatch(r"\d{2,3}G?B?", word)]
    matches = [gpu for gpu in GPUS.values() if {kind(gpu), kind(gpu).removeprefix("RTX")} & set(words)]
    matches.sort(key=lambda gpu: gpu.memory_gib)
    return [gpu for gpu in matches if gpu.memory_gib <= min(sizes)][-1:] if sizes else matches


def kind(gpu: Gpu) -> str:
    """Returns its name without the size: "A100" of the A100-80."""
    return gpu.name.partition("-")[0]


def find_gpu(name: str) -> Gpu | None:
    """Returns the smallest GPU that the name may stand for."""
    return next(iter(matching_gpus(name)), None)


def parse_gpu(text: str) -> Gpu | None:
    """Returns the GPU that a user means, if the whole text is its name.

    "H100", "a100", "A100 80GB" and "NVIDIA RTX 4090" are names, "H100:8" is not.
    """
    words = [word for word in re.split(r"[\s_-]+", text.strip().upper()) if word not in VENDOR_WORDS]
    gpu = find_gpu(DEFAULT_SIZES.get(" ".join(words), " ".join(words)))
    if gpu is None:
        return None
    sizes = [word for word in words if word not in (kind(gpu), kind(gpu).removeprefix("RTX"))]
    fits = all(re.fullmatch(r"\d{2,3}G?B?", s) and 0.85 * int(s.rstrip("GB")) <= gpu.memory_gib for s in sizes)
    return gpu if fits else None


def parse_cluster(text: str) -> list[NodeSpec]:
    """Reads 8xH100, 8 H100, H100:8, 2x8xA100-80 (nodes x GPUs x kind), H100. Without nodes, a node has at most eight GPUs."""
    if gpu := parse_gpu(text):
        return split_into_nodes(1, gpu)
    for pattern in CLUSTER_PATTERNS:
        match = re.fullmatch(pattern, text.strip(), re.IGNORECASE)
        if match and (gpu := parse_gpu(match["kind"])):
            counts = {name: int(number) for name, number in match.groupdict().items() if name != "kind" and number}
            if 0 in counts.values():
                break
            if "nodes" in counts:
                return [NodeSpec(counts["gpus"], gpu)] * counts["nodes"]
            return split_into_nodes(counts["gpus"], gpu)
    raise ConfigError(
        f"--cluster {text}: it takes GPUs and their kind, as in 8xH100, 8 H100 or H100:8, or NODES x GPUS x KIND, "
        f"as in 2x8xA100-80. Kinds: {', '.join(GPUS)}."
    )


def split_into_nodes(gpus: int, gpu: Gpu) -> list[NodeSpec]:
    """Returns nodes of eight GPUs, and the rest in a last one."""
    full, rest = divmod(gpus, GPUS_PER_NODE)
    return [NodeSpec(GPUS_PER_NODE, gpu)] * full + [NodeSpec(rest, gpu)] * bool(rest)


def peak_flops(device: str, dtype: str) -> float | None:
    """Returns the peak FLOP/s of a GPU by name, such as H100 or "NVIDIA H200"; None for one that is not listed."""
    gpu = find_gpu(device)
    return gpu.peak_flops(dtype) if gpu else None
