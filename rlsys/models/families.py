"""What each model family does otherwise than Llama. This table is the only place that names one.

A family that is not in it is trained as the model's own code computes it; `rlsys plan` then does not know its layers.
README.md says how to add one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from rlsys.models import layer_kinds, mlp
from rlsys.models.layer_kinds import Settings
from rlsys.models.mixers import Mixer, gated_delta_net, mamba2, short_convolution


@dataclass(frozen=True)
class Family:
    """`Family("olmo2", qk_norm="all heads", float32_norms=True)`. The defaults are Llama's."""

    name: str  # model_type of its config.json

    # Its layers, for `rlsys plan`
    layers_known: bool = True  # by the next fields; of `OTHERS` they say nothing
    kinds: Callable[[Settings], list[str]] = layer_kinds.all_full  # of its layers, unless layer_types says
    all_windowed: bool = False  # whatever layer_types says
    window: int = 0  # tokens, unless sliding_window says
    window_off: bool = False  # unless use_sliding_window says
    mixer: Callable[[Settings], Mixer] | None = None
    mixes_beside_attention: bool = False  # else instead of it, in some layers
    attention_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")  # of two: q, k and v are one matrix
    attention_bias: Literal["none", "all", "qkv"] = "none"  # unless attention_bias says. "qkv": always, and no other
    qk_norm: Literal["none", "each head", "all heads"] = "none"
    gates_attention: bool = False  # by one number for each number of a query
    soft_caps: bool = False  # of scores and logits, unless *_logit_softcapping says
    sinks: bool = False
    layer_norms: int = 2  # of a layer's hidden states: before attention and MLP, or behind, or both
    float32_norms: bool = False  # multiply with their weights before they round
    tied: bool = False  # output layer and embedding, unless tie_word_embeddings says
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # of two: gate and up are one matrix
    mlp_width: Callable[[Settings], int] = mlp.stated_width
    expert_width: str = ""  # the option that says how wide an expert is; empty: there are none
    dense_layers: Callable[[Settings], int] = mlp.listed_dense_layers  # with an MLP instead of experts
    shared_width: Callable[[Settings], int] = mlp.no_width  # of the experts that every token passes
    gates_shared_expert: bool = False
    biased_experts: bool = False  # with biases, also of the router, and clamped products
    routes_in_float32: bool = False

    # Training
    window_is_mask: bool = False  # or engines see it otherwise: sequences are at most as long as the window
    draws_experts: bool = False  # at random in training; without the noise its router weighs experts otherwise
    same_text_as: str = ""  # the family with a class of its own that computes the same, but for images

    # vLLM's engines
    in_vllm: bool = True  # as a class of its own, or by transformers
    cpu_problem: str = ""  # why vLLM's CPU build cannot run it
    cpu_latent: bool = False  # vLLM keeps latent numbers of a token, for which its CPU build has few sizes
    unverified: str = ""  # what vLLM holds otherwise than it was sent, so that sync.verify cannot compare it
    engine_options: Callable[[Settings], Settings] = lambda _: {}  # that transformers does not write into config.json

    # Episodes
    tool_parser: str = ""  # vLLM's, if marks in the chat template do not show which

    @property
    def runs_on_cpu(self) -> bool:
        """False if no engine of vLLM's CPU build runs it, whatever its sizes."""
        return self.in_vllm and not self.cpu_problem


MAMBA1 = "it has no kernel for Mamba of the first generation"
OWN_FORM = "keeps numbers of Mamba in a form of its own"

QWEN2 = Family("qwen2", kinds=layer_kinds.windowed_from_layer, window=4096, window_off=True, attention_bias="qkv")
QWEN3_5 = Family(
    "qwen3_5_text",
    kinds=partial(layer_kinds.one_with_attention, 4),
    window_off=True,
    mixer=gated_delta_net,
    qk_norm="each head",
    gates_attention=True,
    float32_norms=True,
    cpu_problem="it wants torchvision for this family, which is not installed",
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe_text",
    expert_width="moe_intermediate_size",
    shared_width=mlp.one_shared_expert,
    gates_shared_expert=True,
)

# The layers of these are known; tests/rlsys/models/test_shapes.py compares them with transformers'.
KNOWN = (
    Family("llama"),
    Family("mistral", all_windowed=True, window=4096),
    Family("mixtral", all_windowed=True, expert_width="intermediate_size"),
    QWEN2,
    replace(
        QWEN2,
        name="qwen2_moe",
        expert_width="moe_intermediate_size",
        shared_width=mlp.one_shared_expert,
        gates_shared_expert=True,
        window_is_mask=True,
    ),
    replace(QWEN2, name="qwen3", attention_bias="none", qk_norm="each head"),
    Family(
        "qwen3_moe",
        all_windowed=True,
        window=4096,
        window_off=True,
        qk_norm="each head",
        expert_width="moe_intermediate_size",
    ),
    Family("gemma", float32_norms=True, tied=True),
    Family(
        "gemma2",
        kinds=partial(layer_kinds.one_in_full, 2),
        window=4096,
        soft_caps=True,
        layer_norms=4,
        float32_norms=True,
        tied=True,
    ),
    Family(
        "gemma3_text",
        kinds=partial(layer_kinds.one_in_full, 6),
        window=4096,
        qk_norm="each head",
        layer_norms=4,
        float32_norms=True,
        tied=True,
    ),
    Family("olmo2", qk_norm="all heads", float32_norms=True),
    Family("olmo3", kinds=partial(layer_kinds.one_in_full, 4), window=4096, qk_norm="all heads", float32_norms=True),
    Family("granite", tool_parser="granite"),
    Family("smollm3", window_off=True, tied=True),
    Family("phi3", all_windowed=True, attention_names=("qkv_proj", "o_proj"), mlp_names=("gate_up_proj", "down_proj")),
    Family(
        "gpt_oss",
        kinds=partial(layer_kinds.one_in_full, 2),
        window=128,
        attention_bias="all",
        sinks=True,
        float32_norms=True,
        expert_width="intermediate_size",
        biased_experts=True,
        cpu_problem="it does not take new experts in a sync",
    ),
    Family(
        "deepseek_v3",
        expert_width="moe_intermediate_size",
        dense_layers=mlp.first_dense_layers,
        shared_width=mlp.several_shared_experts,
        routes_in_float32=True,
        cpu_latent=True,
        # It routes to experts in one way in transformers; in vLLM it does if its configuration says so.
        engine_options=lambda _: {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    replace(
        QWEN3_5_MOE,
        name="qwen3_next",
        mixer=partial(gated_delta_net, fused=True),
        cpu_problem="its linear attention takes bfloat16 only, and computes otherwise than the policy",
    ),
    QWEN3_5,
    QWEN3_5_MOE,
    Family(
        "lfm2",
        kinds=layer_kinds.listed_in_full,
        mixer=short_convolution,
        attention_names=("q_proj", "k_proj", "v_proj", "out_proj"),
        qk_norm="each head",
        tied=True,
        mlp_names=("w1", "w3", "w2"),
        mlp_width=mlp.adjusted_width,
        engine_options=lambda s: {"conv_dim": s.get("hidden_size"), "block_dim": s.get("hidden_size")},
    ),
    Family(
        "granitemoehybrid",
        kinds=layer_kinds.all_mixers,
        mixer=mamba2,
        mlp_names=("input_linear", "output_linear"),
        mlp_width=mlp.stated_shared_width,
        expert_width="intermediate_size",
        shared_width=mlp.stated_shared_width,
        unverified=OWN_FORM,
        tool_parser="granite4",
    ),
    Family("falcon_h1", mixer=partial(mamba2, falcon=True), mixes_beside_attention=True, unverified=OWN_FORM),
)
OTHERS = (
    Family("phimoe", draws_experts=True),
    Family("doge", window_is_mask=True),
    Family("cohere2", window_is_mask=True),
    Family("cohere2_moe", window_is_mask=True),
    Family("llama4_text", window_is_mask=True, unverified="reorders the rows of queries and keys"),
    Family("llama4", tool_parser="llama4_pythonic"),
    Family("deepseek_v2", cpu_latent=True),
    Family("glm4_moe_lite", cpu_latent=True),
    Family("longcat_flash", unverified="scales the weights of norms"),
    Family(
        "minimax_m2",
        engine_options=lambda s: {
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "rotary_dim": s.get("head_dim"),
        },
    ),
    Family("mimo_v2_flash", cpu_problem="it does not read the config.json that transformers writes"),
    Family("kimi_linear", cpu_problem="its linear attention has kernels of GPUs only"),
    Family("bamba", in_vllm=False),
    Family("minimax", in_vllm=False),
    *(Family(name, cpu_problem=MAMBA1, unverified=OWN_FORM) for name in ("mamba", "falcon_mamba", "jamba")),
    *(Family(name, unverified=OWN_FORM) for name in ("mamba2", "nemotron_h", "zamba2")),
    Family("qwen2_vl_text", same_text_as="qwen2"),
    Family("qwen2_5_vl_text", same_text_as="qwen2"),
    Family("qwen3_vl_text", same_text_as="qwen3"),
    Family("qwen3_vl_moe_text", same_text_as="qwen3_moe"),
)
FAMILIES = {family.name: family for family in (*KNOWN, *(replace(other, layers_known=False) for other in OTHERS))}


def family_of(model_type: object) -> Family:
    """Returns the family's record; for one that is not in the table, a record that says nothing."""
    name = str(model_type)
    return FAMILIES.get(name) or Family(name, layers_known=False)
