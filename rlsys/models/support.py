"""Which models cannot be trained, by their config.json.

`tests/workers/rollout/test_engine_families.py` asks vLLM.
"""

from typing import Any

from rlsys.models.families import Family, family_of

# A model with one of these takes images or sound too. Older ones have the options of the text outside.
PARTS = ("text_config", "vision_config", "audio_config", "thinker_config", "llm_config")
# What the attention of vLLM's CPU build computes: numbers in a head, and in what latent attention keeps of a token.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_LATENT_SIZES: tuple[int, ...] = (576,)
HEAD_SIZES = ("head_dim", "global_head_dim", "swa_head_dim")  # of all layers, or of some


def model_problem(settings: dict[str, Any], device: str, verify: bool) -> str:
    """Returns why a model with this config.json cannot be trained on this device, and a way out; empty if nothing is known.

    `verify`: sync.verify.
    """
    family = family_of(settings.get("model_type"))
    if problem := architecture_problem(settings):
        return problem
    if not family.in_vllm:
        return f"vLLM has no class for {family.name} models. Use another model."
    if device == "cpu" and (problem := cpu_problem(settings, family)):
        return f"{problem}. Use another model, or cluster.device=gpu."
    if family.unverified and verify:
        return (
            f"vLLM {family.unverified}, which sync.verify cannot compare for {family.name} models. Use sync.verify=false, or "
            "another model."
        )
    return ""


def architecture_problem(settings: dict[str, Any]) -> str:
    """Returns why a model with this config.json is neither trained nor used as a reference, on any device.

    Models that take images or sound have another class in the engines, with other names of weights.
    """
    if family_of(settings.get("model_type")).draws_experts:
        return (
            f"{settings['model_type']} models draw experts at random while they are trained, and rlsys computes a model in "
            "training as in sampling. Use another model."
        )
    if method := quantization(settings):
        return (
            f"its weights are quantized ({method}), and rlsys trains and sends weights as they are. Use the model that they "
            "were made from, in bfloat16 or float32."
        )
    if not has_more_than_text(settings):
        return ""
    return (
        f"{settings.get('model_type')} models take images or sound too, and rlsys trains models of text alone. Keep the text "
        "model: rlsys import hf:NAME OUT, or dir:PATH OUT. Then name OUT here."
    )


def quantization(settings: dict[str, Any]) -> str:
    """Returns how the weights were quantized; empty if they were not."""
    for part in (settings, settings.get("text_config")):
        if isinstance(part, dict) and (options := part.get("quantization_config")):
            return str(options.get("quant_method", "unknown method")) if isinstance(options, dict) else str(options)
    return ""


def has_more_than_text(settings: dict[str, Any]) -> bool:
    return any(isinstance(settings.get(part), dict) for part in PARTS)


def cpu_problem(s: dict[str, Any], family: Family) -> str:
    if family.cpu_problem:
        return f"vLLM's CPU build cannot run {family.name} models: {family.cpu_problem}"
    if family.cpu_latent and s.get("kv_lora_rank"):
        sizes, known = [int(s["kv_lora_rank"]) + int(s.get("qk_rope_head_dim") or 0)], CPU_LATENT_SIZES
        what = "latent attention with {} numbers of a token (kv_lora_rank + qk_rope_head_dim) does"
    else:
        sizes, known, what = head_sizes(s), CPU_HEAD_SIZES, "attention heads of {} numbers do"
    unknown = [size for size in sizes if size not in known]
    return (
        f"{what.format(unknown[0])} not run in vLLM's CPU build; these do: {', '.join(map(str, known))}"
        if unknown
        else ""
    )


def head_sizes(s: dict[str, Any]) -> list[int]:
    """Returns how many numbers a query of one attention head has, in all layers and in some; none if the config.json does not say."""
    heads = int(s.get("num_attention_heads") or 0)
    if not heads or s.get("kv_lora_rank"):
        return []
    sizes = [int(s.get(name) or 0) for name in HEAD_SIZES]
    sizes[0] = sizes[0] or int(s.get("hidden_size") or 0) // heads
    return [size for size in sizes if size]
