"""What the phases of a step should take on H100s by count, what our design adds, and what others and we measured.

python tests/gpu/roofline.py --write      writes results/roofline.txt
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

from table import trained_share

from launch.tools.estimates.devices import GPUS, Gpu
from launch.tools.estimates.memory import SequenceLengths
from launch.tools.estimates.step_time import estimate_step
from rlsys.config.methods import ReferenceConfig
from rlsys.config.schema import ClusterConfig, Config, PolicyConfig, RolloutConfig, SyncConfig, TrainerConfig
from rlsys.models.known_shapes import look_up_shape
from rlsys.models.shapes import ModelShape

RESULTS = Path(__file__).parent / "results" / "h200_table.json"
PAGE = RESULTS.with_name("roofline.txt")
H100 = GPUS["H100"]
NVLINK = 450e9  # bytes/s of a GPU in one direction, within a node
ADAPTERS = 8 * 50e9  # of a node, to others: NCCL sends what all its GPUs need through all of them at once
GPUS_OF_NODE = 8
MODELS = {"0.5B": 1, "1.5B": 1, "7B": 1, "32B": 4}  # GPUs of an engine
TRAINED_BYTES = 16  # of a parameter: weight and gradient in bfloat16, and Adam's state in float32
TOKENS_PER_PACK = 16384
FINGERPRINT_S = 10.7e-12  # of a weight; measured, see results/h100_fingerprint.log


@dataclass(frozen=True)
class Load:
    """What each GPU has to do in a step."""

    prompts: float = 32
    group: int = 8
    prompt: int = 512  # tokens
    completion: int = 512  # on average
    longest: int = 512
    updates: int = 1

    @property
    def samples(self) -> float:
        return self.prompts * self.group


@dataclass(frozen=True)
class Job:
    """A model on a number of GPUs, which engines and ranks share. An engine has `parts` GPUs."""

    model: ModelShape
    gpus: int
    parts: int
    load: Load = Load()
    gpu: Gpu = H100

    @property
    def link(self) -> float:
        return NVLINK if self.gpus <= GPUS_OF_NODE else ADAPTERS

    @property
    def zero_stage(self) -> int:
        return 3 if self.parts > 1 else 2

    @property
    def fits(self) -> bool:
        """True if weights, gradients and Adam's state do, spread over all GPUs."""
        return (
            self.gpus >= self.parts
            and TRAINED_BYTES * self.model.parameters / self.gpus < 0.9 * self.gpu.memory_gib * 2**30
        )

    @property
    def forward(self) -> float:
        """Seconds of a forward pass over all samples."""
        work = self.model.flop_counter.group_flops(self.load.prompt, [self.load.completion] * self.load.group)
        return self.load.prompts * work / self.gpu.peak_flops("bfloat16")

    @property
    def exchanged(self) -> float:
        """Parameters that come to a rank from others when it gathers all, and leave it when it reduces all."""
        return self.model.parameters * (self.gpus - 1) / self.gpus

    def phases(self) -> dict[str, float]:
        """Seconds by count."""
        model, load = self.model, self.load
        peak, bandwidth = self.gpu.peak_flops("bfloat16"), self.gpu.bandwidth_gb_s * 1e9
        sequences = load.samples * self.parts  # of an engine
        length = load.prompt + load.completion / 2
        read = 2 * model.active_parameters + sequences * length * model.kv_bytes_per_token(2)
        token = max(read / bandwidth, 2 * model.active_parameters * sequences / peak) / self.parts
        gathered = 2 * self.exchanged / self.link * (self.zero_stage == 3)
        score = {"score": self.forward} if load.updates > 1 else {}
        return {
            "decode": load.completion * token,
            "prefill": load.prompts * model.flop_counter.forward_flops(0, load.prompt, 1) / peak,
            **score,
            "update": 3 * self.forward,
            "exchange": load.updates * 4 * self.exchanged / self.link,
            "sync": 4 * model.parameters / self.parts / bandwidth + gathered,
        }

    def added(self) -> dict[str, float]:
        """Seconds that today's design adds by count, if nothing is done at the same time."""
        tokens = self.load.prompts * self.load.prompt + self.load.samples * self.load.completion
        packs = -(-tokens // TOKENS_PER_PACK)
        bytes_of_pack = 4 + 2 * 2 * (self.zero_stage == 3)  # reduced in float32; gathered forward and backward
        in_packs = packs * bytes_of_pack * self.exchanged / self.link
        once = (4 - 2 * (self.zero_stage == 2)) * self.exchanged / self.link  # ZeRO 2 gathers weights after the step
        return {
            "layers": self.forward,
            "packs": max(in_packs - self.load.updates * once, 0),
            "proof": FINGERPRINT_S * self.model.parameters * (1 + 1 / self.parts),
        }

    def planned(self) -> float:
        """Seconds of a step as `rlsys plan` estimates them."""
        load, prompts = self.load, round(self.load.prompts * self.gpus)
        config = Config(
            cluster=ClusterConfig(device="gpu", placement="colocated"),
            trainer=TrainerConfig(
                prompts_per_step=prompts, samples_per_prompt=load.group, updates_per_step=load.updates
            ),
            rollout=RolloutConfig(
                dtype="bfloat16",
                engines=self.gpus // self.parts,
                tensor_parallel=self.parts,
                max_sequences=round(load.samples * self.parts),
                gpu_memory=0.6,
            ),
            policy=PolicyConfig(
                ranks=self.gpus, dtype="bfloat16", zero_stage=self.zero_stage, gradient_checkpointing=True
            ),
            reference=ReferenceConfig(kl_coef=0.0),
            sync=SyncConfig(transport="cuda_ipc"),
        )
        config = replace(config, rollout=replace(config.rollout, enforce_eager=False))
        lengths = SequenceLengths(load.prompt, load.longest)
        return estimate_step(config, self.model, lengths, self.gpu, load.completion).step


@dataclass(frozen=True)
class Published:
    """A step that NeMo RL has measured on H100s, with the tokens that each GPU trained on in a second."""

    model: str
    gpus: int
    parts: int  # GPUs of an engine
    samples: int
    tokens: int  # of a completion, on average
    longest: int
    updates: int
    step_s: float
    rate: int

    @property
    def job(self) -> Job:
        """Counted with prompts of one token."""
        shape = look_up_shape(self.model)
        assert shape
        load = Load(self.samples / self.gpus, 1, 1, self.tokens, self.longest, self.updates)
        return Job(shape, self.gpus, self.parts, load)


PUBLISHED = [
    Published("Llama-3.1-8B", 16, 1, 2048, 1060, 4096, 4, 97.7, 1562),
    Published("Qwen3-32B", 32, 4, 2048, 3206, 4096, 4, 393, 540),
]


def measured() -> dict[str, tuple[float, float]]:
    """Seconds of a step on one GPU, and the share of samples that its update trained, by model in lower case."""
    rows = json.loads(RESULTS.read_text())["rows"]
    return {row["model"]: (row["step_s"], trained_share(row)) for row in rows}


def find_job(name: str, gpus: int) -> Job:
    shape = look_up_shape(f"Qwen/Qwen2.5-{name}")
    assert shape
    return Job(shape, gpus, MODELS[name])


def format_row(name: str, gpus: int) -> list[str]:
    job = find_job(name, gpus)
    phases, added = job.phases(), job.added()
    step = sum(phases.values())
    seen = measured().get(name.lower()) if gpus == 1 else None
    ours = [f"{seen[0]:.1f}", f"{seen[1]:.0%}"] if seen else ["–", "–"]
    cells = [f"{seconds:.2f}" for seconds in [*phases.values(), step, *added.values()]]
    tokens = job.load.samples * job.load.completion
    rate = f"{tokens / (step + sum(added.values())):,.0f}"
    return [name, str(gpus), *cells, rate, f"{job.planned():.1f}", *ours]


def format_published(p: Published) -> list[str]:
    count, added = sum(p.job.phases().values()), sum(p.job.added().values())
    figures = [f"{count:.0f}", f"{added:.0f}", f"{p.job.planned():.0f}", f"{p.step_s:.0f}", f"{p.rate:,}"]
    return [p.model, str(p.gpus), f"{p.samples:,} of {p.tokens:,}", *figures]


ABOUT = """\
What a step should take on H100s, in seconds. Written by tests/gpu/roofline.py.

Every GPU has 32 prompts of 512 tokens, and eight samples of 512 tokens each. By count a phase moves its bytes at the
bandwidth that the GPU's maker states, or computes its products at the stated peak, whichever takes longer. `exchange`
is that of gradients and weights among ranks. Engines of 32B have four GPUs, and its ranks use ZeRO 3, others ZeRO 2.
7B needs more than one GPU, and so does 32B.

Columns with + are what our design adds, if nothing is done at the same time: layers that are computed again in the
backward pass (policy.gradient_checkpointing), and for each pack of 16,384 tokens gradients that are reduced in float32
and, with ZeRO 3, weights that are gathered twice. Fingerprints prove weights. `tokens/s` are completions per GPU, additions included.
`plan` is the estimate of `rlsys plan`. `H200` was measured on one H200 (results/h200_table.json), with a step of which
`trained` is the share of samples that had an advantage and were computed in the update: it is no whole update.
"""
OTHERS = """\
Others

NeMo RL, version 0.4, page "Performance" (docs/about/performance-summary.md): GRPO on DGX H100, OpenMathInstruct-2, at
most 4,096 tokens, on policy, Megatron; here with the same counts as above. Tokens/s are theirs, per GPU, with prompts.
"""
MORE = """\
verl, page "Recipe: Fully Async Policy Trainer" (docs/advance/fully_async.md): Qwen2.5-Math-7B, DAPO, 512 prompts of 16
samples of up to 28K tokens, colocated and synchronous, FSDP2, on H20 instead of H100. Their mean length is not stated.

{verl}

prime-rl, benchmarks/baselines: its trainer alone on H100s, full training with recomputation, sequences of 16,384
tokens. Our updates of a part of the samples used 12.9 % (0.5B) and 22.5 % (1.5B) of the rate of a matrix product, with 1,024 tokens.

{prime}
"""
VERL = [
    ["GPUs", "step", "rollout", "old log-probs", "update"],
    ["32", "790", "357", "108", "314"],
    ["64", "365", "151", "70", "133"],
    ["128", "356", "178", "54", "114"],
]
PRIME = [
    ["model", "GPUs", "tokens/s per GPU", "of the peak"],
    ["Qwen3-0.6B", "1", "11,896", "11.1 %"],
    ["Qwen3-4B-Instruct-2507", "8", "3,253", "13.9 %"],
]


def align(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(f"    {line}" for line in lines)


def write_page() -> str:
    example = find_job("7B", 8)
    head = ["model", "GPUs", *example.phases(), "step", *(f"+{name}" for name in example.added())]
    rows = [format_row(name, gpus) for name in MODELS for gpus in (1, 8, 64) if find_job(name, gpus).fits]
    ours = align([[*head, "tokens/s", "plan", "H200", "trained"], *rows])
    head = ["model", "GPUs", "samples of tokens", "step", "+design", "plan", "measured", "tokens/s"]
    theirs = align([head, *map(format_published, PUBLISHED)])
    more = MORE.format(verl=align(VERL), prime=align(PRIME))
    return f"{ABOUT}\n{ours}\n\n{OTHERS}\n{theirs}\n\n{more}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    text = write_page()
    print(text)
    if parser.parse_args().write:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
