"""Suggests an option for an unknown name: one that is spelled like it, or our name for another library's."""

import dataclasses
import difflib
from typing import Any

from rlsys.config.schema import Config
from rlsys.config.shorthand import OPTIONS_OF_COMMANDS

# Our option, and its names in verl, TRL and OpenRLHF: the last part of each, or the last two where one is ambiguous.
# configs/MIGRATING.md says where the values differ.
FOREIGN_NAMES = {
    "run.dir": (
        "rollout_data_dir validation_data_dir log_completions default_local_dir output_dir ckpt_path "
        "save_path experiment_name run_name wandb_run_name ckpt.path"
    ),
    "cluster.placement": "hybrid_engine vllm_mode colocate_all_models train.colocate_all",
    "model.path": "model_name_or_path pretrain",
    "data.train": (
        "train_files train_dataset dataset_name dataset_config dataset_train_split prompt_data "
        "prompt_data_probs prompt_split prompt_dataset"
    ),
    "data.prompt_key": "input_key",
    "data.answer_key": "label_key",
    "data.system": "system_prompt",
    "data.template": "input_template",
    "data.as_chat": "apply_chat_template",
    "data.template_options": "apply_chat_template_kwargs chat_template_kwargs",
    "data.shuffle": "shuffle_dataset",
    "data.overlong": "filter_overlong_prompts truncation",
    "trainer.steps": "max_steps total_training_steps total_epochs num_train_epochs num_episodes",
    "trainer.prompts_per_step": (
        "train_batch_size rollout_batch_size generation_batch_size per_device_train_batch_size rollout.batch_size"
    ),
    "trainer.samples_per_prompt": "n num_generations n_samples_per_prompt",
    "trainer.updates_per_step": "ppo_mini_batch_size steps_per_generation gradient_accumulation_steps train.batch_size",
    "trainer.epochs_per_step": "ppo_epochs num_iterations max_epochs",
    "rollout.engines": "vllm_num_engines vllm.num_engines",
    "rollout.tensor_parallel": "tensor_model_parallel_size vllm_tensor_parallel_size",
    "rollout.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "rollout.max_new_tokens": "max_response_length max_completion_length generate_max_len",
    "rollout.gpu_memory": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "policy.ranks": (
        "nnodes n_gpus_per_node actor_num_nodes actor_num_gpus_per_node actor.num_nodes actor.num_gpus_per_node"
    ),
    "policy.sequence_parallel": "ulysses_sequence_parallel_size ring_attn_size sp_size context_parallel_size",
    "policy.offload": (
        "optimizer_offload adam_offload activation_offload enable_activation_offload activation_offloading param_offload"
    ),
    "policy.tokens_per_pack": (
        "ppo_max_token_len_per_gpu train_max_tokens_per_gpu ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
        "micro_train_batch_size use_dynamic_bsz log_prob_micro_batch_size_per_gpu"
    ),
    "policy.compile": "use_torch_compile torch_compile",
    "policy.lora.rank": "lora_rank lora_r",
    "policy.lora.alpha": "lora_alpha",
    "policy.lora.targets": "lora_target_modules target_modules",
    "model.adapter": "lora_adapter_path",
    "policy.lr": "learning_rate actor_learning_rate",
    "policy.lr_schedule": "lr_scheduler_type warmup_style lr_scheduler",
    "policy.warmup_updates": "lr_warmup_steps lr_warmup_steps_ratio warmup_steps warmup_ratio lr_warmup_ratio",
    "policy.betas": "adam_beta2 adam_betas",
    "policy.weight_decay": "l2",
    "policy.clip_grad": "grad_clip max_grad_norm max_norm",
    "reference.kl_coef": "beta kl_loss_coef init_kl_coef kl.init_coef",
    "reference.refresh_every": "ref_model_sync_steps sync_ref_model",
    "reference.kl_in": "use_kl_in_reward use_kl_loss kl.use_loss",
    "reference.kl_target": "target_kl horizon",
    "reward.functions": (
        "custom_reward_function reward_manager reward_model sandbox_fusion reward_funcs reward_weights "
        "reward_model_path reward_pretrain remote_rm_url reward.remote_url gdpo_reward_keys gdpo_reward_weights"
    ),
    "critic.ranks": "critic_num_nodes critic_num_gpus_per_node critic.num_nodes critic.num_gpus_per_node",
    "critic.lr": "critic_learning_rate",
    "critic.alone_steps": "critic_warmup freezing_actor_steps",
    "critic.clip": "cliprange_value value_clip",
    "critic.lam": "lambd",
    "algorithm.advantage": "adv_estimator advantage_estimator advantage.estimator multi_objective_aggregation",
    "algorithm.std": "norm_adv_by_std_in_grpo scale_rewards no_advantage_std_norm",
    "algorithm.loss": "importance_sampling_level loss_mode policy_loss_type",
    "algorithm.clip_low": "cliprange clip_ratio clip_ratio_low epsilon eps_clip eps_clip_low_high",
    "algorithm.clip_high": "clip_ratio_high epsilon_high",
    "algorithm.dual_clip": "clip_ratio_c delta",
    "algorithm.anchor": "bypass_mode",
    "algorithm.normalize": "loss_agg_mode loss_type",
    "algorithm.constant": "loss_scale_factor",
    "algorithm.kl": "kl_loss_type kl_penalty kl_estimator",
    "correction.method": (
        "rollout_is vllm_importance_sampling_correction enable_vllm_is_correction vllm_importance_sampling_mode "
        "rollout_rs"
    ),
    "correction.high": (
        "rollout_is_threshold tis_imp_ratio_cap vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_cap vllm_is_truncated_threshold rollout_rs_threshold"
    ),
    "entropy.coef": "entropy_coef entropy_coeff entropy_loss_coef",
    "entropy.control": "clip_cov_lb clip_cov_ub ppo_kl_coef",
    "entropy.share": "clip_cov_ratio kl_cov_ratio",
    "overlong.mask": "mask_truncated_completions",
    "overlong.buffer": "overlong_buffer overlong_buffer_len",
    "overlong.penalty": "overlong_penalty_factor penalty_factor",
    "dynamic_sampling.enabled": "filter_groups dynamic_filtering",
    "dynamic_sampling.max_rounds": "max_num_gen_batches",
    "pipeline.max_lag": "async_train async_queue_size train.async_enable",
    "eval.datasets": "val_files eval_dataset eval_split dataset_test_split",
    "eval.every": "test_freq val_before_train eval_steps eval_strategy eval_on_start eval.steps",
    "eval.samples": "val_kwargs val_kwargs.n num_generations_eval eval_n_samples_per_prompt eval.n_samples_per_prompt",
    "eval.temperature": "val_kwargs.temperature do_sample eval_temperature",
    "eval.top_p": "val_kwargs.top_p",
    "eval.top_k": "val_kwargs.top_k",
    "checkpoint.every": "save_freq save_steps",
    "checkpoint.keep_last": "save_total_limit max_actor_ckpt_to_keep max_ckpt_num ckpt.max_num",
    "tracking.to": "logger report_to use_wandb use_tensorboard project_name wandb_project",
}
LORA_NAMES = {"lora", "use_peft", "peft_config"}
OPTION_BY_FOREIGN_NAME = {name: option for option, names in FOREIGN_NAMES.items() for name in names.split()}


def option_names(kind: Any = Config, prefix: str = "") -> list[str]:
    """Returns every option by its dotted name."""
    names = []
    for f in dataclasses.fields(kind):
        names += option_names(f.type, f"{prefix}{f.name}.") if dataclasses.is_dataclass(f.type) else [prefix + f.name]
    return names


def suggest_option(key: str) -> str:
    """Returns a sentence for the end of the message about an unknown option."""
    if key == "base":
        return " It belongs in a YAML file, on a line such as `base: tiny_cpu.yaml`."
    if LORA_NAMES & {*key.split(".")} and not translate_option(key):
        return " LoRA is policy.lora here, such as `policy.lora: {rank: 32, alpha: 64}`."
    options, leaf = [*option_names(), "base", *OPTIONS_OF_COMMANDS], key.rpartition(".")[2]
    without_section = [o for o in options if o.rpartition(".")[2] == key]
    if len(without_section) > 1:
        return f" Did you mean one of {', '.join(f'`{o}`' for o in without_section)}?"
    option = (
        translate_option(key)
        or closest_option(key, [o for o in options if o.rpartition(".")[2] == leaf])
        or next(iter(difflib.get_close_matches(key, options, 1, 0.7)), None)
        or next((o for o in options if difflib.get_close_matches(leaf, [o.rpartition(".")[2]], 1, 0.8)), None)
    )
    return f" Did you mean `{option}`?" if option else " `rlsys validate --options` lists them all."


def translate_option(key: str) -> str | None:
    """Returns our option for another library's, by the last part of its name that is known.

    "reward_model.path" -> "reward.functions"
    """
    parts = key.split(".")
    names = [name for i in reversed(range(len(parts))) for name in (".".join(parts[i - 1 : i + 1]), parts[i])]
    return next((OPTION_BY_FOREIGN_NAME[name] for name in names if name in OPTION_BY_FOREIGN_NAME), None)


def closest_option(key: str, candidates: list[str]) -> str | None:
    """Returns the candidate with the most similar name, or else the first."""
    return next(iter(difflib.get_close_matches(key, candidates, 1, 0.7) or candidates), None)
