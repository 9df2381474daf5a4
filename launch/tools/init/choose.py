"""Chooses settings that fit the hardware, by the arithmetic of `rlsys plan`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launch.tools.estimates.devices import GIB, GPUS, split_into_nodes
from launch.tools.estimates.engine import kv_cache_tokens
from launch.tools.estimates.memory import SequenceLengths
from launch.tools.fitting.fit import Fit, check_fit
from launch.tools.fitting.formatting import format_gib, format_size
from launch.tools.init.dataset_presets import DatasetPreset
from launch.tools.init.options import InitOptions, find_gpu
from launch.tools.plan.command import this_machine
from launch.tools.plan.suggestions import with_settings
from rlsys.config.loading import gpu_defaults
from rlsys.config.schema import Config, LoraConfig
from rlsys.errors import ConfigError
from rlsys.models.shapes import ModelShape

FREE_SHARE = 0.08  # of each GPU, for memory that is not counted
HOST_BYTES = 256 * GIB  # main memory per GPU that a usual node has
SEQUENCES = 16  # full ones that an engine's cache must have room for
LARGE = 300_000_000  # parameters, from which on gradient checkpointing is worth its time
Settings = dict[str, Any]


@dataclass(frozen=True)
class ChosenSettings:
    settings: Settings
    fit: Fit


def choose_settings(options: InitOptions, model: ModelShape, preset: DatasetPreset) -> ChosenSettings:
    return (choose_on_gpus if options.gpus else choose_on_cpu)(options, model, preset)


def choose_on_gpus(options: InitOptions, model: ModelShape, preset: DatasetPreset) -> ChosenSettings:
    """The fastest of all candidates that fit with room to spare."""
    gpu, lengths = find_gpu(options.gpu), choose_lengths(preset, model)
    nodes = split_into_nodes(options.gpus, gpu)
    fixed = {
        **gpu_defaults(),
        **batch_settings(options.gpus, model.parameters),
        "cluster.device": "gpu",
        "rollout.dtype": "bfloat16",
        "rollout.max_prompt_tokens": lengths.prompt,
        "rollout.max_new_tokens": lengths.completion,
        "policy.dtype": "bfloat16",
    }
    fixed |= lora_settings(options, fixed)
    tried = [
        ChosenSettings(
            settings, check_fit(with_settings(Config(), settings), model, lengths, preset.mean_tokens, nodes)
        )
        for settings in (fixed | candidate for candidate in candidates(options.gpus, lengths))
    ]
    good = [choice for choice in tried if choice.fit.fits and has_room(choice.fit)]
    if not good:
        nearest = min((choice.fit for choice in tried), key=lambda fit: fit.bytes_over)
        raise ConfigError(
            f"{model.name} ({format_parameters(model)} parameters) does not fit {options.hardware} with room to spare: "
            f"at its nearest {describe_excess(nearest)}. Give more --gpus, a larger --gpu ({', '.join(GPUS)}), "
            + ("or a smaller model." if options.lora else "a smaller model, or --lora 32.")
        )
    return min(good, key=step_cost)


def candidates(gpus: int, lengths: SequenceLengths) -> Iterator[Settings]:
    """Combinations of ZeRO stage, offloading, pack size and placement."""
    longest = lengths.prompt + lengths.completion
    packs = sorted({max(tokens, longest) for tokens in (32768, 16384, 8192, longest)}, reverse=True)
    for zero, offload in [(2, False), (3, False), (2, True), (3, True)]:
        for tokens in packs:
            learner = {
                "policy.zero_stage": zero,
                "policy.offload": ["optimizer"] * offload,
                "policy.tokens_per_pack": tokens,
            }
            for placement in placements(gpus):
                yield learner | placement


def placements(gpus: int) -> Iterator[Settings]:
    for share in (0.6, 0.5, 0.4, 0.3, 0.2):
        yield {
            "cluster.placement": "colocated",
            "rollout.engines": gpus,
            "rollout.tensor_parallel": 1,
            "rollout.gpu_memory": share,
            "policy.ranks": gpus,
        }
    for wide in (1, 2, 4, 8):
        for share in (0.25, 0.5, 0.75):  # of the GPUs, for engines
            engines = max(1, round(gpus * share / wide))
            if (ranks := gpus - engines * wide) >= 1:
                yield {
                    "cluster.placement": "separate",
                    "rollout.engines": engines,
                    "rollout.tensor_parallel": wide,
                    "rollout.gpu_memory": 0.85,
                    "policy.ranks": ranks,
                }


def has_room(f: Fit) -> bool:
    """True if every GPU and node has memory to spare, and an engine has room for a few sequences."""
    fullest = max(g.needed / g.capacity for g in f.gpus)
    longest = f.lengths.prompt + f.lengths.completion
    room = kv_cache_tokens(f.config, f.model, min(g.capacity for g in f.gpus), longest)
    sequences = min(SEQUENCES, f.config.trainer.prompts_per_step)
    host = max(needed / max(node.gpus, 1) for node, needed in zip(f.nodes, f.host_bytes, strict=True))
    return fullest <= 1 - FREE_SHARE and room >= sequences * longest and host <= HOST_BYTES


def step_cost(choice: ChosenSettings) -> float:
    """Seconds of a step. A small penalty avoids offloading and ZeRO 3 where they gain little."""
    policy = choice.fit.config.policy
    return choice.fit.times.step * (1 + 0.05 * ("optimizer" in policy.offload) + 0.02 * (policy.zero_stage == 3))


def describe_excess(nearest: Fit) -> str:
    fullest = nearest.tightest
    if not nearest.fits or not fullest:
        return f"{format_size(nearest.bytes_over)} are too much"
    gpu = f"{format_gib(fullest.needed)} of {format_gib(fullest.capacity)} GiB"
    return f"the fullest would hold {gpu}, and a node {format_gib(max(nearest.host_bytes))} GiB of main memory"


def choose_on_cpu(options: InitOptions, model: ModelShape, preset: DatasetPreset) -> ChosenSettings:
    """Two engines and two ranks, or one of each."""
    tiny = model.name == "builtin:tiny"
    lengths, node = choose_lengths(preset, model), this_machine()
    longest = lengths.prompt + lengths.completion
    fixed = {
        "trainer.prompts_per_step": 32 if tiny else 8,
        "trainer.samples_per_prompt": 16 if tiny else 8,
        "trainer.updates_per_step": 2,
        "policy.lr": 4e-4 if tiny else 2e-6,
        "policy.warmup_updates": 10,
        "rollout.max_new_tokens": lengths.completion,
        "rollout.max_prompt_tokens": lengths.prompt,
        "policy.zero_stage": 2,
        "policy.gradient_checkpointing": model.parameters > LARGE,
        "policy.tokens_per_pack": 4096 if tiny else max(1024, longest),
        "rollout.kv_cache_mb": max(64, -(-SEQUENCES * longest * model.kv_bytes_per_token(4) >> 20)),
        "rollout.max_sequences": 256 if tiny else SEQUENCES,
    }
    fixed |= lora_settings(options, fixed)
    for workers in (2, 1) if node.cpus != 1 else (1,):
        settings = fixed | {"rollout.engines": workers, "policy.ranks": workers}
        fit = check_fit(with_settings(Config(), settings), model, lengths, preset.mean_tokens, [node])
        if fit.fits:
            return ChosenSettings(settings, fit)
    raise ConfigError(
        f"{model.name} ({format_parameters(model)} parameters) needs {format_gib(fit.host_bytes[0])} GiB of main memory; "
        f"this machine has {format_gib(node.memory)}. Take a smaller model, or --gpus."
    )


def lora_settings(options: InitOptions, settings: Settings) -> Settings:
    """Adapters, and the higher learning rate that they need."""
    if not options.lora:
        return {}
    return {"policy.lora": LoraConfig(options.lora, 2.0 * options.lora), "policy.lr": 10 * settings["policy.lr"]}


def batch_settings(gpus: int, parameters: float) -> Settings:
    return {
        "trainer.prompts_per_step": 64 if gpus <= 4 else 128 if gpus < 32 else 512,
        "trainer.samples_per_prompt": 8,
        "trainer.updates_per_step": 2,
        "policy.lr": 2e-6 if parameters < 1e9 else 1e-6,
        "policy.warmup_updates": 10,
    }


def choose_lengths(preset: DatasetPreset, model: ModelShape) -> SequenceLengths:
    """The lengths that the data needs, within the model's window."""
    prompt, completion = preset.prompt_tokens, preset.max_new_tokens
    if model.context and prompt + completion > model.context:
        prompt = min(prompt, model.context // 4)
        completion = model.context - prompt
    return SequenceLengths(prompt, completion)


def format_parameters(model: ModelShape) -> str:
    n = model.parameters
    return f"{n / 1e9:.3g} billion" if n >= 1e9 else f"{n / 1e6:.3g} million"
