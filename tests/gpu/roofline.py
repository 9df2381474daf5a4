"""What the phases of a step should take on H100s by count, what `rlsys plan` reckons with, and what was measured.

    python tests/gpu/roofline.py

Every GPU has 32 prompts of 512 tokens, with eight samples of 512 tokens each. By count a phase moves its bytes at the
GPU's stated bandwidth, or computes its products at the stated peak, whichever takes longer.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

from rlsys.config.methods import ReferenceConfig
from rlsys.config.schema import ClusterConfig, Config, PolicyConfig, RolloutConfig, SyncConfig, TrainerConfig
from rlsys.estimates.devices import GPUS, Gpu
from rlsys.estimates.memory import SequenceLengths
from rlsys.estimates.step_time import estimate_step
from rlsys.models.known_shapes import look_up_shape
from rlsys.models.shapes import ModelShape

RESULTS = Path(__file__).parent / "results" / "h200_table.json"
H100 = GPUS["H100"]
PROMPTS, GROUP, TOKENS = 32, 8, 512  # per GPU; tokens of a prompt, and of a completion
NVLINK, NETWORK = 450e9, 50e9  # bytes/s of a GPU in one direction: within a node, and between nodes
GPUS_OF_NODE = 8
MODELS = {"0.5B": 1, "1.5B": 1, "7B": 1, "32B": 4}  # GPUs of an engine
TRAINED_BYTES = 16  # of a parameter: weight and gradient in bfloat16, and Adam's state in float32


@dataclass(frozen=True)
class Job:
    """A model on a number of GPUs, which engines and ranks share."""

    model: ModelShape
    gpus: int
    parts: int  # GPUs of an engine
    gpu: Gpu = H100

    @property
    def link(self) -> float:
        return NVLINK if self.gpus <= GPUS_OF_NODE else NETWORK

    @property
    def fits(self) -> bool:
        """True if weights, gradients and Adam's state do, spread over all GPUs."""
        return (
            self.gpus >= self.parts
            and TRAINED_BYTES * self.model.parameters / self.gpus < 0.9 * self.gpu.memory_gib * 2**30
        )

    def phases(self) -> dict[str, float]:
        """Seconds by count."""
        model, peak, bandwidth = self.model, self.gpu.peak_flops("bfloat16"), self.gpu.bandwidth_gb_s * 1e9
        sequences = PROMPTS * GROUP * self.parts  # of an engine
        read = 2 * model.active_parameters + sequences * 1.5 * TOKENS * model.kv_bytes_per_token(2)
        token = max(read / bandwidth, 2 * model.active_parameters * sequences / peak) / self.parts
        prefill = PROMPTS * model.flop_counter.forward_flops(0, TOKENS, 1) / peak
        passes = PROMPTS * model.flop_counter.group_flops(TOKENS, [TOKENS] * GROUP) / peak
        others = (self.gpus - 1) / self.gpus
        return {
            "decode": TOKENS * token,
            "prefill": prefill,
            "update": 3 * passes,
            "exchange": 4 * model.parameters * others / self.link,
            "sync": 2 * 2 * model.parameters / bandwidth
            if self.gpus <= GPUS_OF_NODE
            else 2 * model.parameters / self.link,
        }

    def planned(self) -> float:
        """Seconds of a step as `rlsys plan` estimates them."""
        config = Config(
            cluster=ClusterConfig(device="gpu", placement="colocated"),
            trainer=TrainerConfig(prompts_per_step=PROMPTS * self.gpus, samples_per_prompt=GROUP, updates_per_step=1),
            rollout=RolloutConfig(
                dtype="bfloat16",
                engines=self.gpus // self.parts,
                tensor_parallel=self.parts,
                max_sequences=PROMPTS * GROUP * self.parts,
                gpu_memory=0.6,
            ),
            policy=PolicyConfig(
                ranks=self.gpus, dtype="bfloat16", zero_stage=3 if self.parts > 1 else 2, gradient_checkpointing=True
            ),
            reference=ReferenceConfig(kl_coef=0.0),
            sync=SyncConfig(transport="cuda_ipc"),
        )
        config = replace(config, rollout=replace(config.rollout, enforce_eager=False))
        return estimate_step(config, self.model, SequenceLengths(TOKENS, TOKENS), self.gpu, TOKENS).step


def measured() -> dict[str, float]:
    """Seconds of a step on one GPU, by model in lower case."""
    rows = json.loads(RESULTS.read_text())["rows"]
    return {row["model"]: row["step_s"] for row in rows}


def format_row(name: str, gpus: int) -> list[str]:
    shape = look_up_shape(f"Qwen/Qwen2.5-{name}")
    assert shape
    job = Job(shape, gpus, MODELS[name])
    if not job.fits:
        return [name, str(gpus), *["–"] * 8]
    phases = job.phases()
    step, planned = sum(phases.values()), job.planned()
    seen = measured().get(name.lower()) if gpus == 1 else None
    tokens = PROMPTS * GROUP * TOKENS
    cells = [f"{seconds:.2f}" for seconds in phases.values()]
    return [
        name,
        str(gpus),
        *cells,
        f"{step:.1f} ({tokens / step:,.0f})",
        f"{planned:.1f}",
        f"{seen:.1f}" if seen else "–",
    ]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    head = [
        "model",
        "GPUs",
        "decode",
        "prefill",
        "update",
        "exchange",
        "sync",
        "step (tokens/s per GPU)",
        "plan",
        "one H200",
    ]
    print("|" + "|".join(head) + "|\n|" + "---|" * len(head))
    for name in MODELS:
        for gpus in (1, 8, 64):
            print("|" + "|".join(format_row(name, gpus)) + "|")


if __name__ == "__main__":
    main()
