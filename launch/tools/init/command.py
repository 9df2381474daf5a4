"""`rlsys init`: a commented configuration for a model, a data set and a number of GPUs, chosen by the arithmetic of `rlsys plan`."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from launch.printing import print_line
from launch.tools.init.dataset_presets import DatasetPreset, find_preset
from launch.tools.plan.command import this_machine
from launch.tools.plan.fit import Fit, check_fit
from launch.tools.plan.formatting import format_duration, format_gib, format_size
from launch.tools.plan.suggestions import with_settings
from rlsys.checks import load_checked
from rlsys.config.schema import Config, ConfigError
from rlsys.data.origin import strip_extension
from rlsys.estimates.devices import GIB, GPUS, Gpu, parse_gpu, split_into_nodes
from rlsys.estimates.engine import kv_cache_tokens
from rlsys.estimates.memory import SequenceLengths
from rlsys.models.lookup import model_shape
from rlsys.models.shapes import ModelShape
from rlsys.runs.directory import write_user_file

ROOM = 0.08  # of a GPU that is left: what is not counted takes some
HOST = 256 * GIB  # of main memory for each GPU of a node, which is what many have
SEQUENCES = 16  # full ones that an engine's cache has room for at least
LARGE = 300_000_000  # parameters from which on activations are computed twice


@dataclass(frozen=True)
class InitOptions:
    """`rlsys init` as it was asked for."""

    model: str
    data: str
    gpus: int
    gpu: str = "H100"
    reward: str = ""
    out: str = ""
    force: bool = False
    model_config: str = ""


@dataclass(frozen=True)
class ChosenSettings:
    """What was chosen, and how it fits."""

    settings: dict[str, Any]
    fit: Fit


def init(wanted: InitOptions, console: Console) -> None:
    out = Path(wanted.out or default_name(wanted))
    if out.exists() and not wanted.force:
        raise ConfigError(f"{out} exists. Give another name with -o, or --force to replace it.")
    model, source = model_shape(wanted.model, wanted.model_config)
    start = find_preset(wanted.data, wanted.reward, model)
    choice = choose_on_gpus(wanted, model, start) if wanted.gpus else choose_on_cpu(wanted, model, start)
    before = out.read_text() if out.is_file() else None
    write_user_file(out, render(wanted, model, start, choice))
    try:
        load_checked(out)
    except ConfigError:
        if before is None:
            out.unlink()
        else:
            write_user_file(out, before)
        raise
    print_line(
        console,
        f"✓ {out}: {model.name} ({format_parameters(model)} parameters, from {source}), {describe_hardware(wanted)}",
        "green",
    )
    file = shlex.quote(str(out))
    print_line(console, f"next: rlsys plan {file}{cluster_option(wanted)}, then rlsys train {file}")


def format_parameters(model: ModelShape) -> str:
    return (
        f"{model.parameters / 1e9:.3g} billion" if model.parameters >= 1e9 else f"{model.parameters / 1e6:.3g} million"
    )


def default_name(wanted: InitOptions) -> str:
    def short(name: str) -> str:
        bare = strip_extension(Path(name.rstrip("/").rpartition("/")[2].rpartition(":")[2].lower()))
        return re.sub(r"[^a-z0-9.]+", "-", bare).strip("-")

    return f"{short(wanted.model)}-{short(wanted.data)}.yaml"


def describe_hardware(wanted: InitOptions) -> str:
    return f"{wanted.gpus} x {find_gpu(wanted.gpu).name}" if wanted.gpus else "this machine's CPUs"


def cluster_option(wanted: InitOptions) -> str:
    return f" --cluster {wanted.gpus}x{find_gpu(wanted.gpu).name}" if wanted.gpus else ""


# --- what is chosen -----------------------------------------------------------------------------------------------------------


def batch_settings(gpus: int, size: float) -> dict[str, Any]:
    prompts = 64 if gpus <= 4 else 128 if gpus < 32 else 512
    rate = 2e-6 if size < 1e9 else 1e-6
    return {
        "trainer.prompts_per_step": prompts,
        "trainer.samples_per_prompt": 8,
        "trainer.updates_per_step": 2,
        "policy.lr": rate,
        "policy.warmup_updates": 10,
    }


def choose_lengths(start: DatasetPreset, model: ModelShape) -> SequenceLengths:
    """As the data wants them, within the model's window."""
    prompt, new = start.prompt_tokens, start.max_new_tokens
    if model.context and prompt + new > model.context:
        prompt = min(prompt, model.context // 4)
        new = model.context - prompt
    return SequenceLengths(prompt, new)


def choose_on_gpus(wanted: InitOptions, model: ModelShape, start: DatasetPreset) -> ChosenSettings:
    gpu = find_gpu(wanted.gpu)
    nodes, lengths = split_into_nodes(wanted.gpus, gpu), choose_lengths(start, model)
    fixed = batch_settings(wanted.gpus, model.parameters) | {
        "cluster.device": "gpu",
        "rollout.dtype": "bfloat16",
        "rollout.max_prompt_tokens": lengths.prompt,
        "rollout.max_new_tokens": lengths.completion,
        "policy.dtype": "bfloat16",
        "policy.gradient_checkpointing": model.parameters > LARGE,
    }
    best: tuple[float, ChosenSettings] | None = None
    nearest: Fit | None = None
    for settings in candidates(wanted.gpus, lengths):
        found = check_fit(with_settings(Config(), fixed | settings), model, lengths, start.mean_tokens, nodes)
        nearest = found if nearest is None or found.bytes_over < nearest.bytes_over else nearest
        if not found.fits or not has_room(found):
            continue
        cost = found.times.step * (
            1 + 0.05 * settings["policy.offload_optimizer"] + 0.02 * (settings["policy.zero_stage"] == 3)
        )
        if best is None or cost < best[0]:
            best = cost, ChosenSettings(fixed | settings, found)
    if best is None:
        assert nearest
        tight = nearest.tightest
        why = f"{format_size(nearest.bytes_over)} are too much"
        if nearest.fits and tight:
            why = f"the fullest would hold {format_gib(tight.needed)} of {format_gib(tight.capacity)} GiB, and a node {format_gib(max(nearest.host_bytes))} GiB of main memory"
        raise ConfigError(
            f"{model.name} ({format_parameters(model)} parameters) does not fit {wanted.gpus} x {gpu.name} with room to spare: at its "
            f"nearest {why}. Give more --gpus, a larger --gpu ({', '.join(GPUS)}), or a smaller model."
        )
    return best[1]


def find_gpu(name: str) -> Gpu:
    if found := parse_gpu(name):
        return found
    raise ConfigError(
        f"--gpu {name}: it takes the name of one kind of GPU, such as H100, and --gpus how many there are. Kinds: {', '.join(GPUS)}."
    )


def has_room(f: Fit) -> bool:
    """Whether something is left on the fullest GPU, and an engine has room for a few sequences."""
    full = max(g.needed / g.capacity for g in f.gpus)
    room = kv_cache_tokens(f.config, f.model, min(g.capacity for g in f.gpus))
    few = min(SEQUENCES, f.config.trainer.prompts_per_step)
    host = max(need / max(node.gpus, 1) for node, need in zip(f.nodes, f.host_bytes, strict=True))
    return full <= 1 - ROOM and room >= few * (f.lengths.prompt + f.lengths.completion) and host <= HOST


def candidates(gpus: int, lengths: SequenceLengths) -> Iterator[dict[str, Any]]:
    """Placements, and how much of the model each rank has."""
    longest = lengths.prompt + lengths.completion
    packs = sorted({max(tokens, longest) for tokens in (32768, 16384, 8192, longest)}, reverse=True)
    stages = [(2, False), (3, False), (2, True), (3, True)]
    for zero, offload in stages:
        for tokens in packs:
            learning = {
                "policy.zero_stage": zero,
                "policy.offload_optimizer": offload,
                "policy.tokens_per_pack": tokens,
            }
            for share in (0.6, 0.5, 0.4, 0.3, 0.2):
                yield learning | {
                    "cluster.placement": "colocated",
                    "rollout.engines": gpus,
                    "rollout.tensor_parallel": 1,
                    "rollout.gpu_memory": share,
                    "policy.ranks": gpus,
                }
            for wide in (1, 2, 4, 8):
                for share in (0.25, 0.5, 0.75):
                    engines = max(1, round(gpus * share / wide))
                    if (ranks := gpus - engines * wide) >= 1:
                        yield learning | {
                            "cluster.placement": "separate",
                            "rollout.engines": engines,
                            "rollout.tensor_parallel": wide,
                            "rollout.gpu_memory": 0.85,
                            "policy.ranks": ranks,
                        }


def choose_on_cpu(wanted: InitOptions, model: ModelShape, start: DatasetPreset) -> ChosenSettings:
    tiny = model.name == "builtin:tiny"
    lengths, node = choose_lengths(start, model), this_machine()
    longest = lengths.prompt + lengths.completion
    small = {
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
    for workers in (2, 1) if node.cpus != 1 else (1,):
        settings = small | {"rollout.engines": workers, "policy.ranks": workers}
        found = check_fit(with_settings(Config(), settings), model, lengths, start.mean_tokens, [node])
        if found.fits:
            return ChosenSettings(settings, found)
    raise ConfigError(
        f"{model.name} ({format_parameters(model)} parameters) needs {format_gib(found.host_bytes[0])} GiB of main memory; this machine has "
        f"{format_gib(node.memory)}. Take a smaller model, or --gpus."
    )


# --- what is written ----------------------------------------------------------------------------------------------------------

COMMENTS = {
    "cluster.device": "cpu | gpu",
    "cluster.placement": "colocated: an engine and a policy rank take turns on each GPU; separate: GPUs of their own",
    "model.path": "a hub name, a directory, or builtin:tiny",
    "data.overlong": "prompts that are too long are left out, and counted",
    "trainer.steps": "CHANGE FIRST: how many batches to train on",
    "trainer.prompts_per_step": "CHANGE FIRST: more is steadier, and slower",
    "trainer.samples_per_prompt": "completions that are compared with each other",
    "trainer.updates_per_step": "optimizer updates on a batch; 1 is on-policy throughout",
    "rollout.engines": "vLLM engines",
    "rollout.tensor_parallel": "GPUs of an engine",
    "rollout.max_prompt_tokens": "longer prompts are left out",
    "rollout.max_new_tokens": "CHANGE FIRST: completions are cut here; what is right but too long counts as wrong",
    "rollout.gpu_memory": "share of a GPU that an engine takes",
    "rollout.kv_cache_mb": "keys and values of an engine, MiB",
    "rollout.max_sequences": "that an engine draws at once",
    "policy.ranks": "DeepSpeed processes that share the optimizer's state",
    "policy.zero_stage": "2 splits optimizer and gradients over ranks, 3 the weights too: less memory, more traffic",
    "policy.offload_optimizer": "Adam's state in main memory: less of the GPU, a slower step",
    "policy.tokens_per_pack": "tokens of one forward and backward pass: lower it first where memory is short",
    "policy.gradient_checkpointing": "activations are computed again: less memory, a third more work",
    "policy.lr": "CHANGE FIRST, by factors of 2 or 3: reward that falls after a rise asks for less",
    "policy.warmup_updates": "in which the learning rate rises",
    "reference.kl_coef": "above 0 holds the policy near the model it began with, by a reference worker",
    "reward.workers": "processes that judge",
    "checkpoint.every": "steps",
    "checkpoint.keep_last": "older ones are removed",
    "eval.every": "steps between two looks at held-out prompts",
}
ORDER = ("cluster", "model", "data", "trainer", "rollout", "policy", "reference", "reward", "eval", "checkpoint")


def render(wanted: InitOptions, model: ModelShape, start: DatasetPreset, choice: ChosenSettings) -> str:
    settings = {
        **choice.settings,
        "model.path": wanted.model,
        "trainer.steps": start.steps,
        "reference.kl_coef": 0.0,
        "reward.workers": 2 if not wanted.gpus else max(4, min(16, 2 * wanted.gpus)),
        "checkpoint.every": max(start.steps // 10, 1),
        "checkpoint.keep_last": 2,
    }
    if start.held_out:
        settings["eval.every"] = max(start.steps // 20, 1)
    lines = [*header(wanted, model, start, choice), ""]
    for section in ORDER:
        own = {key: value for key, value in settings.items() if key.startswith(f"{section}.")}
        more = start.yaml.get(section, [])
        if own or more:
            lines += [
                f"{section}:",
                *(option_line(key, value) for key, value in sorted(own.items(), key=comment_order)),
                *more,
            ]
    return "\n".join(align_comments(lines)) + "\n"


def align_comments(lines: list[str]) -> list[str]:
    """Comments of neighbouring options begin in one column, as far as that is not far away."""
    wide = max(len(line.partition("  # ")[0]) for line in lines if "  # " in line and not line.startswith("#"))
    wide = min(wide, 44)
    return [
        f"{before:<{wide}}  # {comment}" if comment and not line.startswith("#") else line
        for line in lines
        for before, _, comment in [line.partition("  # ")]
    ]


def comment_order(item: tuple[str, Any]) -> int:
    keys = list(COMMENTS)
    return keys.index(item[0]) if item[0] in keys else len(keys)


def option_line(key: str, value: Any) -> str:
    written = (
        json.dumps(value)
        if isinstance(value, bool)
        else f"{value:.1e}"
        if isinstance(value, float) and 0 < value < 1e-3
        else value
    )
    comment = f"  # {COMMENTS[key]}" if key in COMMENTS else ""
    return f"  {key.partition('.')[2]}: {written}{comment}"


def header(wanted: InitOptions, model: ModelShape, start: DatasetPreset, choice: ChosenSettings) -> list[str]:
    f = choice.fit
    tight = f.tightest
    full = (
        f"; the fullest holds {format_gib(tight.needed)} of {format_gib(tight.capacity)} GiB by `rlsys plan`"
        if tight
        else ""
    )
    if f.config.policy.offload_optimizer:
        full += f". A node's main memory: {format_gib(max(f.host_bytes))} GiB"
    lines = [
        f"# Goal      {start.goal}, with {model.name}",
        f"# Hardware  {describe_hardware(wanted)}{full or f'; {format_gib(f.host_bytes[0])} GiB of main memory at most'}",
        f"# Time      about {format_duration(f.times.step * start.steps)} by an estimate that may be off by a factor of two or more",
        "# Result    not run",
        "#",
        "# Written by `rlsys init`. `rlsys validate` checks it, `rlsys plan` says what it takes, `rlsys validate --options` lists",
        "# every option. CHANGE FIRST marks what matters most for the result.",
    ]
    return lines + [f"# {line}".rstrip() for line in start.notes]
