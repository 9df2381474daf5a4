"""Loads a Hugging Face causal language model for packed sequences."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

from rlsys.config.derived import logprob_chunk
from rlsys.config.schema import Config, PolicyConfig
from rlsys.errors import ConfigError
from rlsys.forward.unpackable import LAYER_ERRORS, refusing_unpackable
from rlsys.models.end_ids import read_end_ids
from rlsys.models.lookup import find_config_file
from rlsys.models.weight_files import find_weight_file, weight_file_problems
from workers.cpu import compiling

RANDOM_OPTIONS = re.compile("drop|jitter")


def load_causal_lm(config: Config, path: str, settings: PolicyConfig, exact: bool = False) -> Any:
    """Loads the model at `path` with packed attention and without dropout. `exact`: with the engine's arithmetic."""
    from rlsys.forward import attention
    from rlsys.forward.decoder import let_model_find_decoder
    from rlsys.forward.exact import use_exact_linear
    from rlsys.forward.mixers import fold_mixers, refuse_inconsistent
    from workers.learner.files.partitioning import gathering_layers

    model_config = load_model_config(path, config.model.trust_remote_code)
    implementation = attention.EXACT_PACKED_ATTENTION if exact else attention.PACKED_ATTENTION
    with refusing_unpackable(path, model_config.model_type, KeyError, ValueError):  # attention that cannot be replaced
        lm = load_weights(path, model_config, settings, implementation, config.model.trust_remote_code)
    let_model_find_decoder(lm)
    if exact:
        use_exact_linear(lm)
    with refusing_unpackable(path, model_config.model_type, *LAYER_ERRORS), gathering_layers(lm.get_decoder()):
        attention.refuse_own_attention(lm.get_decoder())
        fold_mixers(lm.get_decoder())
        refuse_inconsistent(lm.get_decoder())
    if settings.gradient_checkpointing:
        # Dropout is off, so no random numbers need to be kept.
        lm.gradient_checkpointing_enable({"use_reentrant": settings.zero_stage == 3, "preserve_rng_state": False})
    if "activations" in settings.offload:
        offload_layer_inputs(lm, pin_memory=config.cluster.device == "gpu")
    if settings.compile:
        compile_layers(lm)
    return lm


def load_weights(path: str, model_config: Any, settings: PolicyConfig, attention: str, trust_remote_code: bool) -> Any:
    """Loads the model as its authors made it: whole, or with ZeRO 3 this rank's part of every parameter."""
    from workers.learner.files.model_files import describing_files
    from workers.learner.files.partitioning import partition

    stored: dict[str, Any] = {}
    with describing_files(stored) if settings.zero_stage == 3 else contextlib.nullcontext():
        lm = load_complete(path, settings.dtype, trust_remote_code, config=model_config, attn_implementation=attention)
    use_one_dtype(lm, settings.dtype)
    if stored:
        partition(lm, stored, settings)
    elif settings.zero_stage == 3:
        print(
            f"{path} has no safetensors files, so every rank loads the whole model before ZeRO 3 splits it. To save that "
            "memory, store the model as safetensors.",
            flush=True,
        )
    return lm


def use_one_dtype(lm: Any, dtype: str) -> None:
    """Gives all parameters the same dtype, as DeepSpeed does: transformers keeps some in float32.

    Biases of routers have no gradient. They become buffers, which keep their dtype.
    """
    import torch

    from workers.sync.sending import ROUTER_BIASES

    for module in lm.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name in ROUTER_BIASES:
                delattr(module, name)
                module.register_buffer(name, parameter.data)
            else:
                parameter.data = parameter.data.to(getattr(torch, dtype))


def load_complete(path: str, dtype: str, trust_remote_code: bool, **options: Any) -> Any:
    """Has transformers load a model. Raises `ConfigError` unless the files hold all of its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    require_whole_files(path)
    lm, remarks = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
        ignore_mismatched_sizes=True,  # they are refused below, in a sentence
        output_loading_info=True,
        **options,
    )
    require_all_weights(path, remarks)
    return lm


def require_whole_files(path: str) -> None:
    """Raises `ConfigError` if the model is on this machine and one of its files is missing, truncated or damaged."""
    file = find_config_file(path)
    if problems := list(weight_file_problems(file.parent)) if file else []:
        raise ConfigError([f"model.path: {problem}" for problem in problems])


def require_all_weights(path: str, remarks: dict[str, Any]) -> None:
    """Raises `ConfigError` if the files lack weights of the model, or hold some of another shape."""
    advice = "The files are of another model, or not complete. Copy or download all files of the model again."
    for name, stored, needed in sorted(remarks["mismatched_keys"], key=str):
        config = find_config_file(path)
        file = find_weight_file(config.parent, name) if config else path
        raise ConfigError(f"model.path: {file}: {name} is {list(stored)}, and by config.json {list(needed)}. {advice}")
    if missing := sorted(remarks["missing_keys"]):
        more = f" and {len(missing) - 1} more weights" if len(missing) > 1 else ""
        raise ConfigError(f"model.path: the files of {path} do not hold {missing[0]}{more}. {advice}")


def offload_layer_inputs(lm: Any, pin_memory: bool) -> None:
    """Has gradient checkpointing keep the inputs of layers in host memory."""
    from torch.autograd.graph import save_on_cpu

    def offloading(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            with save_on_cpu(pin_memory=pin_memory):
                return checkpoint(*arguments, **keywords)

        return run

    for module in lm.modules():
        if checkpoint := vars(module).get("_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = offloading(checkpoint)


def load_model_config(path: str, trust_remote_code: bool) -> Any:
    """Reads the model's configuration, without dropout and other noise."""
    from transformers import AutoConfig

    model_config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    switch_off_randomness(model_config)
    return model_config


def switch_off_randomness(options: Any) -> None:
    """Sets the rates of dropout and of routers' noise to 0, also in configurations inside this one."""
    for name, value in list(vars(options).items()):
        if isinstance(value, float) and RANDOM_OPTIONS.search(name):
            setattr(options, name, 0.0)
        elif hasattr(value, "model_type"):
            switch_off_randomness(value)


def with_randomness(settings: dict[str, Any], authors: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the rates that were switched off, as its authors had them."""
    restored = dict(settings)
    for name, value in authors.items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict):
            restored[name] = with_randomness(settings[name], value)
        elif isinstance(value, float) and value and RANDOM_OPTIONS.search(name):
            restored[name] = value
    return restored


def compile_layers(lm: Any) -> None:
    """Compiles each layer for any number of tokens. Layers are alike, so what is compiled for one serves all."""
    compiling.allow_compiling("policy.compile", "policy.compile false")
    layers = [module for module in lm.modules() if type(module).__name__ in (lm._no_split_modules or ())]
    if not layers:
        raise ConfigError(
            f"policy.compile: {type(lm).__name__} does not say which of its modules are layers (`_no_split_modules`). "
            "Use policy.compile false."
        )
    for layer in layers:
        layer.compile(dynamic=True)


def load_packed(config: Config, path: str, sampled_by: str = "") -> Any:
    """Loads the model at `path` as `PackedLogprobs`. `sampled_by`: another one, whose completions it scores."""
    from rlsys.forward.logprobs import PackedLogprobs

    r = config.rollout
    lm = load_causal_lm(config, path, config.policy, r.exact)
    end_ids = load_end_ids(config, sampled_by or path) if r.min_new_tokens else ()
    with refusing_unpackable(path, lm.config.model_type, ValueError):
        return PackedLogprobs(
            lm,
            temperature=r.temperature,
            chunk=logprob_chunk(lm.config.get_text_config().vocab_size),
            min_new_tokens=r.min_new_tokens,
            float32_head=config.policy.head_dtype == "float32",
            end_ids=end_ids,
        )


def load_policy(config: Config, path: str) -> Any:
    """Loads the model at `path` as `load_packed` does, with the adapters that policy.lora asks for."""
    packed, lora = load_packed(config, path), config.policy.lora
    if not lora.rank:
        return packed
    import torch

    from rlsys.forward.lora import add_adapters
    from workers.learner.files.adapter_files import load_adapter

    add_adapters(
        packed.lm,
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.targets,
        format=getattr(torch, config.rollout.dtype),
        seed=config.run.seed,
    )
    if config.model.adapter:
        load_adapter(packed.lm, config)
    if config.policy.gradient_checkpointing:
        packed.lm.enable_input_require_grads()  # else a layer whose input has no gradient is not computed again
    return packed


def load_end_ids(config: Config, path: str) -> list[int]:
    """Returns the tokens that end a completion, by the model's files and the configuration."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    return read_end_ids(path, tokenizer, config)
