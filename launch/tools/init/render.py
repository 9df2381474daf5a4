"""Writes chosen settings as YAML, with a comment for each option."""

import json
from typing import Any

from launch.tools.fitting.formatting import format_duration, format_gib
from launch.tools.init.choose import ChosenSettings
from launch.tools.init.dataset_presets import DatasetPreset
from launch.tools.init.options import InitOptions
from rlsys.config.schema import LoraConfig
from rlsys.models.shapes import ModelShape

COMMENTS = {
    "cluster.device": "cpu | gpu",
    "cluster.placement": "colocated: an engine and a policy rank take turns on each GPU; separate: own GPUs for each",
    "model.path": "a hub name, a directory, or builtin:tiny",
    "trainer.steps": "CHANGE FIRST: how many batches to train on",
    "trainer.prompts_per_step": "CHANGE FIRST: more prompts are steadier, and slower",
    "trainer.samples_per_prompt": "completions that are compared with each other",
    "trainer.updates_per_step": "optimizer updates per batch; 1 is strictly on-policy",
    "rollout.engines": "vLLM engines",
    "rollout.tensor_parallel": "GPUs per engine",
    "rollout.max_prompt_tokens": "longer prompts are left out",
    "rollout.max_new_tokens": "CHANGE FIRST: longer completions are cut, and then usually count as wrong",
    "rollout.gpu_memory": "share of each GPU for its engine",
    "rollout.kv_cache_mb": "KV cache of an engine, in MiB",
    "rollout.max_sequences": "sequences that an engine decodes at once",
    "policy.ranks": "DeepSpeed processes that share the optimizer's state",
    "policy.zero_stage": "2 splits optimizer and gradients over ranks, 3 the weights too: less memory, more traffic",
    "policy.offload": "[optimizer] keeps Adam's state in main memory: less GPU memory, slower steps",
    "policy.tokens_per_pack": "tokens of one forward and backward pass: lower it first if memory is short",
    "policy.gradient_checkpointing": "computes activations twice: less memory, a third more work",
    "policy.lora": "only adapters are trained; the model's own weights stay",
    "policy.lr": "CHANGE FIRST, by factors of 2 or 3: lower it if the reward falls after a rise",
    "policy.warmup_updates": "updates over which the learning rate rises",
    "reference.kl_coef": "above 0, a reference worker keeps the policy near the initial model",
    "reward.workers": "processes that compute rewards",
    "checkpoint.every": "steps between checkpoints",
    "checkpoint.keep_last": "older checkpoints are removed",
    "eval.every": "steps between evaluations",
}
SECTIONS = ("cluster", "model", "data", "trainer", "rollout", "policy", "reference", "reward", "eval", "checkpoint")


def render(options: InitOptions, model: ModelShape, preset: DatasetPreset, choice: ChosenSettings) -> str:
    settings = {
        **choice.settings,
        "model.path": options.model,
        "trainer.steps": preset.steps,
        "reference.kl_coef": 0.0,
        "reward.workers": 2 if not options.gpus else max(4, min(16, 2 * options.gpus)),
        "checkpoint.every": max(preset.steps // 10, 1),
        "checkpoint.keep_last": 2,
    }
    if preset.held_out:
        settings["eval.every"] = max(preset.steps // 20, 1)
    lines = [*header(options, model, preset, choice), ""]
    for section in SECTIONS:
        keys = sorted((key for key in settings if key.startswith(f"{section}.")), key=comment_order)
        section_lines = [option_line(key, settings[key]) for key in keys] + preset.yaml.get(section, [])
        if section_lines:
            lines += [f"{section}:", *section_lines]
    return "\n".join(align_comments(lines)) + "\n"


def header(options: InitOptions, model: ModelShape, preset: DatasetPreset, choice: ChosenSettings) -> list[str]:
    f = choice.fit
    memory = f"; {format_gib(f.host_bytes[0])} GiB of main memory at most"
    if g := f.tightest:
        memory = f"; the fullest holds {format_gib(g.needed)} of {format_gib(g.capacity)} GiB by `rlsys plan`"
    if "optimizer" in f.config.policy.offload:
        memory += f". A node's main memory: {format_gib(max(f.host_bytes))} GiB"
    time = format_duration(f.times.step * preset.steps)
    return [
        f"# Goal      {preset.goal}, with {model.name}",
        f"# Hardware  {options.hardware}{memory}",
        f"# Time      about {time} by an estimate that may be off by a factor of two or more",
        "# Result    not run",
        "#",
        "# Written by `rlsys init`. `rlsys validate` checks it, `rlsys plan` shows what it takes, and",
        "# `rlsys validate --options` lists every option. CHANGE FIRST marks what matters most for the result.",
        *(f"# {note}".rstrip() for note in preset.notes),
    ]


def comment_order(key: str) -> int:
    keys = list(COMMENTS)
    return keys.index(key) if key in keys else len(keys)


def option_line(key: str, value: Any) -> str:
    if isinstance(value, LoraConfig):
        value = f"{{rank: {value.rank}, alpha: {value.alpha:g}}}"
    elif isinstance(value, bool):
        value = json.dumps(value)
    elif isinstance(value, list):
        value = f"[{', '.join(value)}]"
    elif isinstance(value, float) and 0 < value < 1e-3:
        value = f"{value:.1e}"
    comment = f"  # {COMMENTS[key]}" if key in COMMENTS else ""
    return f"  {key.partition('.')[2]}: {value}{comment}"


def align_comments(lines: list[str]) -> list[str]:
    """Starts all comments in one column, at most the 44th."""
    with_comment = [line for line in lines if "  # " in line and not line.startswith("#")]
    width = min(max(len(line.partition("  # ")[0]) for line in with_comment), 44)
    aligned = []
    for line in lines:
        option, _, comment = line.partition("  # ")
        aligned.append(f"{option:<{width}}  # {comment}" if comment and not line.startswith("#") else line)
    return aligned
