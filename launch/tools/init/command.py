"""`rlsys init`: a commented configuration for a model, a data set and a number of GPUs, chosen by the arithmetic of `rlsys plan`."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from launch.printing import say
from launch.tools.init.starts import Start, start_of
from launch.tools.plan.command import duration, this_machine
from launch.tools.plan.fit import Fit, fit, gib, size
from launch.tools.plan.remedies import changed
from rlsys.checks import load_checked
from rlsys.config.schema import Config, ConfigError
from rlsys.data.origin import stem
from rlsys.estimates.devices import GIB, GPUS, Gpu, nodes_of, one
from rlsys.estimates.memory import Lengths, cache_tokens
from rlsys.models.shapes import Model, model_of
from rlsys.runs.directory import write_named

ROOM = 0.08  # of a GPU that is left: what is not counted takes some
HOST = 256 * GIB  # of main memory for each GPU of a node, which is what many have
SEQUENCES = 16  # full ones that an engine's cache has room for at least
LARGE = 300_000_000  # parameters from which on activations are computed twice


@dataclass(frozen=True)
class Wanted:
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
class Choice:
    """What was chosen, and how it fits."""

    settings: dict[str, Any]
    fit: Fit


def init(wanted: Wanted, console: Console) -> None:
    out = Path(wanted.out or default_name(wanted))
    if out.exists() and not wanted.force:
        raise ConfigError(f"{out} exists. Give another name with -o, or --force to replace it.")
    model, source = model_of(wanted.model, wanted.model_config)
    start = start_of(wanted.data, wanted.reward, model)
    choice = on_gpus(wanted, model, start) if wanted.gpus else on_cpu(wanted, model, start)
    before = out.read_text() if out.is_file() else None
    write_named(out, text(wanted, model, start, choice))
    try:
        load_checked(out)
    except ConfigError:
        if before is None:
            out.unlink()
        else:
            write_named(out, before)
        raise
    say(
        console,
        f"✓ {out}: {model.name} ({count(model)} parameters, from {source}), {where(wanted)}",
        "green",
    )
    file = shlex.quote(str(out))
    say(console, f"next: rlsys plan {file}{cluster_option(wanted)}, then rlsys train {file}")


def count(model: Model) -> str:
    return (
        f"{model.parameters / 1e9:.3g} billion" if model.parameters >= 1e9 else f"{model.parameters / 1e6:.3g} million"
    )


def default_name(wanted: Wanted) -> str:
    def short(name: str) -> str:
        bare = stem(Path(name.rstrip("/").rpartition("/")[2].rpartition(":")[2].lower()))
        return re.sub(r"[^a-z0-9.]+", "-", bare).strip("-")

    return f"{short(wanted.model)}-{short(wanted.data)}.yaml"


def where(wanted: Wanted) -> str:
    return f"{wanted.gpus} x {kind(wanted.gpu).name}" if wanted.gpus else "this machine's CPUs"


def cluster_option(wanted: Wanted) -> str:
    return f" --cluster {wanted.gpus}x{kind(wanted.gpu).name}" if wanted.gpus else ""


# --- what is chosen -----------------------------------------------------------------------------------------------------------


def batch(gpus: int, size: float) -> dict[str, Any]:
    prompts = 64 if gpus <= 4 else 128 if gpus < 32 else 512
    rate = 2e-6 if size < 1e9 else 1e-6
    return {
        "trainer.prompts_per_step": prompts,
        "trainer.samples_per_prompt": 8,
        "trainer.updates_per_step": 2,
        "policy.lr": rate,
        "policy.warmup_updates": 10,
    }


def lengths_of(start: Start, model: Model) -> Lengths:
    """As the data wants them, within the model's window."""
    prompt, new = start.prompt, start.new
    if model.window and prompt + new > model.window:
        prompt = min(prompt, model.window // 4)
        new = model.window - prompt
    return Lengths(prompt, new)


def on_gpus(wanted: Wanted, model: Model, start: Start) -> Choice:
    gpu = kind(wanted.gpu)
    nodes, lengths = nodes_of(wanted.gpus, gpu), lengths_of(start, model)
    fixed = batch(wanted.gpus, model.parameters) | {
        "cluster.device": "gpu",
        "rollout.dtype": "bfloat16",
        "rollout.max_prompt_tokens": lengths.prompt,
        "rollout.max_new_tokens": lengths.new,
        "policy.dtype": "bfloat16",
        "policy.gradient_checkpointing": model.parameters > LARGE,
    }
    best: tuple[float, Choice] | None = None
    nearest: Fit | None = None
    for settings in candidates(wanted.gpus, lengths):
        found = fit(changed(Config(), fixed | settings), model, lengths, start.mean, nodes)
        nearest = found if nearest is None or found.over < nearest.over else nearest
        if not found.fits or not roomy(found):
            continue
        cost = found.times.step * (
            1 + 0.05 * settings["policy.offload_optimizer"] + 0.02 * (settings["policy.zero_stage"] == 3)
        )
        if best is None or cost < best[0]:
            best = cost, Choice(fixed | settings, found)
    if best is None:
        assert nearest
        tight = nearest.tightest
        why = f"{size(nearest.over)} are too much"
        if nearest.fits and tight:
            why = f"the fullest would hold {gib(tight.need)} of {gib(tight.capacity)} GiB, and a node {gib(max(nearest.host))} GiB of main memory"
        raise ConfigError(
            f"{model.name} ({count(model)} parameters) does not fit {wanted.gpus} x {gpu.name} with room to spare: at its "
            f"nearest {why}. Give more --gpus, a larger --gpu ({', '.join(GPUS)}), or a smaller model."
        )
    return best[1]


def kind(name: str) -> Gpu:
    if found := one(name):
        return found
    raise ConfigError(
        f"--gpu {name}: it takes the name of one kind of GPU, such as H100, and --gpus how many there are. Kinds: {', '.join(GPUS)}."
    )


def roomy(f: Fit) -> bool:
    """Whether something is left on the fullest GPU, and an engine has room for a few sequences."""
    full = max(g.need / g.capacity for g in f.gpus)
    room = cache_tokens(f.config, f.model, min(g.capacity for g in f.gpus))
    few = min(SEQUENCES, f.config.trainer.prompts_per_step)
    host = max(need / max(node.gpus, 1) for node, need in zip(f.nodes, f.host, strict=True))
    return full <= 1 - ROOM and room >= few * (f.lengths.prompt + f.lengths.new) and host <= HOST


def candidates(gpus: int, lengths: Lengths) -> Iterator[dict[str, Any]]:
    """Placements, and how much of the model each rank has."""
    longest = lengths.prompt + lengths.new
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


def on_cpu(wanted: Wanted, model: Model, start: Start) -> Choice:
    tiny = model.name == "builtin:tiny"
    lengths, node = lengths_of(start, model), this_machine()
    longest = lengths.prompt + lengths.new
    small = {
        "trainer.prompts_per_step": 32 if tiny else 8,
        "trainer.samples_per_prompt": 16 if tiny else 8,
        "trainer.updates_per_step": 2,
        "policy.lr": 4e-4 if tiny else 2e-6,
        "policy.warmup_updates": 10,
        "rollout.max_new_tokens": lengths.new,
        "rollout.max_prompt_tokens": lengths.prompt,
        "policy.zero_stage": 2,
        "policy.gradient_checkpointing": model.parameters > LARGE,
        "policy.tokens_per_pack": 4096 if tiny else max(1024, longest),
        "rollout.kv_cache_mb": max(64, -(-SEQUENCES * longest * model.kv_bytes(4) >> 20)),
        "rollout.max_sequences": 256 if tiny else SEQUENCES,
    }
    for workers in (2, 1) if node.cpus != 1 else (1,):
        settings = small | {"rollout.engines": workers, "policy.ranks": workers}
        found = fit(changed(Config(), settings), model, lengths, start.mean, [node])
        if found.fits:
            return Choice(settings, found)
    raise ConfigError(
        f"{model.name} ({count(model)} parameters) needs {gib(found.host[0])} GiB of main memory; this machine has "
        f"{gib(node.memory)}. Take a smaller model, or --gpus."
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


def text(wanted: Wanted, model: Model, start: Start, choice: Choice) -> str:
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
            lines += [f"{section}:", *(option(key, value) for key, value in sorted(own.items(), key=place)), *more]
    return "\n".join(aligned(lines)) + "\n"


def aligned(lines: list[str]) -> list[str]:
    """Comments of neighbouring options begin in one column, as far as that is not far away."""
    wide = max(len(line.partition("  # ")[0]) for line in lines if "  # " in line and not line.startswith("#"))
    wide = min(wide, 44)
    return [
        f"{before:<{wide}}  # {comment}" if comment and not line.startswith("#") else line
        for line in lines
        for before, _, comment in [line.partition("  # ")]
    ]


def place(item: tuple[str, Any]) -> int:
    keys = list(COMMENTS)
    return keys.index(item[0]) if item[0] in keys else len(keys)


def option(key: str, value: Any) -> str:
    written = (
        json.dumps(value)
        if isinstance(value, bool)
        else f"{value:.1e}"
        if isinstance(value, float) and 0 < value < 1e-3
        else value
    )
    comment = f"  # {COMMENTS[key]}" if key in COMMENTS else ""
    return f"  {key.partition('.')[2]}: {written}{comment}"


def header(wanted: Wanted, model: Model, start: Start, choice: Choice) -> list[str]:
    f = choice.fit
    tight = f.tightest
    full = f"; the fullest holds {gib(tight.need)} of {gib(tight.capacity)} GiB by `rlsys plan`" if tight else ""
    if f.config.policy.offload_optimizer:
        full += f". A node's main memory: {gib(max(f.host))} GiB"
    lines = [
        f"# Goal      {start.goal}, with {model.name}",
        f"# Hardware  {where(wanted)}{full or f'; {gib(f.host[0])} GiB of main memory at most'}",
        f"# Time      about {duration(f.times.step * start.steps)} by an estimate that may be off by a factor of two or more",
        "# Result    not run",
        "#",
        "# Written by `rlsys init`. `rlsys validate` checks it, `rlsys plan` says what it takes, `rlsys validate --options` lists",
        "# every option. CHANGE FIRST marks what matters most for the result.",
    ]
    return lines + [f"# {line}".rstrip() for line in start.notes]
