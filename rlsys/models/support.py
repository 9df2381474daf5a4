"""Which models cannot be trained, by their config.json.

`tests/workers/rollout/test_engine_families.py` asks vLLM.
"""

from typing import Any

# Their routers draw experts while they are trained. Without the noise, which is off in rlsys, they weigh experts otherwise.
DRAW_EXPERTS = ("phimoe",)
# A model with one of these takes images or sound too. Older ones have the options of the text outside.
PARTS = ("text_config", "vision_config", "audio_config", "thinker_config", "llm_config")
NOT_IN_VLLM = ("bamba", "minimax")  # vLLM has no class for these, and cannot run them by transformers
MAMBA1 = "it has no kernel for Mamba of the first generation"
# model_type → why vLLM's CPU build cannot run it.
NOT_ON_CPU = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), MAMBA1),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"), "it wants torchvision for this family, which is not installed"
    ),
    "qwen3_next": "its linear attention takes bfloat16 only, and computes otherwise than the policy",
    "kimi_linear": "its linear attention has kernels of GPUs only",
    "gpt_oss": "it does not take new experts in a sync",
    "mimo_v2_flash": "it does not read the config.json that transformers writes",
}
# model_type → what vLLM holds otherwise than it was sent, so that `sync.verify` cannot compare it.
UNVERIFIED = {
    **dict.fromkeys(
        ("granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2", "mamba2", "mamba", "falcon_mamba", "jamba"),
        "keeps numbers of Mamba in a form of its own",
    ),
    "llama4_text": "reorders the rows of queries and keys",
    "longcat_flash": "scales the weights of norms",
}
# What the attention of vLLM's CPU build computes: numbers in a head, and in what latent attention keeps of a token.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_LATENT_SIZES: tuple[int, ...] = (576,)
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
HEAD_SIZES = ("head_dim", "global_head_dim", "swa_head_dim")  # of all layers, or of some


def model_problem(settings: dict[str, Any], device: str, verify: bool) -> str:
    """Why a model with this config.json cannot be trained on this device, and a way out; empty if nothing is known.

    `verify`: sync.verify.
    """
    family = str(settings.get("model_type"))
    if problem := architecture_problem(settings):
        return problem
    if family in NOT_IN_VLLM:
        return f"vLLM has no class for {family} models. Use another model."
    if device == "cpu" and (problem := cpu_problem(settings, family)):
        return f"{problem}. Use another model, or cluster.device=gpu."
    if family in UNVERIFIED and verify:
        return (
            f"vLLM {UNVERIFIED[family]}, which sync.verify cannot compare for {family} models. Use sync.verify=false, or "
            "another model."
        )
    return ""


def architecture_problem(settings: dict[str, Any]) -> str:
    """Why a model with this config.json is neither trained nor used as a reference, on any device.

    Models that take images or sound have another class in the engines, with other names of weights.
    """
    if settings.get("model_type") in DRAW_EXPERTS:
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
    """How the weights were quantized; empty if they were not."""
    for part in (settings, settings.get("text_config")):
        if isinstance(part, dict) and (options := part.get("quantization_config")):
            return str(options.get("quant_method", "unknown method")) if isinstance(options, dict) else str(options)
    return ""


def has_more_than_text(settings: dict[str, Any]) -> bool:
    return any(isinstance(settings.get(part), dict) for part in PARTS)


def cpu_problem(s: dict[str, Any], family: str) -> str:
    if family in NOT_ON_CPU:
        return f"vLLM's CPU build cannot run {family} models: {NOT_ON_CPU[family]}"
    if family in LATENT and s.get("kv_lora_rank"):
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
    """Numbers in a query of one attention head, in all layers and in some; none if the config.json does not say."""
    heads = int(s.get("num_attention_heads") or 0)
    if not heads or s.get("kv_lora_rank"):
        return []
    sizes = [int(s.get(name) or 0) for name in HEAD_SIZES]
    sizes[0] = sizes[0] or int(s.get("hidden_size") or 0) // heads
    return [size for size in sizes if size]
